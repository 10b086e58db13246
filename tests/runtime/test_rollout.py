"""The rollout role with an engine that says what it is told to, filters, and the numbers of a rollout."""

from collections.abc import Callable, Sequence

import attrs
import pytest

from relax.data.prompts import Worded
from relax.data.samples import Completion, Sample
from relax.data.tokenizer import character_codec
from relax.errors import RelaxError
from relax.rewards.loader import RewardFunction
from relax.roles.rollout import Rollout, RolloutRole, SamplingPlan
from relax.rollout.filter import Filter, UserFilter, keep_all, keep_signal, load_filter
from relax.rollout.metrics import sample_metrics, zero_signal_metrics
from relax.rollout.sampling import Prompts, Sampler
from relax.runtime.clock import Clock
from tests.runtime.scripted import ScriptedEngine, sample

Groups = Sequence[Sequence[Sample]]
CODEC = character_codec()
RECORDS = [{"prompt": f"{number}+0="} for number in range(6)]


def score(asked: Sample) -> dict[str, float]:
    return {"score": float(asked.response)}


def spread(groups: Groups) -> list[bool]:
    return [len({s.rewards["score"] for s in group}) > 1 for group in groups]


def role(
    answer: Callable[[int, int], str], keep: Filter = keep_signal, redraws: int = 3, prompts: int = 4
) -> RolloutRole:
    sampler = Sampler(ScriptedEngine(CODEC, answer), CODEC, 8)
    reward = RewardFunction("here.score", score, ("score",))
    asked = Prompts.encode([Worded(record, record) for record in RECORDS], "prompt", CODEC, 20)
    return RolloutRole(sampler, asked, reward, spread, keep, SamplingPlan(prompts, 3, 1.0, redraws), 0)


def odd_draws_are_flat(draw: int, index: int) -> str:
    return "5" if draw % 2 else str(index)


def test_dropped_groups_are_drawn_anew_until_enough_are_kept() -> None:
    asker = role(odd_draws_are_flat)
    rollout = asker.collect(0, Clock())
    assert asker.sampler.engine.asked == [4, 2, 1]  # draws 0-3 keep 2, draws 4-5 keep 1, draw 6 is kept
    assert [group[0].group for group in rollout.kept] == [0, 2, 4, 6]
    assert [group[0].group for group in rollout.dropped] == [1, 3, 5]
    assert (rollout.position, rollout.silent) == (7, 3)
    assert len(rollout.generated) == 7 * 3 == len(rollout.samples) + 3 * len(rollout.dropped)


def test_redraws_end_and_what_was_kept_is_trained() -> None:
    rollout = role(odd_draws_are_flat, redraws=1).collect(0, Clock())
    assert (len(rollout.kept), len(rollout.dropped), rollout.position) == (3, 3, 6)
    nothing = role(lambda draw, index: "1", redraws=2).collect(0, Clock())
    assert (nothing.kept, len(nothing.dropped), nothing.position) == ((), 12, 12)
    assert nothing.sizes(2) == []


def test_without_a_filter_flat_groups_are_kept_and_counted() -> None:
    rollout = role(odd_draws_are_flat, keep_all).collect(0, Clock())
    assert (len(rollout.kept), len(rollout.dropped), rollout.silent) == (4, 0, 2)


def test_dropped_groups_are_counted_by_reason() -> None:
    rollout = role(odd_draws_are_flat).collect(0, Clock())
    assert rollout.reasons == {"no_signal": 3}
    picky = UserFilter("here.keep", lambda group: {0: True, 1: "odd"}[group[0].group % 2])
    assert role(odd_draws_are_flat, picky).collect(0, Clock()).reasons == {"odd": 3}


