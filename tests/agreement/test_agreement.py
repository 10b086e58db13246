"""In jobs of two and four processes, whatever happens to one rank ends all others with its message, and none waits."""

import re
import time
from functools import partial
from pathlib import Path

import pytest

from relax import agreement
from tests.agreement import stages
from tests.agreement.job import Ending, Work, run_job

RAISED = 10.0  # seconds within which an error reaches everybody
LIMIT = 3.0  # configured, for ranks that do not come
SLACK = 8.0  # for the report, for leaving, and for a busy machine
SIZES = (2, 4)


def assert_all_end(endings: list[Ending], culprit: int, within: float, *texts: str) -> None:
    """Every rank but `culprit` ends in time, with an error that matches all of `texts`."""
    for rank, ending in enumerate(endings):
        if rank == culprit:
            continue
        assert ending.status not in (None, 0), (rank, endings)
        assert ending.seconds < within, (rank, endings)
        for text in texts:
            assert re.search(text, ending.err), (rank, text, endings)


def assert_told(work: Work, directory: Path, size: int, culprit: int, *texts: str, own_store: bool = False) -> None:
    endings = run_job(directory, size, work, own_store=own_store)
    assert_all_end(endings, culprit, RAISED, *texts)
    assert endings[culprit].status == 3
    assert endings[culprit].seconds < RAISED + SLACK


RAISES = {
    "data": ("data", r"rank 1 failed at 'data of step 1': RelaxError: .*'prompt' must be a non-empty text, got 3"),
    "reward": ("reward", r"rank 1 failed at 'reward of step 1': RelaxError: .*ZeroDivisionError: no judge today"),
    "raises": ("advantages", r"rank 1 failed at 'advantages of step 1': IndexError: sample 7 of 7"),
    "malformed sizes": (
        "advantages",
        r"rank 1 failed at 'advantages of step 1': ValueError: .*\[1, 2\] add up to 3, not to 2",
    ),
    "missing sizes": ("advantages", r"rank 1 failed at 'advantages of step 1': ValueError: .*sizes .* are missing"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", RAISES)
def test_what_one_rank_raises_all_raise(tmp_path: Path, fault: str, size: int) -> None:
    place, text = RAISES[fault]
    assert_told(partial(stages.run_steps, 1, place, fault), tmp_path, size, 1, text)


def test_the_rank_that_failed_keeps_its_own_error(tmp_path: Path) -> None:
    endings = run_job(tmp_path, 2, partial(stages.run_steps, 1, "advantages", "raises"))
    assert endings[1].err == "IndexError: sample 7 of 7\n"
    assert endings[0].err.startswith("PeerError: rank 1 failed at")


def test_the_rank_that_holds_the_store_fails(tmp_path: Path) -> None:
    """It must not take the store away before the others have read what stands there."""
    work = partial(stages.run_steps, 0, "advantages", "raises")
    assert_told(work, tmp_path, 4, 0, r"rank 0 failed at 'advantages of step 1': IndexError", own_store=True)


def test_an_error_outside_of_all_stages(tmp_path: Path) -> None:
    assert_told(partial(stages.fail_beside_the_stages, 1), tmp_path, 2, 1, r"rank 1 failed at .*OSError: no space left")


def test_a_rank_that_is_busy_hears_of_it_too(tmp_path: Path) -> None:
    assert_told(
        partial(stages.fail_beside_a_busy_rank, 1), tmp_path, 2, 1, "no judge today", "still busy at", "stages.py"
    )


def test_nobody_waits_for_a_rank_that_ended_itself(tmp_path: Path) -> None:
    endings = run_job(tmp_path, 2, partial(stages.save_beside_a_busy_rank, 1))
    assert_all_end(endings, -1, RAISED, "rank 0 was still busy at 'reward of step 0' and is ended")
    assert endings[1].err.startswith("PeerLost: not every rank came through 'saving': rank 0 was still busy")


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_in_another_stage(tmp_path: Path, size: int) -> None:
    endings = run_job(tmp_path, size, partial(stages.go_astray, 1))
    assert_all_end(endings, -1, RAISED, r"rank \d came to '.*rollout 1', but rank \d to '.*rollout 1'")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["reward", "advantages"])
def test_a_stopped_rank_is_named_within_the_limit(tmp_path: Path, place: str, size: int) -> None:
    work = partial(stages.run_steps, 1, place, "stopped")
    endings = run_job(tmp_path, size, work, timeout_s=LIMIT, stopped=1)
    told = rf"rank 1 was last seen at '{place} of step 1' since \d+ s and shows no sign of life: stopped or gone"
    assert_all_end(endings, 1, LIMIT + SLACK, told, rf"rank 0 (is|waits) at '{place} of step 1' since [3-6] s")
    assert endings[1].status is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["reward", "advantages"])
