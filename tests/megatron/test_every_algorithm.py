"""A step of every algorithm is the same whatever the layout: spread over ranks, cut into micro-batches, packed.

Against one process that has all samples in one micro-batch: advantages to the last bit, gradients and weights within
1e-5 of their norm, metrics likewise.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from relax.batches import Evidence
from relax.megatron.layout import Layout
from relax_core import ALGORITHMS
from tests.megatron import jobs, wholes
from tests.megatron.steps import Learners, Spread, Step, every_algorithm

ALL = tuple(range(12))
HALVES = (ALL[:5], ALL[5:])
MIXED = (ALL[::2], ALL[::-2])
WHOLE = Spread((ALL,))
PACKED = Spread((ALL,), 5, qkv_format="thd")
DYNAMIC = Spread((ALL,), max_tokens_per_gpu=32)
DYNAMIC_PACKED = Spread((ALL,), max_tokens_per_gpu=32, qkv_format="thd")


@pytest.fixture(scope="module")
def expected() -> Mapping[str, Step]:
    (steps,) = every_algorithm([WHOLE], evidence())
    return steps


@cache
def evidence() -> Evidence:
    return Learners(WHOLE).evidence()


def compare(ranks: Sequence[Step], expected: Step) -> None:
    for rank in ranks:
        for index, advantages in zip(rank.samples, rank.advantages, strict=True):
            assert advantages.equal(expected.advantages[index]), f"advantages of sample {index}"
        for update, wanted in zip(rank.updates, expected.updates, strict=True):
            assert update.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-7)
            assert update.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    for kind in ("gradients", "weights"):
        wholes.assert_equal(wholes.whole([r.policy for r in ranks], kind), wholes.whole([expected.policy], kind))
        if expected.critic is not None:
            critics = [rank.critic for rank in ranks if rank.critic is not None]
            wholes.assert_equal(wholes.whole(critics, kind, split_output=False), wholes.whole([expected.critic], kind))


def check(found: Sequence[Sequence[Mapping[str, Step]]], expected: Mapping[str, Step]) -> None:
    """`found`: [rank][spread][algorithm]."""
    failures = []
    for number in range(len(found[0])):
        for name in ALGORITHMS:
            try:
                compare([rank[number][name] for rank in found], expected[name])
            except AssertionError as error:
                failures.append(f"spread {number}, {name}: {error}")
    assert not failures, "\n".join(failures)


def test_the_batch_is_one_that_can_fail(expected: Mapping[str, Step]) -> None:
    """Every algorithm has a gradient, unlike the others', and chooses or clips somewhere."""
    norms = {name: step.updates[-1].grad_norm for name, step in expected.items()}
    assert min(norms.values()) > 1e-3, norms
    assert len({round(norm, 6) for norm in norms.values()}) > 10, norms
    clipped = [name for name, step in expected.items() if step.updates[-1].metrics["clipfrac"] > 0]
    assert {"grpo", "clip_cov", "kl_cov", "m2po"} <= set(clipped)


def test_micro_batches_of_one_process(expected: Mapping[str, Step]) -> None:
    spreads = [Spread((ALL,), 1), Spread((ALL,), 3), Spread((ALL,), 5), PACKED, DYNAMIC, DYNAMIC_PACKED]
    check([every_algorithm(spreads, evidence())], expected)


@pytest.mark.parametrize(
    ("world", "layout", "spreads"),
    [
        pytest.param(
            2, Layout(), [Spread(HALVES, 3), Spread(MIXED, max_tokens_per_gpu=32, qkv_format="thd")], id="DP 2"
        ),
        pytest.param(4, Layout(), [Spread((ALL[:1], ALL[1:8], (), ALL[8:]), 2)], id="DP 4"),
        pytest.param(2, Layout(tensor=2), [Spread((ALL,), 5)], id="TP 2"),
        pytest.param(2, Layout(pipeline=2), [Spread((ALL,), 3), Spread((ALL,))], id="PP 2"),
        pytest.param(2, Layout(context=2), [Spread((ALL,), 5), PACKED, DYNAMIC_PACKED], id="CP 2"),
        pytest.param(4, Layout(tensor=2), [Spread(HALVES, 3)], id="TP 2 x DP 2"),
    ],
)
def test_jobs(world: int, layout: Layout, spreads: Sequence[Spread], expected: Mapping[str, Step]) -> None:
    check(jobs.run(world, layout, every_algorithm, spreads, evidence()), expected)
