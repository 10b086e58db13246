"""Binds an algorithm to a run: from the samples of a rollout to the loss of a micro-batch.

The arithmetic is `relax_core`'s; what is added here is where its inputs come from.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from relax.config import Config
from relax.data.samples import Sample, Sequences
from relax.errors import RelaxError
from relax.megatron.trainer import MicroBatch
from relax_core import Algorithm, TokenLoss, Tokens, advantages, corrections, local, reducers, signal, split_by
from relax_core.collectives import Reduce
from relax_core.rewards import component_matrix


@attrs.frozen
class OptimizerBatch:
    """What one optimizer step trains on, [tokens] each: advantages, the reducer's weights, log-probs of before.

    `old_log_probs` is None where the step is the rollout's first and only one: the policy that is improved is then
    the one being trained, and its log-probs are the current ones, without gradient. `rollout_log_probs` are what the
    engine reported.
    """

    sequences: Sequences
    tokens: Tokens
    advantages: Tensor
    weights: Tensor
    old_log_probs: Tensor | None
    rollout_log_probs: Tensor


@attrs.frozen
class Objective:
    """What a run optimizes: its algorithm with hyperparameters, and the settings around it.

    `reduce` sums or maximizes over the data-parallel ranks.
    """

    algorithm: Algorithm[object]
    hyperparameters: object
    config: Config
    reduce: Reduce = local

    @classmethod
    def of(cls, config: Config, reduce: Reduce = local) -> "Objective":
        """The objective that a configuration describes."""
        return cls(config.algorithm, config.hyperparameters, config, reduce)

    def rewards(self, samples: Sequence[Sample]) -> Tensor:
        """What the algorithm reads of the samples' rewards, float64 [samples, components]."""
        return component_matrix([sample.rewards for sample in samples], self.config.reward_keys)

    def carry_signal(self, groups: Sequence[Sequence[Sample]]) -> list[bool]:
        """Whether the algorithm learns anything from each group: its own first stage decides."""
        samples = [sample for group in groups for sample in group]
        ids = group_ids(samples)
        with self._naming_rewards():
            found = signal.groups_with_signal(self.algorithm, self.hyperparameters, self.rewards(samples), ids)
        answers = dict(zip(sorted(set(ids.tolist())), found.tolist(), strict=True))
        return [answers[group[0].group] for group in groups]

    def scores(self, samples: Sequence[Sample]) -> Tensor:
        """Stage 1, [samples]: rewards normalized within their groups."""
        rewards = self.rewards(samples)
        if self.config.disable_rewards_normalization:
            return rewards[:, 0]
        with self._naming_rewards():
            return self.algorithm.normalize_rewards(self.hyperparameters, rewards, group_ids(samples))

    @contextmanager
    def _naming_rewards(self) -> Iterator[None]:
        """What an algorithm cannot make of a user's rewards is the user's to mend."""
        try:
            yield
        except ValueError as error:
            keys = " ".join(self.config.reward_keys)
            raise RelaxError(f"--advantage-estimator {self.algorithm.name}, rewards {keys}: {error}") from error

    def batches(
        self, samples: Sequence[Sample], sizes: Sequence[int], old_log_probs: Tensor | None
    ) -> list[OptimizerBatch]:
        """Stage 2: the optimizer batches of a rollout, `sizes` samples each, with their advantages."""
        sequences = sequences_of(samples)
        tokens = sequences.tokens
        estimate = self.algorithm.estimate_advantages(
            self.hyperparameters, self.scores(samples), tokens, segment=split_by(sizes), reduce=self.reduce
        ).advantages
        rolled = torch.tensor([lp for sample in samples for lp in sample.completion.log_probs], dtype=torch.float32)
        batches = []
        for share, stop, size in zip(sequences.split(sizes), accumulate(sizes), sizes, strict=True):
            span = tokens.token_slice(stop - size, stop)
            part = tokens.select(stop - size, stop)
            batches.append(
                OptimizerBatch(
                    share,
                    part,
                    self._normalized(estimate[span], part).float(),
                    self._weights(part),
                    None if old_log_probs is None else old_log_probs[span],
                    rolled[span],
                )
            )
        return batches

    def loss(self, batch: OptimizerBatch, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Stage 3: the micro-batch's share of the batch's loss, and of its metrics."""
        span = batch.tokens.token_slice(micro.start, micro.stop)
        tokens = batch.tokens.select(micro.start, micro.stop)
        old = micro.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs[span]
        per_token = self._corrected(
            self.algorithm.policy_loss(self.hyperparameters, micro.log_probs, old, batch.advantages[span], tokens),
            micro,
            old,
            batch.rollout_log_probs[span],
            batch.advantages[span],
            tokens,
        )
        weights = batch.weights[span]
        loss = reducers.weighted_sum(per_token.loss, weights)
        # A scalar metric is the same for every micro-batch of a step only where there is one; else: by samples.
        share = tokens.num_samples / batch.tokens.num_samples
        metrics = {
            name: reducers.weighted_sum(value, weights) if value.ndim else value * share
            for name, value in per_token.metrics.items()
        }
        return loss, {"loss": loss.detach(), **metrics}

    def _corrected(
        self, loss: TokenLoss, micro: MicroBatch, old: Tensor, rolled: Tensor, advantages: Tensor, tokens: Tokens
    ) -> TokenLoss:
        """The factors and terms that the configuration wraps around the algorithm's loss: factors first."""
        config = self.config
        if config.use_tis:
            low, high = config.tis_clip_low, config.tis_clip
            loss = corrections.truncated_importance(loss, old, rolled, tokens, low=low, high=high)
        if config.use_opsm:
            delta = config.opsm_delta
            loss = corrections.off_policy_masking(loss, micro.log_probs, old, advantages, tokens, delta=delta)
        # With coefficient 0 this adds no term, and the metric.
        entropy = micro.entropy if config.entropy_coef else micro.entropy.detach()
        return corrections.with_entropy(loss, entropy, tokens, coef=config.entropy_coef)

    def _normalized(self, estimate: Tensor, tokens: Tokens) -> Tensor:
        if not self.config.normalize_advantages:
            return estimate
        kind = self.algorithm.traits.advantage_normalization
        return advantages.normalize(estimate, tokens, kind, reduce=self.reduce)

    def _weights(self, tokens: Tokens) -> Tensor:
        if self.config.calculate_per_token_loss:
            return reducers.token_mean(tokens, reduce=self.reduce).float()
        return self.algorithm.reducer(self.hyperparameters, tokens, reduce=self.reduce).float()


def imitation_loss(tokens: Tokens, weights: Tensor, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of SFT: the mean negative log-prob of the demonstrations' tokens."""
    span = tokens.token_slice(micro.start, micro.stop)
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
