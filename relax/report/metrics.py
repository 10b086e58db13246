"""Records on disk, one JSON object a line: whole lines of finite numbers, or nothing."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from relax.errors import RelaxError

Record = Mapping[str, object]


class JsonLines:
    """Appends records to a file, each in one write, so that a reader never sees half of one.

    Example:
        with JsonLines(run_dir / "metrics.jsonl") as metrics:
            metrics.write({"step": 1, "loss": 0.5})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RelaxError(f"{path}: cannot be written: {error.strerror}") from error

    def write(self, record: Record) -> None:
        """Append one record.

        Errors: `RelaxError` naming the key of a number that is not finite or of a value that JSON does not have; or if
        the disk takes only part of the line, which is then taken back.
        """
        for key, value in record.items():
            _check(key, value, record)
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            reason = None if written == len(line) else "no space left for a whole line"
        except OSError as error:
            reason = str(error.strerror)
        if reason is not None:
            self._file.truncate(start)
            raise RelaxError(f"{self.path}: cannot be written: {reason}; what was recorded before is intact")

    def close(self) -> None:
        """Nothing is held back, so this only gives the file back."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path) -> list[dict[str, object]]:
    """The records of a file, oldest first; none if it does not exist yet.

    The last line may be torn (the process was killed, or is writing): it is left out. Errors: `RelaxError` naming file
    and line for anything else that is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RelaxError(f"{path}: cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RelaxError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise RelaxError(f"{path}, line {number}: expected an object, got {line[:60]!r}")
        records.append(record)
    return records


def _check(key: str, value: object, record: Record) -> None:
    """Errors: `RelaxError` for what JSON cannot hold, named by its path of keys."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check(f"{key}.{name}", inner, record)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(f"{key}[{index}]", inner, record)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RelaxError(f"{key} is {value} at step {record.get('step', '?')}: a metric must be a finite number")
    elif value is not None and not isinstance(value, str | int | float):
        raise RelaxError(
            f"{key} is {value!r}, a {type(value).__name__}: a metric is a number, a text or a list of them"
        )
