"""What an objective is told of a rollout, and what it makes of it for one optimizer step."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from relax.data.samples import Sample, Sequences
from relax_core import Tokens
from relax_core.pipeline import Tangent


@attrs.frozen
class Evidence:
    """What models say of the response tokens of a rollout, [tokens] each; None where nobody asked for it.

    `old_log_probs` are those of the policy that is improved, `ref_log_probs` those of the reference, `values` the
    critic's.
    """

    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None

    def cut(self, span: slice) -> "Evidence":
        """That of the tokens in `span`."""
        return Evidence(
            *(None if part is None else part[span] for part in (self.old_log_probs, self.ref_log_probs, self.values))
        )


@attrs.frozen
class OptimizerBatch:
    """What one optimizer step trains on, [tokens] each: advantages, returns, the reducer's weights, log-probs.

    Without old log-probs in the `evidence`, the step is the rollout's first and only one: the policy that is improved
    is then the one being trained, and its log-probs are the current ones, without gradient. `rollout_log_probs` are
    what the engine reported. `num_samples` are those of all data-parallel ranks, of which this is one's share.
    `tangent`: see `Objective.chosen`.
    """

    sequences: Sequences
    tokens: Tokens
    advantages: Tensor
    returns: Tensor
    weights: Tensor
    evidence: Evidence
    rollout_log_probs: Tensor
    num_samples: int
    tangent: Tangent | None = None


def group_ids(samples: Sequence[Sample]) -> Tensor:
    """The samples' groups, int64 [samples]."""
    return torch.tensor([sample.group for sample in samples], dtype=torch.int64)


def sequences_of(samples: Sequence[Sample]) -> Sequences:
    """The samples' tokens, as the trainer takes them."""
    masks = None
    if any(sample.mask is not None for sample in samples):
        masks = tuple(sample.mask or (True,) * len(sample.completion.token_ids) for sample in samples)
    prompts = tuple(sample.prompt_ids for sample in samples)
    return Sequences(prompts, tuple(sample.completion.token_ids for sample in samples), masks)