class DecidedEngine(ScriptedEngine):
    """Greedily it answers each prompt with 7, and the second of a draw with 80."""

    def generate(self, prompts: object, *, temperature: float, **options: object) -> list[list[Completion]]:
        if temperature:
            return super().generate(prompts, temperature=temperature, **options)
        assert options["n"] == 1
        answers = ["80" if index == 1 else "7" for index in range(len(prompts))]
        return [[Completion((*CODEC.encode(answer), CODEC.end), (0.0,), True)] for answer in answers]


def no_eighties(asked: Sample) -> dict[str, float] | None:
    return None if asked.response == "80" else {"score": float(asked.response)}


def test_samples_are_told_what_the_greedy_response_earned() -> None:
    asker = role(lambda draw, index: str(10 * draw + index), keep_all, redraws=0)
    asker = attrs.evolve(
        asker,
        sampler=Sampler(DecidedEngine(CODEC, asker.sampler.engine.answer), CODEC, 8),
        reward=RewardFunction("here.score", no_eighties, ("score",)),
        plan=attrs.evolve(asker.plan, greedy_key="score"),
    )
    rollout = asker.collect(0, Clock())
    assert [[s.rewards["score"] for s in group] for group in rollout.kept] == [[0, 1, 2], [20, 21, 22], [30, 31, 32]]
    assert {s.greedy_reward for s in rollout.samples} == {7.0}
    # A greedy response that was aborted leaves its group without a baseline.
    assert [s.response for s in rollout.aborted] == ["10", "11", "12"]
    assert len(rollout.generated) == 12
    assert sample_metrics(rollout.samples)["response/greedy_reward"] == 7.0


