"""What ranks do in the tests: the stages of a step on real data, rewards and advantages, with a fault on one rank."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, distributed

import relax_core as rc
from relax import lookout
from relax.agreement import gathering, stage
from relax.data.prompts import read_records
from relax.data.wording import as_it_stands
from relax.errors import RelaxError
from relax.rewards.loader import RewardFunction
from tests.agreement.job import die, fault_now, stop
from tests.runtime.scripted import sample

Fault = Callable[[], None]


def reduce(values: Tensor, op: str) -> Tensor:
    values = values.clone()
    distributed.all_reduce(values, op=distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX)
    return values


def whiten(sizes: object = (2,), scores: tuple[float, ...] = (1.0, 3.0)) -> Tensor:
    gdpo = rc.get_algorithm("gdpo")
    return gdpo.estimate_advantages(
        gdpo.hyperparameters(),
        torch.tensor(scores, dtype=torch.float64),
        rc.Tokens.full([1] * len(scores)),
        segment=rc.split_by(sizes),
        reduce=reduce,
    ).advantages


def _broken_data() -> None:
    Path("broken.jsonl").write_text('{"prompt": 3}\n', encoding="utf-8")
    read_records(Path("broken.jsonl"), {"prompt": as_it_stands})


def _broken_reward() -> None:
    RewardFunction("judge.score", _no_judge, ("score",)).score([sample(0)])


def _no_judge(sample: object) -> Mapping[str, object]:
    raise ZeroDivisionError("no judge today")


def _malformed_sizes() -> None:
    whiten(sizes=[1, 2])


def _missing_sizes() -> None:
    whiten(sizes=None)


def _raise_before_the_collective() -> None:
    raise IndexError("sample 7 of 7")


def _other_shape() -> None:
    distributed.all_reduce(torch.zeros(100_000))


FAULTS: Mapping[str, Fault] = {
    "data": _broken_data,
    "reward": _broken_reward,
    "raises": _raise_before_the_collective,
    "malformed sizes": _malformed_sizes,
    "missing sizes": _missing_sizes,
    "another shape": _other_shape,
    "stopped": stop,
    "killed": die,
    "slow": partial(time.sleep, 5),
}


def step(number: int, places: Mapping[str, Fault]) -> None:
    """One step; a fault stands in for the work of its stage."""
    works: Mapping[str, Callable[[], object]] = {
        "data": lambda: None,
        "reward": lambda: None,
        "advantages": whiten,
    }
    for name, work in works.items():
        with stage(f"{name} of step {number}"):
            places.get(name, work)()


def run_steps(culprit: int, place: str, fault: str, rank: int) -> None:
    """Three steps; in the second, `fault` happens to rank `culprit` in the stage `place`."""

    def happen() -> None:
        fault_now(Path())
        FAULTS[fault]()

    for number in range(3):
        step(number, {place: happen} if (rank, number) == (culprit, 1) else {})


def run_steps_impatiently(culprit: int, place: str, fault: str, patience: float, rank: int) -> None:
    with mock.patch.object(lookout, "PATIENCE", patience):
        run_steps(culprit, place, fault, rank)


def go_astray(culprit: int, rank: int) -> None:
    step(0, {})
    if rank == culprit:
        fault_now(Path())
    with stage("rollout 1" if rank == culprit else "advantages of rollout 1"):
        whiten()


def fail_beside_the_stages(culprit: int, rank: int) -> None:
    step(0, {})
    if rank == culprit:
        fault_now(Path())
        raise OSError("no space left on device")
    step(1, {})


def fail_beside_a_busy_rank(culprit: int, rank: int) -> None:
    with stage("reward of step 0"):
        if rank == culprit:
            time.sleep(1)
            fault_now(Path())
            _broken_reward()
        time.sleep(60)


def save_beside_a_busy_rank(culprit: int, rank: int) -> None:
    """The rank that failed wants to save what there is, which takes all."""
    try:
        fail_beside_a_busy_rank(culprit, rank)
    except RelaxError:
        with stage("saving"):
            pass


def recover(culprit: int, rank: int) -> None:
    """A fault that everybody handles does not end the job."""
    try:
        step(0, {"reward": _broken_reward} if rank == culprit else {})
    except Exception as error:
        told = str(error)
    for number in range(1, 20):
        step(number, {})
    raise RuntimeError(f"went on after: {told}")


def gather(rank: int) -> None:
    """What one rank tells all hear, round after round."""
    stops, other = gathering("stops"), gathering("other")
    heard = [stops("asked to stop" if (rank, turn) == (1, 2) else None) for turn in range(4)]
    assert heard == [[], [], ["rank 1: asked to stop"], []], heard
    assert other(f"x{rank}") == [f"rank {one}: x{one}" for one in range(4)]


def gather_without_one(culprit: int, rank: int) -> None:
    told = gathering("work")
    fault_now(Path())
    if rank == culprit:
        time.sleep(60)
    told(None)


def nothing(rank: int) -> None:
    """A job in which nothing goes wrong."""
    for number in range(3):
        step(number, {})
