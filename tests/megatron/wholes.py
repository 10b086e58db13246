"""What the ranks of a job hold, put together to whole tensors: the rules of tests, apart from those of the source."""

import re
from collections.abc import Mapping, Sequence

import attrs
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

# Along which axis tensor-parallel ranks hold parts; all other tensors are the same on each.
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_fc1.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


@attrs.frozen
class Part:
    """A rank's weights and gradients, and where it stands."""

    tensor: int
    pipeline: int
    layers: int
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def part_of(model: nn.Module) -> Part:
    named = dict(model.named_parameters())
    return Part(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        len(model.decoder.layers),
        {name: parameter.detach().clone() for name, parameter in named.items()},
        {name: parameter.main_grad.clone() for name, parameter in named.items()},
    )


def whole(parts: Sequence[Part], kind: str, *, split_output: bool = True) -> dict[str, Tensor]:
    """The named tensors of one process, from all ranks' parts; checks that what ranks share is the same on all."""
    shards: dict[str, dict[int, Tensor]] = {}
    for part in parts:
        for name, value in getattr(part, kind).items():
            first = part.pipeline * part.layers
            where = re.sub(r"layers\.(\d+)", lambda number, first=first: f"layers.{int(number[1]) + first}", name)
            known = shards.setdefault(where, {}).setdefault(part.tensor, value)
            torch.testing.assert_close(value, known, rtol=0, atol=0, msg=lambda m, n=where: f"replicas of {n}: {m}")
    return {name: _joined(name, [held[rank] for rank in sorted(held)], split_output) for name, held in shards.items()}


def _joined(name: str, held: list[Tensor], split_output: bool) -> Tensor:
    if name.endswith("linear_fc1.weight"):
        gates, ups = zip(*(shard.chunk(2) for shard in held), strict=True)
        return torch.cat((*gates, *ups))
    if name.endswith(ROWS) and (split_output or not name.startswith("output_layer")):
        return torch.cat(held)
    if name.endswith(COLUMNS):
        return torch.cat(held, 1)
    for other in held[1:]:
        torch.testing.assert_close(
            other, held[0], rtol=0, atol=0, msg=lambda m: f"{name} on tensor-parallel ranks: {m}"
        )
    return held[0]


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-5) -> None:
    """Tensor by tensor, the norm of the difference is at most `within` of the norm; found rows may end with padding."""
    tied = set(found) - set(expected)
    assert tied <= {"output_layer.weight"}, tied
    for name in tied:  # a tied output layer, which one process does not list
        torch.testing.assert_close(found[name], found["embedding.word_embeddings.weight"], rtol=0, atol=0)
    assert set(expected) <= set(found)
    for name, value in expected.items():
        ours, padding = found[name][: len(value)], found[name][len(value) :]
        assert not padding.any(), name
        distance = float((ours - value).double().norm())
        assert distance <= within * float(value.double().norm()), f"{name}: {distance} of {float(value.norm())}"
