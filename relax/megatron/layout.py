"""How the processes of a job share a model: what is split over how many ranks, and whether it can be."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from megatron.core import parallel_state

from relax.megatron import vocabulary

if TYPE_CHECKING:
    from relax.megatron.model import ModelConfig


@attrs.frozen
class Layout:
    """Ranks that share a model: its matrices (`tensor`), its layers (`pipeline`), its sequences (`context`).

    The job's processes divide into data-parallel replicas of `tensor * pipeline * context` ranks each. A layout decides
    memory and speed, never the result of a step.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @classmethod
    def current(cls) -> "Layout":
        """That of the job which this process is part of."""
        return cls(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )

    @property
    def replica(self) -> int:
        """How many ranks hold one replica of the model together."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        """How many data-parallel replicas `world_size` processes make."""
        return world_size // self.replica

    def job_faults(self, world_size: int) -> Iterator[str]:
        """A line for each reason why `world_size` processes cannot be laid out like this."""
        too_small = [f"{flag} {size}: must be at least 1" for flag, size in self._sizes() if size < 1]
        yield from too_small
        if not too_small and world_size % self.replica:
            sizes = " x ".join(f"{flag} {size}" for flag, size in self._sizes())
            yield f"{sizes}: {self.replica} ranks for a model do not divide the job's {world_size} processes"

    def model_faults(self, model: "ModelConfig") -> Iterator[str]:
        """A line for each part of `model` that cannot be split like this."""
        parts = {
            "query heads (--num-attention-heads)": model.num_attention_heads,
            "key-value heads (--num-query-groups)": model.num_query_groups,
            "columns of the feed-forward layers (--ffn-hidden-size)": model.ffn_hidden_size,
        }
        for part, amount in parts.items():
            if amount % self.tensor:
                yield f"{_TENSOR} {self.tensor}: does not divide the {amount} {part}"
        if not vocabulary.suffices(model.vocab_size, self.tensor):
            yield f"{_TENSOR} {self.tensor}: leaves a rank without any of the {model.vocab_size} token ids"
        if model.num_layers % self.pipeline:
            yield f"{_PIPELINE} {self.pipeline}: does not divide the {model.num_layers} layers (--num-layers)"

    def check_job(self, world_size: int) -> None:
        """Raises ValueError that lists everything `job_faults` finds."""
        _raise("this layout does not fit the job", self.job_faults(world_size))

    def check_model(self, model: "ModelConfig") -> None:
        """Raises ValueError that lists everything `model_faults` finds."""
        _raise("this layout does not fit the model", self.model_faults(model))

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return (_TENSOR, self.tensor), (_PIPELINE, self.pipeline), (_CONTEXT, self.context)


ONE_RANK = Layout()
"""Every rank holds the whole model."""

_TENSOR = "--tensor-model-parallel-size"
_PIPELINE = "--pipeline-model-parallel-size"
_CONTEXT = "--context-parallel-size"


def _raise(what: str, faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        raise ValueError("; ".join([f"{what}: {found[0]}", *found[1:]]))
