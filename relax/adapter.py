"""Binds an algorithm to a run: from the samples of a rollout to the loss of a micro-batch.

The arithmetic is `relax_core`'s, bound by its `Pipeline`; what is added here is where its inputs come from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from relax.batches import Evidence, OptimizerBatch, group_ids, sequences_of
from relax.config import Config
from relax.data.samples import Sample
from relax.errors import RelaxError
from relax.megatron.critic import ValueBatch
from relax.megatron.trainer import MicroBatch
from relax.rewards.hooks import load_hook
from relax_core import TokenLoss, Tokens, advantages, corrections, kl, local, losses, reducers, signal, split_by
from relax_core.algorithms import stages
from relax_core.collectives import Reduce, agree
from relax_core.pipeline import Pipeline
from relax_core.rewards import component_matrix

Gather = Callable[[Tensor], tuple[Tensor, slice]]
"""The vectors of all data-parallel ranks as one, and which part of it is this rank's."""


def _alone(values: Tensor) -> tuple[Tensor, slice]:
    return values, slice(len(values))


@attrs.frozen
class Objective:
    """What a run optimizes: its algorithm bound to hyperparameters, and the settings around it.

    `hook` stands in for the algorithm's first stage, where a user brought one.
    """

    pipeline: Pipeline[object]
    config: Config
    hook: Callable[[Sequence[Sample]], Tensor] | None = None
    gather: Gather = _alone

    @classmethod
    def of(cls, config: Config, reduce: Reduce = local, gather: Gather = _alone) -> "Objective":
        """The objective that a configuration describes. `reduce` sums or maximizes over the data-parallel ranks.

        Errors: `RelaxError` for a hook that cannot be imported.
        """
        reducer = stages.token_mean if config.calculate_per_token_loss else None
        bound = Pipeline[object](config.algorithm, config.hyperparameters, reduce=reduce, reducer=reducer)
        return cls(bound, config, load_hook(config), gather)

    def rewards(self, samples: Sequence[Sample]) -> Tensor:
        """What the algorithm reads of the samples' rewards, float64 [samples, components]."""
        matrix = component_matrix([sample.rewards for sample in samples], self.config.reward_keys)
        # The first of an algorithm's own components is the user's reward, the others are attributes of a sample.
        added = self.pipeline.algorithm.traits.component_names[1:]
        beside = [[getattr(sample, name) for name in added] for sample in samples]
        return torch.cat((matrix, matrix.new_tensor(beside).view(len(samples), len(added))), dim=1)

    def carry_signal(self, groups: Sequence[Sequence[Sample]]) -> list[bool]:
        """Whether the algorithm learns anything from each group: what stands as its first stage decides."""
        samples = [sample for group in groups for sample in group]
        if not samples:
            return [False] * len(groups)
        ids = group_ids(samples)
        with self._naming_rewards():
            if self._replaced:
                found = signal.scores_differ(self.scores(samples), ids)
            else:
                found = signal.groups_with_signal(
                    self.pipeline.algorithm, self.pipeline.hyperparameters, self.rewards(samples), ids
                )
        answers = dict(zip(sorted(set(ids.tolist())), found.tolist(), strict=True))
        return [answers[group[0].group] if group else False for group in groups]

    @property
    def _replaced(self) -> bool:
        return self.hook is not None or self.config.disable_rewards_normalization

    def scores(self, samples: Sequence[Sample]) -> Tensor:
        """Stage 1, [samples]: a user's hook, else rewards as they are where that is wanted, else normalized ones."""
        if self.hook is not None:
            return self.hook(samples)
        rewards = self.rewards(samples)
        if self.config.disable_rewards_normalization:
            return rewards[:, 0]
        with self._naming_rewards():
            return self.pipeline.scores(rewards, group_ids(samples))

    @contextmanager
    def _naming_rewards(self) -> Iterator[None]:
        """What an algorithm cannot make of a user's rewards is the user's to mend."""
        try:
            yield
        except ValueError as error:
            keys = " ".join(self.config.reward_keys)
            name = self.pipeline.algorithm.name
            raise RelaxError(f"--advantage-estimator {name}, rewards {keys}: {error}") from error

    def batches(
        self,
        samples: Sequence[Sample],
        sizes: Sequence[int],
        evidence: Evidence | None = None,
        scores: Tensor | None = None,
    ) -> list[OptimizerBatch]:
        """Stage 2: the optimizer batches of a rollout, `sizes` samples each, with their advantages.

        With several data-parallel ranks, all of them at once, each with its share of the samples of every batch, none
        being a possible share. `scores`, [samples], are for shares that split groups: those of `scores` on whole ones.
        What is wrong on any rank is raised on all.
        """
        evidence = evidence or Evidence()
        sequences = sequences_of(samples)
        tokens = sequences.tokens
        reduce = self.pipeline.reduce
        known = agree(
            lambda: self.scores(samples) if scores is None else scores, lambda _: len(sizes), reduce, tokens.mask.device
        )
        estimate = attrs.evolve(self.pipeline, segment=split_by(sizes)).advantages(
            known, tokens, kl=self._kl_in_reward(evidence), values=evidence.values
        )
        totals = reduce(torch.tensor(sizes, dtype=torch.float64), "sum").long().tolist()
        rolled = torch.tensor([lp for sample in samples for lp in sample.completion.log_probs], dtype=torch.float32)
        batches = []
        for share, stop, size, total in zip(sequences.split(sizes), accumulate(sizes), sizes, totals, strict=True):
            span = tokens.token_slice(stop - size, stop)
            part = tokens.select(stop - size, stop)
            batches.append(
                OptimizerBatch(
                    share,
                    part,
                    self._normalized(estimate.advantages[span], part).float(),
                    estimate.returns[span].float(),
                    self.pipeline.weights(part).float(),
                    evidence.cut(span),
                    rolled[span],
                    total,
                )
            )
        return batches

    def loss(self, batch: OptimizerBatch, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Stage 3: the micro-batch's share of the batch's loss, and of its metrics."""
        span = batch.tokens.token_slice(micro.start, micro.stop)
        tokens = batch.tokens.select(micro.start, micro.stop)
        known = batch.evidence.cut(span)
        old = micro.log_probs.detach() if known.old_log_probs is None else known.old_log_probs
        advantages = batch.advantages[span]

        def wrap(per_token: TokenLoss) -> TokenLoss:
            corrected = self._corrected(per_token, micro, old, batch.rollout_log_probs[span], advantages, tokens)
            return self._with_terms(corrected, micro, known, tokens)

        share = tokens.num_samples / max(1, batch.num_samples)
        tangent = None if batch.tangent is None else batch.tangent.cut(span)
        loss, metrics = self.pipeline.loss(
            micro.log_probs, old, advantages, tokens, batch.weights[span], wrap, share=share, tangent=tangent
        )
        return loss, {"loss": loss.detach(), **metrics}

    @property
    def chooses_among_all(self) -> bool:
        """Whether a step must begin with `chosen`: the loss chooses among the tokens of the whole optimizer batch."""
        return self.pipeline.algorithm.traits.whole_batch_loss

    def chosen(self, batch: OptimizerBatch, log_probs: Tensor) -> OptimizerBatch:
        """The batch with the choice made, at the current policy's `log_probs` of this rank's tokens.

        Every data-parallel rank looks at the tokens of all, so that all choose alike; then each keeps its own.
        """
        known = batch.evidence.old_log_probs
        old = log_probs if known is None else known
        (now, own), (before, _), (advantages, _) = map(self.gather, (log_probs, old, batch.advantages))
        (lengths, _), (mask, _) = map(self.gather, (batch.tokens.lengths, batch.tokens.mask.long()))
        tangent = self.pipeline.tangent(now, before, advantages, Tokens(lengths, mask.bool()))
        return attrs.evolve(batch, tangent=tangent.cut(own))

    def value_loss(self, batch: OptimizerBatch, micro: ValueBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The critic's loss, weighed like the policy's: the micro-batch's share of it, and of its metrics."""
        span = batch.tokens.token_slice(micro.start, micro.stop)
        before = batch.evidence.cut(span).values
        assert before is not None, "advantages were made of values"
        tokens = batch.tokens.select(micro.start, micro.stop)
        loss, metrics = self.pipeline.value_loss(micro.values, before, batch.returns[span], tokens, batch.weights[span])
        return loss, {"value_loss": loss.detach(), **metrics}

    def _corrected(
        self, loss: TokenLoss, micro: MicroBatch, old: Tensor, rolled: Tensor, advantages: Tensor, tokens: Tokens
    ) -> TokenLoss:
        """The factors that the configuration puts before the algorithm's loss."""
        config = self.config
        if config.use_tis:
            low, high = config.tis_clip_low, config.tis_clip
            loss = corrections.truncated_importance(loss, old, rolled, tokens, low=low, high=high)
        if config.use_opsm:
            delta = config.opsm_delta
            loss = corrections.off_policy_masking(loss, micro.log_probs, old, advantages, tokens, delta=delta)
        return loss

    def _with_terms(self, loss: TokenLoss, micro: MicroBatch, known: Evidence, tokens: Tokens) -> TokenLoss:
        """The terms that the configuration adds to it: entropy, and the KL from the reference."""
        config = self.config
        # With coefficient 0 this adds no term, and the metric.
        entropy = micro.entropy if config.entropy_coef else micro.entropy.detach()
        loss = corrections.with_entropy(loss, entropy, tokens, coef=config.entropy_coef)
        if config.use_kl_loss:
            assert known.ref_log_probs is not None, "who asks for a KL loss keeps a reference"
            # The samples are the old policy's: its KL is another's unless they are weighed by the ratio.
            old = known.old_log_probs
            importance = None if old is None else losses.ratio_of(micro.log_probs.detach() - old)
            term = kl.loss(micro.log_probs, known.ref_log_probs, config.kl_loss_type, importance)
            loss = corrections.with_kl(loss, term, tokens, coef=config.kl_loss_coef)
        return loss

    def _kl_in_reward(self, evidence: Evidence) -> Tensor | None:
        if not self.config.kl_coef:
            return None
        assert evidence.old_log_probs is not None, "a KL in the reward is the policy's that is improved"
        assert evidence.ref_log_probs is not None, "who asks for a KL in the reward keeps a reference"
        return kl.estimate(evidence.old_log_probs, evidence.ref_log_probs, self.config.kl_loss_type)

    def _normalized(self, estimate: Tensor, tokens: Tokens) -> Tensor:
        if not self.config.normalize_advantages:
            return estimate
        kind = self.pipeline.algorithm.traits.advantage_normalization
        return advantages.normalize(estimate, tokens, kind, reduce=self.pipeline.reduce)


def imitation_loss(tokens: Tokens, weights: Tensor, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of SFT: the mean negative log-prob of the demonstrations' tokens."""
    span = tokens.token_slice(micro.start, micro.stop)
    loss = reducers.weighted_sum(-micro.log_probs, weights[span])
    entropy = reducers.weighted_sum(micro.entropy.detach(), weights[span])
    return loss, {"loss": loss.detach(), "entropy": entropy}
