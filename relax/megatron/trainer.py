"""The trainer: log-probs of given responses, and optimizer steps on any loss of them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from relax.data.samples import Sequences
from relax.megatron import hf
from relax.megatron.batch import PaddedBatch
from relax.megatron.batching import Batching
from relax.megatron.learner import Learner, Update, load_sharded, sharded
from relax.megatron.model import ModelConfig, PolicyModel, build_model
from relax.megatron.optimizer import OptimizerConfig

_REFERENCE = "reference."


@attrs.frozen
class LogProbs:
    """Log-prob of every response token and entropy of the distribution it was drawn from, in nats, [tokens] each.

    On the CPU, wherever the model is.
    """

    log_probs: Tensor
    entropy: Tensor


@attrs.frozen
class MicroBatch:
    """Samples `start` to `stop` of the batch, with the log-probs and entropies of their response tokens: [tokens].

    On the CPU, as the rest of the batch is; a gradient finds its way back to the model.
    """

    start: int
    stop: int
    log_probs: Tensor
    entropy: Tensor


LossFunction = Callable[[MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]


class Trainer(Learner[PolicyModel]):
    """A policy, its optimizer, and the two things done with them.

    Log-probs are those of softmax(logits / `temperature`). With `reference`, a second, frozen model stands beside the
    policy, with the weights of the last `keep_reference`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        *,
        seed: int,
        batching: Batching,
        temperature: float = 1.0,
        reference: bool = False,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive to have log-probs, got {temperature}")
        self.reference = build_model(model_config, seed).requires_grad_(False) if reference else None
        super().__init__(build_model(model_config, seed), model_config, optimizer_config, batching=batching)
        self.temperature = temperature

    @property
    def temperature(self) -> float:
        """Of the distribution that log-probs are of."""
        return self.model.temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        for model in (self.model, self.reference):
            if model is not None:
                model.temperature = temperature

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over Hugging Face weights, in the policy and in the reference, if any. Errors: as `hf.load`."""
        hf.load(self.model, self.model_config, weights)
        self._optimizer.reload_model_params()  # where it steps copies of the weights in a higher precision
        self.keep_reference()

    def keep_reference(self) -> None:
        """The policy as it is now becomes the reference, where there is one."""
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())

    def log_probs(self, sequences: Sequences) -> LogProbs:
        """Log-probs and entropies of all response tokens, back to back, without gradient."""
        return self._log_probs(sequences, self._ddp)

    def reference_log_probs(self, sequences: Sequences) -> LogProbs:
        """`log_probs` under the reference. Raises RuntimeError where there is none."""
        if self.reference is None:
            raise RuntimeError("this trainer was built without a reference")
        return self._log_probs(sequences, self.reference)

    def update(self, sequences: Sequences, loss: LossFunction) -> Update:
        """One optimizer step down the gradient of the sum of `loss` over all micro-batches and data-parallel ranks.

        `loss` returns a micro-batch's share of the whole loss, weights included: shares are added up and nothing is
        averaged. Its metrics are scalars, added up likewise.

        Raises RelaxError, with the weights as they were, when the gradient is not finite.
        """

        def share(batch: PaddedBatch, read: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            return loss(MicroBatch(batch.start, batch.stop, *read))

        return self._update(sequences, share)

    def state(self, *, is_loading: bool = False) -> dict[str, object]:
        """That of every learner, and the reference's weights."""
        reference = {} if self.reference is None else {"reference": sharded(self.reference, _REFERENCE)}
        return {**super().state(is_loading=is_loading), **reference}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` described and a checkpoint brought back."""
        super().load_state(state)
        if self.reference is not None:
            load_sharded(self.reference, _REFERENCE, state["reference"])

    def _log_probs(self, sequences: Sequences, model: torch.nn.Module) -> LogProbs:
        return LogProbs(*self._forward(sequences, lambda _, read: (read[0], read[1]), model, outputs=2))
