"""Directories that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A fresh directory beside `target` that takes its name once the block has succeeded and all is on disk.

    What stood at `target` stays until then. If the block or the disk fails, the fresh directory is removed and the
    error passes on.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield unfinished
        complete(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def complete(unfinished: Path, target: Path) -> None:
    """Bring all of `unfinished` to disk and let it take the name of `target`, which lies beside it.

    No system call exchanges two directories portably: for a moment what stood at `target` stands at `replaced(target)`.
    """
    unfinished.chmod(0o755)
    for path in unfinished.rglob("*"):
        _flush(path)
    _flush(unfinished)
    aside = replaced(target)
    if target.exists():
        target.rename(aside)
    unfinished.rename(target)
    _flush(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def replaced(target: Path) -> Path:
    """Where a directory stands while another takes its name; whoever was killed then has left it there."""
    return target.with_name(f".{target.name}.replaced")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
