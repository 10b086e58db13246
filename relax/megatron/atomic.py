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
        unfinished.chmod(0o755)
        for path in unfinished.rglob("*"):
            _flush(path)
        _flush(unfinished)
        if target.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            target.rename(aside / "old")
            unfinished.rename(target)
            shutil.rmtree(aside)
        else:
            unfinished.rename(target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
