"""Checkpoints by Megatron's dist_checkpointing: whole or absent, for any layout, and resumed to the last bit.

A checkpoint is saved by all ranks of a job and loaded by all ranks of another, which may lie otherwise. It holds
weights, optimizers and schedules, and what the caller adds: the position that all randomness follows from, and the
configuration. Nothing in it belongs to a rank.
"""

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from relax.agreement import gathering, stage
from relax.errors import PeerLost, RelaxError
from relax.megatron import shim
from relax.megatron.atomic import complete, replaced
from relax.megatron.checkpoint_part import Part
from relax.megatron.critic import Critic
from relax.megatron.trainer import Trainer

_PREFIX = "step-"


class CheckpointError(RelaxError):
    """A checkpoint could not be written or read; those written before are as they were."""


class Writing:
    """A checkpoint that a thread of each rank is writing. It is there, or not, once `finish` has returned or raised."""

    def __init__(self, unfinished: Path, target: Path, part: Part, keep: int) -> None:
        self.target = target
        self._unfinished, self._part, self._keep = unfinished, part, keep
        self._gather = gathering(f"writing of checkpoint {target}")
        self._faults: list[str] = []
        self._lost: PeerLost | None = None
        # A daemon: who ends the process at once leaves an unfinished directory, and nobody waits for it.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def finish(self) -> Path:
        """Wait until the checkpoint is on disk; its path. Raises CheckpointError on all ranks when any failed."""
        with stage(f"writing of checkpoint {self.target.name}"):
            self._thread.join()
            if self._lost is not None:
                raise self._lost
        if self._faults:
            raise _unwritten(self.target, "; ".join(self._faults))
        return self.target

    def _work(self) -> None:
        try:
            self._faults = self._gather(_fault_of(self._part.write))
            if not self._faults:
                self._faults = self._gather(_fault_of(self._make_whole) if self._part.rank == 0 else None)
        except PeerLost as error:
            self._lost = error
        if (self._faults or self._lost) and self._part.rank == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _make_whole(self) -> None:
        self._part.complete()
        complete(self._unfinished, self.target)
        for old in _all(self.target.parent)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def save(
    root: Path,
    trainer: Trainer,
    extra: Mapping[str, object],
    *,
    step: int,
    keep: int,
    critic: Critic | None = None,
) -> Path:
    """`begin`, and wait for the end: returns the checkpoint's path. Raises CheckpointError."""
    return begin(root, trainer, extra, step=step, keep=keep, critic=critic).finish()


def begin(
    root: Path,
    trainer: Trainer,
    extra: Mapping[str, object],
    *,
    step: int,
    keep: int,
    critic: Critic | None = None,
    behind: bool = False,
) -> Writing:
    """Writes `root`/step-`step` and then deletes all but the newest `keep` checkpoints, by a thread of its own.

    Training may go on at once if it goes on `behind` (the thread writes a copy), else after `finish`. One writing at a
    time: `finish` it before the next begins. All ranks see the same `root`.

    `extra` (tensors, numbers, strings, lists and mappings of them; the same on all ranks) comes back from `load`.

    Raises CheckpointError when the disk does not take it; older checkpoints are then intact.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    target = root / f"{_PREFIX}{step:08d}"
    unfinished = root / f".{target.name}.unfinished"
    part = Part(copy=behind)
    with stage(f"room for checkpoint {target.name}"), _told_of(target):
        if part.rank == 0:
            _clear_up(root)
            unfinished.mkdir(parents=True)
    with stage(f"taking of checkpoint {target.name}"), _told_of(target), _megatron_code():
        state = {**_state(trainer, critic), "extra": dict(extra)}
        dist_checkpointing.save(state, str(unfinished), sharded_strategy=part)
    return Writing(unfinished, target, part, keep)


def load(path: Path, trainer: Trainer, critic: Critic | None = None) -> dict[str, object]:
    """Restores the weights, optimizer and schedule of `trainer` and `critic` to the bit; returns the `extra` beside.

    The layout of the job may be another than that of the job which saved them.

    Raises CheckpointError when `path` is no complete checkpoint, or one of a model of another shape.
    """
    with stage(f"loading of checkpoint {path.name}"):
        if not (path / "metadata.json").is_file():
            raise CheckpointError(f"{path} is not a complete checkpoint")
        try:
            with torch.no_grad(), _megatron_code():
                state = dist_checkpointing.load(_state(trainer, critic, is_loading=True), str(path))
                trainer.load_state(state)
                if critic is not None:
                    critic.load_state(state["critic"])
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"could not load checkpoint {path}: {_reason(error)}") from error
    extra: dict[str, object] = state["extra"]
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """The `extra` that the checkpoint at `path` was saved with, without loading anything else.

    Raises CheckpointError when `path` is no complete checkpoint.
    """
    try:
        extra: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))["extra"]
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"could not read checkpoint {path}: {_reason(error)}") from error
    return extra


def at_step(root: Path, step: int) -> Path:
    """The checkpoint of `step` under `root`. Raises CheckpointError, naming those there are."""
    there = {_step(path): path for path in _all(root)}
    if step not in there:
        named = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"{root}: no checkpoint of step {step}; there are: {named}")
    return there[step]


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None."""
    found = _all(root)
    return found[-1] if found else None


def _state(trainer: Trainer, critic: Critic | None, *, is_loading: bool = False) -> dict[str, object]:
    beside = {} if critic is None else {"critic": critic.state(is_loading=is_loading)}
    return {**trainer.state(is_loading=is_loading), **beside}


@contextmanager
def _megatron_code() -> Iterator[None]:
    """Where Megatron-core runs: the shim, without torch's notes to Megatron's authors about interfaces to come."""
    with warnings.catch_warnings(), shim.cpu_for_cuda():
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield


@contextmanager
def _told_of(target: Path) -> Iterator[None]:
    """What goes wrong is told of the checkpoint `target`, of which nothing is left."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(target.with_name(f".{target.name}.unfinished"), ignore_errors=True)
        raise _unwritten(target, _reason(error)) from error


def _unwritten(target: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"could not write checkpoint {target}: {reason}. Older checkpoints are intact; make room and resume"
    )


def _fault_of(work: Callable[[], None]) -> str | None:
    """What went wrong in `work`, which nobody sees whose thread it is in."""
    try:
        work()
    except (Exception, CheckpointException) as error:
        return _reason(error)
    return None


def _all(root: Path) -> list[Path]:
    """Complete checkpoints in the order of their steps, one that was about to be replaced under its other name."""
    named = [path for path in root.glob(f"{_PREFIX}*") if (path / "metadata.json").is_file()]
    known = {_step(path) for path in named}
    aside = [path for path in root.glob(replaced(root / f"{_PREFIX}*").name) if _step(path) not in known]
    return sorted((*named, *aside), key=_step)


def _step(path: Path) -> int:
    return int(path.name.lstrip(".").removeprefix(_PREFIX).partition(".")[0])


def _clear_up(root: Path) -> None:
    """Away with what a process left that was killed while it wrote, but for a checkpoint that has no other."""
    for path in _all(root):
        if path.name.startswith("."):
            path.rename(root / f"{_PREFIX}{_step(path):08d}")
    for left_over in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: torch wraps what happened into a report of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