def third_is_aborted(asked: Sample) -> dict[str, float] | None:
    """Of draw 1 nobody is left, of draw 2 one, of every other draw two."""
    number = int(asked.response)
    lost = {1: 3, 2: 2}.get(number // 10, 1)
    return None if number % 10 < lost else {"score": float(number)}


def test_aborted_samples_do_not_vote_and_are_not_trained_on() -> None:
    asker = role(lambda draw, index: str(10 * draw + index))
    asker = attrs.evolve(
        asker,
        reward=RewardFunction("here.score", third_is_aborted, ("score",)),
        plan=attrs.evolve(asker.plan, least=2),
    )
    rollout = asker.collect(0, Clock())
    assert [[s.rewards["score"] for s in group] for group in rollout.kept] == [[1, 2], [31, 32], [41, 42], [51, 52]]
    assert [[s.rewards["score"] for s in group] for group in rollout.dropped] == [[], [22]]
    assert sorted(s.response for s in rollout.aborted) == ["0", "10", "11", "12", "20", "21", "30", "40", "50"]
    assert rollout.reasons == {"aborted": 2}
    assert len(rollout.generated) == 6 * 3 == len(rollout.samples) + 1 + len(rollout.aborted)
    assert rollout.silent == 2


def test_a_reward_function_without_a_return_is_told_so() -> None:
    asker = attrs.evolve(role(odd_draws_are_flat), reward=RewardFunction("here.lazy", lambda asked: None, ("score",)))
    with pytest.raises(RelaxError, match=r"here.lazy, group 0, .*all 12 of this draw.*is a return missing"):
        asker.collect(0, Clock())


def test_a_group_is_one_draw_of_one_prompt() -> None:
    """Ten draws of six prompts: the ids differ although prompts come again."""
    rollout = role(odd_draws_are_flat, keep_all, prompts=10).collect(20, Clock())
    assert [{s.group for s in group} for group in rollout.kept] == [{20 + draw} for draw in range(10)]
    for group in rollout.kept:
        assert len({s.prompt["prompt"] for s in group}) == 1
        assert CODEC.decode(group[0].prompt_ids) == group[0].prompt["prompt"]


def test_samples_keep_their_own_rewards() -> None:
    rollout = role(lambda draw, index: str(10 * draw + index), keep_all).collect(0, Clock())
    assert [s.rewards["score"] for s in rollout.samples] == [float(10 * d + i) for d in range(4) for i in range(3)]
    assert all(s.response == str(int(s.rewards["score"])) for s in rollout.samples)


def test_a_reward_function_that_changes_its_sample_changes_no_other() -> None:
    def vandal(asked: Sample) -> dict[str, float]:
        asked.prompt["prompt"] = "gone"
        return {"score": 1.0}

    asker = role(odd_draws_are_flat, keep_all)
    attrs.evolve(asker, reward=RewardFunction("here.vandal", vandal, ("score",))).collect(0, Clock())
    assert [record["prompt"] for record in asker.prompts.records] == [f"{number}+0=" for number in range(6)]


@pytest.mark.parametrize(
    ("groups", "batches", "sizes"),
    [(4, 1, [8]), (4, 2, [4, 4]), (5, 2, [4, 6]), (1, 4, [2]), (3, 4, [2, 2, 2]), (7, 3, [4, 4, 6]), (0, 2, [])],
)
def test_optimizer_batches_hold_whole_groups(groups: int, batches: int, sizes: list[int]) -> None:
    kept = tuple((sample(g), sample(g)) for g in range(groups))
    assert Rollout(kept, (), 0, groups).sizes(batches) == sizes


def test_user_filters_are_asked_group_by_group() -> None:
    groups = [[sample(0), sample(0)], [sample(1, length=3)]]
    assert UserFilter("here.keep", lambda group: len(group) == 2)(groups, [False, False]) == [None, "filter"]
    assert UserFilter("here.keep", lambda group: len(group) == 2 or "too few")(groups, [True, True]) == [
        None,
        "too few",
    ]
    with pytest.raises(RelaxError, match=r"--dynamic-sampling-filter-path here.keep, group 0: returned None, expected"):
        UserFilter("here.keep", lambda group: None)(groups, [True, True])
    with pytest.raises(RelaxError, match=r"here.keep, group 0: ZeroDivisionError"):
        UserFilter("here.keep", lambda group: 1 / 0 > 1)(groups, [True, True])


def test_filters_by_name() -> None:
    assert load_filter(None) is keep_all
    assert load_filter("signal") is keep_signal
    assert keep_signal([[], []], [True, False]) == [None, "no_signal"]
    with pytest.raises(RelaxError, match="nowhere"):
        load_filter("nowhere.keep")


def test_metrics_are_means_over_every_sample() -> None:
    samples = [sample(0, {"a": 1, "b": 0.5}, 2), sample(0, {"a": 0, "b": True, "c": "text"}, 4), sample(1, None, 3)]
    metrics = sample_metrics(samples)
    assert metrics == {"reward/a": 0.5, "reward/b": 0.5, "response/length": 3.0, "response/truncated": 1.0}


def test_an_extra_number_that_has_no_mean_stops_nothing() -> None:
    samples = [sample(0, {"a": 1, "b": float("inf"), "c": 10**400}), sample(0, {"a": 2, "b": 1.0, "c": 1})]
    assert {name for name in sample_metrics(samples) if name.startswith("reward/")} == {"reward/a"}
    assert zero_signal_metrics([tuple(samples)], 0, ("a", "gone")) == {
        "zero_std/groups": 0.0,
        "zero_std/a": 0.0,
        "zero_std/gone": 0.0,
    }


def test_flat_groups_are_counted_by_component_or_by_reward() -> None:
    groups = [
        (sample(0, {"a": 1.0, "b": 0.0}), sample(0, {"a": 1.0, "b": 1.0})),
        (sample(1, {"a": 0.26, "b": 2.0}), sample(1, {"a": 0.26, "b": 2.0})),
    ]
    assert zero_signal_metrics(groups, 1, ["a", "b"]) == {"zero_std/groups": 1, "zero_std/a": 2, "zero_std/b": 1}
    counted = zero_signal_metrics(groups, 2, ["a"])
    assert counted == {"zero_std/groups": 2, "zero_std/count_1.0": 1, "zero_std/count_0.3": 1}
