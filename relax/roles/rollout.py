"""The rollout role: draws prompts, samples responses, has them rewarded, and keeps the groups worth training on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import attrs

from relax.agreement import stage
from relax.data.prompts import DrawOrder
from relax.data.samples import Sample
from relax.data.seeds import derived_seed, seed_global
from relax.inputs import Input
from relax.rewards.loader import RewardFunction
from relax.rollout.filter import Filter
from relax.rollout.sampling import Group, Prompts, Sampler
from relax.rollout.sharing import Share, alone
from relax.runtime.clock import Clock
from relax_core.rewards import component_matrix


@attrs.frozen
class Rollout:
    """What one rollout brought: the groups to train on, those that were filtered out, and where the draws ended.

    `silent` counts the groups, kept or not, from which the algorithm learns nothing; `reasons` says why groups were
    dropped. `aborted` samples have no reward; they belong to no group any more and have no vote in one.
    """

    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]
    silent: int
    position: int
    aborted: tuple[Sample, ...] = ()
    reasons: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples to train on, group after group."""
        return tuple(sample for group in self.kept for sample in group)

    @property
    def generated(self) -> tuple[Sample, ...]:
        """Every sample that was paid for."""
        return (*(sample for group in (*self.kept, *self.dropped) for sample in group), *self.aborted)

    def sizes(self, batches: int) -> list[int]:
        """Samples in each optimizer batch: whole groups, spread over `batches` as evenly as they go; none is empty."""
        batches = min(batches, len(self.kept))
        ends = [len(self.kept) * part // batches for part in range(batches + 1)] if batches else []
        return [sum(map(len, self.kept[start:stop])) for start, stop in pairwise(ends)]


@attrs.frozen
class SamplingPlan:
    """How many prompts and responses a rollout wants. `redraws`: how often dropped groups are replaced by new draws.

    A group of which fewer than `least` responses got a reward is dropped. With a `greedy_key`, each prompt is answered
    greedily too, and the samples are told that response's reward under the key; a group without it is dropped.
    """

    prompts: int
    responses: int
    temperature: float
    redraws: int
    least: int = 1
    greedy_key: str | None = None


@attrs.frozen
class RolloutRole:
    """Owns the prompts and the engine. What it draws follows from the seed and a position, and from nothing else."""

    sampler: Sampler
    prompts: Prompts
    reward: RewardFunction
    carries_signal: Callable[[Sequence[Group]], list[bool]]
    keep: Filter
    plan: SamplingPlan
    seed: int
    share: Share = alone

    @property
    def supplies(self) -> frozenset[Input]:
        """Groups whole, with the engine's log-probs and the rewards that the reward function is held to."""
        found = {Input.REWARD, Input.LENGTH, Input.GROUPS, Input.ROLLOUT_LOG_PROBS}
        if len(self.reward.keys) > 1:
            found.add(Input.COMPONENTS)
        if self.plan.greedy_key is not None:
            found.add(Input.GREEDY_REWARD)
        return frozenset(found)

    def collect(self, position: int, clock: Clock) -> Rollout:
        """Draw from `position` on until the plan's number of groups is kept or its redraws are used up."""
        kept: list[Group] = []
        dropped: list[Group] = []
        aborted: list[Sample] = []
        reasons: Counter[str] = Counter()
        silent = 0
        for _ in range(1 + self.plan.redraws):
            missing = self.plan.prompts - len(kept)
            groups = self._draw(position, missing, clock)
            with clock.phase("reward"), stage(f"the choice among the draws from {position} on"):
                seed_global(self.seed, "choice", position)
                aborted += (sample for group in groups for sample in group if sample.rewards is None)
                voting = [tuple(sample for sample in group if sample.rewards is not None) for group in groups]
                whole = [group for group in voting if len(group) >= self.plan.least]
                small = [group for group in voting if len(group) < self.plan.least]
                dropped += small
                signal = self.carries_signal(whole)
                silent += signal.count(False) + len(small)
                verdicts = self.keep(whole, signal)
                for group, reason in zip(whole, verdicts, strict=True):
                    (kept if reason is None else dropped).append(group)
                reasons.update(reason for reason in verdicts if reason is not None)
                reasons.update(aborted=len(small))
            position += missing
            if len(kept) == self.plan.prompts:
                break
        return Rollout(tuple(kept), tuple(dropped), silent, position, tuple(aborted), +reasons)

    def _draw(self, position: int, amount: int, clock: Clock) -> list[Group]:
        order, plan = DrawOrder(len(self.prompts.ids), self.seed, "prompts"), self.plan
        drawn = self.prompts.take(order.take(position, amount))

        def answer(share: range) -> list[Group]:
            prompts, first = drawn.take(share), position + share.start
            seeds = [derived_seed(self.seed, "responses", first + place) for place in range(len(share))]
            with clock.phase("rollout"):
                groups = self.sampler.respond(
                    prompts, n=plan.responses, temperature=plan.temperature, seeds=seeds, first_group=first
                )
                if plan.greedy_key is not None:
                    best = self.sampler.best(prompts, first)
                    groups = [(*group, *greedy) for group, greedy in zip(groups, best, strict=True)]
            seed_global(self.seed, "rewards", first)
            return groups

        def reward(groups: list[Group]) -> list[Group]:
            with clock.phase("reward"):
                return self.reward.of_groups(groups)

        last = position + amount - 1
        groups = self.share(amount, answer, reward, place=f"samples and rewards of draws {position} to {last}")
        self.reward.expect_any(groups)
        return groups if plan.greedy_key is None else [_told(group, plan.greedy_key) for group in groups]


def _told(group: Group, key: str) -> Group:
    """The samples before a group's last, which is the greedy one, with its reward; all aborted where it was aborted."""
    *samples, best = group
    if best.rewards is None:
        return tuple(attrs.evolve(sample, rewards=None) for sample in samples)
    (reward,) = component_matrix([best.rewards], (key,)).flatten().tolist()
    return tuple(attrs.evolve(sample, greedy_reward=reward) for sample in samples)
