"""Checkpoints by Megatron's dist_checkpointing: whole or absent, and resumed to the last bit."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from relax.errors import RelaxError
from relax.megatron import shim
from relax.megatron.atomic import atomic_directory
from relax.megatron.critic import Critic
from relax.megatron.trainer import Trainer

_PREFIX = "step-"


class CheckpointError(RelaxError):
    """A checkpoint could not be written or read; those written before are as they were."""


class _InProcess(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's torch_dist format, written by this process instead of by processes forked for the purpose.

    Forking is of use for asynchronous saves; here it would cost seconds and hide the error of a full disk.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write_state(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(
    root: Path,
    trainer: Trainer,
    extra: Mapping[str, object],
    *,
    step: int,
    keep: int,
    critic: Critic | None = None,
) -> Path:
    """Writes `root`/step-`step` and then deletes all but the newest `keep` checkpoints.

    `extra` (tensors, numbers, strings, lists and mappings of them) comes back from `load`: random states, the place in
    the data, the configuration.

    Raises CheckpointError when the disk does not take it; older checkpoints are then intact.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    target = root / f"{_PREFIX}{step:08d}"
    for left_over in root.glob(f".{_PREFIX}*"):  # by a process that was killed while it wrote
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        with atomic_directory(target) as unfinished, _megatron_code():
            state = {**_state(trainer, critic), "extra": dict(extra)}
            dist_checkpointing.save(state, str(unfinished), sharded_strategy=_InProcess("torch_dist", 1))
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(
            f"could not write checkpoint {target}: {_reason(error)}. Older checkpoints are intact; make room and resume"
        ) from error
    for old in _all(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(path: Path, trainer: Trainer, critic: Critic | None = None) -> dict[str, object]:
    """Restores the weights, optimizer and schedule of `trainer` and `critic` to the bit; returns the `extra` beside.

    Raises CheckpointError when `path` is no complete checkpoint, or one of a model of another shape.
    """
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


def read_extra(path: Path) -> dict[str, object]:
    """The `extra` that the checkpoint at `path` was saved with, without loading anything else.

    Raises CheckpointError when `path` is no complete checkpoint.
    """
    try:
        extra: dict[str, object] = dist_checkpointing.load_common_state_dict(str(path))["extra"]
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"could not read checkpoint {path}: {_reason(error)}") from error
    return extra


def at_step(root: Path, step: int) -> Path:
    """The checkpoint of `step` under `root`. Raises CheckpointError, naming those there are."""
    path = root / f"{_PREFIX}{step:08d}"
    if path not in _all(root):
        there = ", ".join(str(int(found.name.removeprefix(_PREFIX))) for found in _all(root)) or "none"
        raise CheckpointError(f"{root}: no checkpoint of step {step}; there are: {there}")
    return path


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


def _all(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{_PREFIX}*") if (path / "metadata.json").is_file())


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: torch wraps what happened into a report of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
