"""What is found in small files, against numbers worked out by hand, and in a large one, against NumPy."""

import random
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

from relax.errors import ConfigError, RelaxError
from relax.inspect.fields import Choice
from relax.inspect.report import Report, inspect
from relax_core import ALGORITHMS, Traits
from tests.inspect.conftest import Write

# Sums 3 and 4: signal for all. Then 4 and 4 since the two cancel, for all. Then 7 and 7, though three vary.
GROUPS = {
    "one": [(0, 0, 3), (1, 0, 3)],
    "two": [(1, 0, 3), (0, 1, 3)],
    "three": [(0, 4, 3), (4, 1, 2)],
}
LENGTHS = [5, 4, 4, 4, 6, 4]


def rows_of(groups: dict[str, list[tuple[float, ...]]]) -> list[dict[str, object]]:
    pairs = [(name, values) for name, members in groups.items() for values in members]
    return [{"group_id": g, "rewards": dict(zip("abc", values, strict=False))} for g, values in pairs]


def look(file: Path, *names: str, weights: Sequence[float] = (), choice: Choice | None = None) -> Report:
    return inspect([file], choice or Choice(), weights, names)


@pytest.fixture
def report(write: Write) -> Report:
    rows = [{**row, "response_length": n} for row, n in zip(rows_of(GROUPS), LENGTHS, strict=True)]
    return look(write(rows), "grpo", "gdpo", "rloo")


def test_signal(report: Report) -> None:
    found = report.findings
    assert (found.rows, found.groups, found.sizes) == (6, 3, {2: 3})
    told = {outcome.name: (outcome.signal, outcome.silent.examples) for outcome in found.outcomes}
    assert told == {"grpo": (1, (3, 5)), "gdpo": (2, (3,)), "rloo": (1, (3, 5))}
    assert [outcome.reads for outcome in found.outcomes] == ["a + b + c", "a, b, c", "a + b + c"]


def test_who_drops_what_another_keeps(report: Report) -> None:
    told = {(d.drops, d.keeps): d.groups.examples for d in report.findings.differences}
    assert told.pop(("grpo", "gdpo")) == (5,)
    assert told.pop(("rloo", "gdpo")) == (5,)
    assert set(told.values()) == {()}
    assert len(told) == 4


def test_components(report: Report) -> None:
    a, b, c = report.findings.components
    assert (a.flat.count, b.flat.examples, c.flat.examples) == (0, (1,), (1, 3))
    assert (a.cancels.examples, b.cancels.examples, c.cancels.count) == ((3,), (3,), 0)
    assert (a.summary.mean, a.summary.low, a.summary.high) == (1.0, 0.0, 4.0)
    assert c.summary.std == pytest.approx((5 / 6 / 5) ** 0.5)  # five times 3 and once 2


def test_advantages(report: Report) -> None:
    """GDPO: 0 and +-0.707007 where one varies by 1, +-0.706998 where -a + b + c do by 4, 3 and 1 (eps 1e-4)."""
    grpo, gdpo, rloo = report.findings.outcomes
    assert [outcome.distinct for outcome in (grpo, gdpo, rloo)] == [3, 5, 3]
    assert [outcome.distinct_groups for outcome in (grpo, gdpo, rloo)] == [2, 3, 2]
    assert gdpo.largest == pytest.approx(0.5 / (0.5**0.5 + 1e-4), abs=1e-12)
    assert rloo.largest == 1.0
    assert sum(grpo.histogram.counts) == 6


def test_shares(report: Report) -> None:
    """GDPO: all of a in the first group; -a, b and c in the last, whose squares add up to nearly as much."""
    grpo, gdpo, _ = report.findings.outcomes
    assert grpo.shares == {"a": 1.0, "b": 0.0, "c": 0.0}
    assert list(gdpo.shares.values()) == pytest.approx([0.0, 0.5, 0.5], abs=1e-4)


def test_lengths(report: Report) -> None:
    """Two groups count for GDPO: advantages -, + of lengths 5, 4 and +, - of 6, 4; x = (-1, 1, 1, -1) nearly."""
    grpo, gdpo, _ = report.findings.outcomes
    assert grpo.with_length == pytest.approx(-1.0)
    x, y = np.array([-0.707007, 0.707007, 0.706998, -0.706998]), np.array([5, 4, 6, 4])
    assert gdpo.with_length == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-5)
    assert report.findings.lengths is not None
    assert report.findings.lengths.mean == 4.5
    assert report.findings.log_probs is None


def test_weights_reach_the_sum_and_the_components(write: Write) -> None:
    """Weights 1 and 2: 2a + ... no longer cancels; a and b of weight 0 leave nothing."""
    file = write(rows_of({"two": [(1, 0, 3), (0, 1, 3)]}))
    found = look(file, "grpo", "gdpo", weights=(1, 2, 1)).findings
    assert [outcome.signal for outcome in found.outcomes] == [1, 1]
    assert [outcome.reads for outcome in found.outcomes] == ["a + 2 × b + c", "a, 2 × b, c"]
    gdpo = found.outcomes[1]
    assert list(gdpo.shares.values()) == pytest.approx([-1.0, 2.0, 0.0])
    assert [outcome.signal for outcome in look(file, "grpo", "gdpo", weights=(0, 0, 1)).findings.outcomes] == [0, 0]


