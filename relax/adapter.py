"""Binds an algorithm to a run: from the samples of a rollout to the loss of a micro-batch.

The arithmetic is `relax_core`'s; what is added here is where its inputs come from.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from relax.config import Config
from relax.data.samples import Sample, Sequences
from relax.megatron.trainer import MicroBatch
from relax_core import Algorithm, Tokens, local, reducers, signal, split_by
from relax_core.collectives import Reduce
from relax_core.rewards import component_matrix


@attrs.frozen
class OptimizerBatch:
    """What one optimizer step trains on. `advantages`, `old_log_probs` and `weights` are [tokens].

    `old_log_probs` is None where the step is the rollout's first and only one: the policy that is improved is then
    the one being trained, and its log-probs are the current ones, without gradient.
    """

    sequences: Sequences
    tokens: Tokens
    advantages: Tensor
    weights: Tensor
    old_log_probs: Tensor | None


@attrs.frozen
class Objective:
    """An algorithm with its hyperparameters, the keys of the rewards it reads, and the world's `reduce`."""

    algorithm: Algorithm
    hyperparameters: object
    keys: tuple[str, ...]
    normalize_rewards: bool = True
    per_token: bool = False
    entropy_coef: float = 0.0
    reduce: Reduce = local

    @classmethod
    def of(cls, config: Config, reduce: Reduce = local) -> "Objective":
        """The objective that a configuration describes."""
        return cls(
            config.algorithm,
            config.hyperparameters,
            config.reward_keys,
            not config.disable_rewards_normalization,
            config.calculate_per_token_loss,
            config.entropy_coef,
            reduce,
        )

    def rewards(self, samples: Sequence[Sample]) -> Tensor:
        """What the algorithm reads of the samples' rewards, float64 [samples, components]."""
        return component_matrix([sample.rewards for sample in samples], self.keys)

    def carry_signal(self, groups: Sequence[Sequence[Sample]]) -> list[bool]:
        """Whether the algorithm learns anything from each group: its own first stage decides."""
        samples = [sample for group in groups for sample in group]
        found = signal.groups_with_signal(self.algorithm, self.hyperparameters, self.rewards(samples), group_ids(samples))
        answers = dict(zip(sorted({group[0].group for group in groups}), found.tolist(), strict=True))
        return [answers[group[0].group] for group in groups]

    def scores(self, samples: Sequence[Sample]) -> Tensor:
        """Stage 1, [samples]: rewards normalized within their groups."""
        rewards = self.rewards(samples)
        if not self.normalize_rewards:
            return rewards[:, 0]
        return self.algorithm.normalize_rewards(self.hyperparameters, rewards, group_ids(samples))

    def batches(
        self, samples: Sequence[Sample], sizes: Sequence[int], old_log_probs: Tensor | None
    ) -> list[OptimizerBatch]:
        """Stage 2: the optimizer batches of a rollout, `sizes` samples each, with their advantages."""
        sequences = sequences_of(samples)
        tokens = sequences.tokens
        advantages = self.algorithm.estimate_advantages(
            self.hyperparameters, self.scores(samples), tokens, segment=split_by(sizes), reduce=self.reduce
        ).advantages.float()
        batches = []
        for stop, size in zip(accumulate(sizes), sizes, strict=True):
            span = tokens.token_slice(stop - size, stop)
            part = tokens.select(stop - size, stop)
            batches.append(
                OptimizerBatch(
                    sequences.select(stop - size, stop),
                    part,
                    advantages[span],
                    self._weights(part),
                    None if old_log_probs is None else old_log_probs[span],
                )
            )
        return batches

    def loss(self, batch: OptimizerBatch, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Stage 3: the micro-batch's share of the batch's loss, and of its metrics."""
        span = batch.tokens.token_slice(micro.start, micro.stop)
        tokens = batch.tokens.select(micro.start, micro.stop)
        old = micro.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs[span]
        result = self.algorithm.policy_loss(
            self.hyperparameters, micro.log_probs, old, batch.advantages[span], tokens
        )
        weights = batch.weights[span]
        per_token = result.loss - self.entropy_coef * micro.entropy if self.entropy_coef else result.loss
        loss = reducers.weighted_sum(per_token, weights)
        shown = {"loss": loss.detach(), "entropy": reducers.weighted_sum(micro.entropy.detach(), weights)}
        share = tokens.num_samples / batch.tokens.num_samples
        for name, value in result.metrics.items():
            shown[name] = reducers.weighted_sum(value, weights) if value.dim() else value * share
        return loss, shown

    def _weights(self, tokens: Tokens) -> Tensor:
        reducer = reducers.token_mean if self.per_token else reducers.sample_mean
        return reducer(tokens, reduce=self.reduce).float()


def imitation_loss(batch_tokens: Tokens, weights: Tensor, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of SFT: the mean negative log-prob of the demonstrations' tokens."""
    span = batch_tokens.token_slice(micro.start, micro.stop)
    loss = reducers.weighted_sum(-micro.log_probs, weights[span])
    entropy = reducers.weighted_sum(micro.entropy.detach(), weights[span])
    return loss, {"loss": loss.detach(), "entropy": entropy}


def group_ids(samples: Sequence[Sample]) -> Tensor:
    """The samples' groups, int64 [samples]."""
    return torch.tensor([sample.group for sample in samples], dtype=torch.int64)


def sequences_of(samples: Sequence[Sample]) -> Sequences:
    """The samples' tokens, as the trainer takes them."""
    return Sequences(
        tuple(sample.prompt_ids for sample in samples), tuple(sample.completion.token_ids for sample in samples)
    )