def test_a_killed_rank_is_named_within_the_limit(tmp_path: Path, place: str, size: int) -> None:
    work = partial(stages.run_steps, 1, place, "killed")
    endings = run_job(tmp_path, size, work, timeout_s=LIMIT)
    told = r": rank 1 was last seen at .* and shows no sign of life: stopped or gone"
    assert_all_end(endings, 1, LIMIT + SLACK, told)
    assert endings[1].status == -9


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_nobody_waits_until_the_limit_for_a_silent_rank(tmp_path: Path, fault: str) -> None:
    patience = 3.0
    work = partial(stages.run_steps_impatiently, 1, "reward", fault, patience)
    endings = run_job(tmp_path, 2, work, timeout_s=600, stopped=1)
    told = "not every rank came through 'reward of step 1': rank 1 was last seen at .* shows no sign of life"
    assert_all_end(endings, 1, 2 * patience + SLACK, told)


def test_a_rank_that_is_only_slow_is_waited_for(tmp_path: Path) -> None:
    work = partial(stages.run_steps_impatiently, 1, "reward", "slow", 1.0)
    assert [(ending.status, ending.err) for ending in run_job(tmp_path, 2, work)] == [(0, "")] * 2


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize(("before", "place"), [("data", "reward"), ("reward", "advantages")])
def test_the_rank_that_holds_the_store_is_lost(tmp_path: Path, fault: str, before: str, place: str) -> None:
    """The other one is where it waits for the lost rank, or still on its way out of the stage before."""
    work = partial(stages.run_steps, 0, place, fault)
    endings = run_job(tmp_path, 2, work, timeout_s=LIMIT, own_store=True, stopped=0)
    assert_all_end(endings, 0, LIMIT + SLACK, f"rank 1 .*at '({before}|{place}) of step 1'", "store of the job")


@pytest.mark.parametrize("size", SIZES)
def test_tensors_of_another_size(tmp_path: Path, size: int) -> None:
    """A collective that was never meant: whatever the backend makes of it, nobody waits for long."""
    work = partial(stages.run_steps, 1, "reward", "another shape")
    endings = run_job(tmp_path, size, work, timeout_s=LIMIT)
    assert_all_end(endings, -1, LIMIT + SLACK, "reward of step 1|advantages of step 1|rank 1")


def test_a_fault_that_is_handled_ends_nothing(tmp_path: Path) -> None:
    endings = run_job(tmp_path, 4, partial(stages.recover, 2))
    assert all("went on after" in ending.err and "no judge today" in ending.err for ending in endings), endings


def test_what_one_rank_tells_all_hear(tmp_path: Path) -> None:
    endings = run_job(tmp_path, 4, stages.gather)
    assert [(ending.status, ending.err) for ending in endings] == [(0, "")] * 4


def test_a_rank_that_tells_nothing_is_named(tmp_path: Path) -> None:
    endings = run_job(tmp_path, 2, partial(stages.gather_without_one, 1), timeout_s=LIMIT, stopped=1)
    assert_all_end(endings, 1, LIMIT + SLACK, r"PeerLost: work \(1\): nothing was heard within 3 s of rank 1")


def test_a_job_without_faults(tmp_path: Path) -> None:
    assert [(ending.status, ending.err) for ending in run_job(tmp_path, 4, stages.nothing)] == [(0, "")] * 4


def test_alone_a_stage_is_nothing() -> None:
    """No agreement, no other type of error, and no time."""
    error = KeyError("x")
    with pytest.raises(KeyError) as raised, agreement.stage("anywhere"):
        raise error
    assert raised.value is error
    began = time.perf_counter()
    for _ in range(10_000):
        with agreement.stage("anywhere"):
            pass
    assert time.perf_counter() - began < 0.1