def test_a_reward_of_its_own_is_what_scalar_algorithms_read(write: Write) -> None:
    rows = [{"group": 1, "m": {"a": 1, "b": 2}, "score": score} for score in (0, 1)]
    found = look(write(rows), choice=Choice(rewards=("m",), reward_key="score")).findings
    assert [(o.name, o.reads, o.signal, o.shares) for o in found.outcomes] == [
        ("grpo", "score", 1, {}),
        ("gdpo", "a, b", 0, {}),
    ]
    assert [(d.drops, d.keeps, d.groups.count) for d in found.differences] == [("grpo", "gdpo", 0), ("gdpo", "grpo", 1)]


def test_groups_that_are_too_small(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = Traits(min_group_size=3)
    monkeypatch.setitem(ALGORITHMS, "made_up", attrs.evolve(ALGORITHMS["grpo"], name="made_up", traits=traits))
    groups = {"one": [(0, 1)], "two": [(0, 1), (1, 1)], "three": [(0, 1), (1, 1), (1, 1)]}
    found = look(write(rows_of(groups)), "made_up", "gdpo").findings
    assert [(o.signal, o.silent.count, o.too_small) for o in found.outcomes] == [(1, 2, 2), (2, 1, 1)]
    assert [component.flat.count for component in found.components] == [0, 2]  # of the two that could vary


def test_outliers_are_named_with_their_lines(write: Write) -> None:
    groups = {f"g{n}": [(n % 2, 1.0), (1, 2.0)] for n in range(60)} | {"odd": [(1, 5e5), (0, 1.0)]}
    (_, b) = look(write(rows_of(groups))).findings.components
    assert [(outlier.place, outlier.value) for outlier in b.farthest] == [(121, 5e5)]
    assert b.histogram.high == 2.0
    assert sum(b.histogram.counts) == 121


def test_default_algorithms_take_as_many_components_as_there_are(write: Write) -> None:
    for keys, names in (("a", ["grpo"]), ("ab", ["grpo", "gdpo"])):
        rows = [{"group": 1, "rewards": dict.fromkeys(keys, n)} for n in range(2)]
        assert [outcome.name for outcome in look(write(rows)).findings.outcomes] == names


def test_an_algorithm_that_refuses_so_many_components(write: Write) -> None:
    file = write([{"group": 1, "reward": n} for n in range(2)])
    with pytest.raises(ConfigError) as caught:
        look(file, "gdpo", "remax", "gpdo")
    first, second, third = caught.value.faults
    assert first == "--compare gdpo: gdpo needs at least 2 reward components, got 1; for one, use grpo"
    assert second.startswith("--compare remax: expected the reward components reward, greedy_reward")
    assert third.endswith("did you mean gdpo?")
    with pytest.raises(ConfigError, match="--weights: 2 reward weights for 1 reward components"):
        look(file, weights=(1, 2))


def test_what_an_algorithm_refuses_later_is_one_line(write: Write) -> None:
    rows = [{"group": 1, "rewards": {"reward": n, "length": 0}} for n in range(2)]
    with pytest.raises(RelaxError, match="opo: lengths must be 0 or more and not all 0 in group 0"):
        look(write(rows), "opo")


def test_no_row_with_a_vote(write: Write) -> None:
    report = look(write([{"group": 1, "rewards": {"a": None, "b": 1}}, {"group": 1, "rewards": {"a": "x", "b": 1}}]),
                  choice=Choice(rewards=("rewards.a", "rewards.b")))  # fmt: skip
    assert (report.findings.rows, report.left_out, report.faults.total) == (0, 2, 2)


def test_many_interleaved_groups_against_numpy(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal and shares by their definitions, in NumPy, group by group."""
    monkeypatch.setattr("relax.inspect.table.CHUNK", 37)
    monkeypatch.setattr("relax.inspect.read.BYTES", 2000)
    rng = random.Random(5)
    groups = {
        n: [[rng.choice([0, 1]), rng.choice([0, 0.5, 1]), rng.choice([0, 4])] for _ in range(4)] for n in range(150)
    }
    rows = [{"group": n, "rewards": dict(zip("abc", r, strict=True))} for n, members in groups.items() for r in members]
    rng.shuffle(rows)
    found = look(write(rows), "grpo", "gdpo").findings
    signal, energy, given = {"grpo": 0, "gdpo": 0}, {"grpo": 0.0, "gdpo": 0.0}, {}
    for members in groups.values():
        x = np.array(members, float)
        centred = x - x.mean(0)
        z = centred / (x.std(0, ddof=1) + 1e-4)
        total = x.sum(1)
        a = {"grpo": (total - total.mean()) / (total.std(ddof=1) + 1e-6), "gdpo": z.sum(1)}
        for name, parts in (("grpo", centred), ("gdpo", z)):
            signal[name] += int(np.ptp(a[name]) > 1e-9)
            work = (parts * a[name][:, None]).sum(0)
            if np.ptp(a[name]) > 1e-9:
                given[name] = given.get(name, 0) + work / work.sum() * (a[name] ** 2).sum()
                energy[name] += (a[name] ** 2).sum()
    for outcome in found.outcomes:
        assert outcome.signal == signal[outcome.name]
        np.testing.assert_allclose(list(outcome.shares.values()), given[outcome.name] / energy[outcome.name], atol=1e-5)
