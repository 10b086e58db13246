"""A Megatron model's weights from and to Hugging Face's, in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from relax.errors import RelaxError
from relax.megatron.hf.files import SafetensorsFiles
from relax.megatron.hf.rules import Shape
from relax.megatron.hf.shards import Shard, shapes, to_hugging_face, to_megatron
from relax.megatron.model import ModelConfig, PolicyModel

T = TypeVar("T")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def shard_of(model: PolicyModel) -> Shard:
    """What of the whole model this rank's `model` holds. Must run inside `megatron_process`."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]  # Megatron counts from 1
    return Shard(
        layers=range(numbers[0], numbers[-1] + 1) if numbers else range(0),
        has_embedding=model.pre_process,
        has_output=model.post_process,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def export(model: PolicyModel, config: ModelConfig) -> dict[str, Tensor]:
    """The whole model's weights under Hugging Face's names: all that `stream` brings."""
    return dict(stream(model, config))


def stream(model: PolicyModel, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The whole model's weights under Hugging Face's names, one by one; a tied output layer is left out.

    Detached. Where this rank holds the whole model, they are partly views into it: clone what must outlive the next
    optimizer step. Where several ranks share a model, each of them must run this to its end, and gets every tensor, on
    the CPU.
    """
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        yield from to_hugging_face(config, [shard_of(model)], lambda name, _: [held[name]])
        return

    def fetch(name: str, members: Sequence[int]) -> list[Tensor]:
        # A copy, since a view would be sent with all that it is a view of.
        share = held[name].to("cpu", copy=True) if group.rank() in members else None
        shares = _gather(share, group)
        return [share for share in map(shares.__getitem__, members) if share is not None]

    yield from to_hugging_face(config, _gather(shard_of(model), group), fetch)


def _gather(value: T, group: distributed.ProcessGroup) -> list[T]:
    gathered = [value] * group.size()
    distributed.all_gather_object(gathered, value, group=group)
    return gathered


@torch.no_grad()
def load(model: PolicyModel, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Writes this rank's share of a full Hugging Face `state` into `model`, in the model's own precision.

    A mapping that reads its tensors when asked is read one tensor at a time. Raises RelaxError that lists every missing
    tensor, every unexpected one and every wrong shape; the model is then unchanged. A tied output layer may be among
    them if it equals the embedding.
    """
    if isinstance(state, SafetensorsFiles):
        faults = list(misfits(config, state.shapes, state.place))
    else:
        faults = list(misfits(config, {name: tuple(tensor.shape) for name, tensor in state.items()}))
    if faults:
        raise RelaxError("these weights do not fit the model: " + "; ".join(faults))
    check_tied(config, state)
    held = dict(model.named_parameters())
    for name, tensor in to_megatron(config, state, shard_of(model)):
        held[name].copy_(tensor)


def misfits(
    config: ModelConfig, found: Mapping[str, Shape], place: Callable[[str], str] | None = None
) -> Iterator[str]:
    """A line for each tensor that is missing, unexpected or of a wrong shape; `place` says in which file."""
    expected = shapes(config)

    def at(name: str) -> str:
        return "" if place is None else f"{place(name)}: "

    for name in dict.fromkeys((*expected, *found)):
        wanted = expected.get(EMBEDDING if name == HEAD and config.tie_embeddings else name)
        if name not in found:
            yield f"{at(name)}missing {name}"
        elif wanted is None:
            yield f"{at(name)}unexpected {name}"
        elif found[name] != wanted:
            yield f"{at(name)}{name} has shape {found[name]}, expected {wanted}"


def check_tied(config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Raises RelaxError where an output layer is given that is not the embedding it is tied to."""
    if config.tie_embeddings and HEAD in state and not torch.equal(state[HEAD], state[EMBEDDING]):
        raise RelaxError(f"{HEAD} differs from {EMBEDDING}, but tie_embeddings is set")
