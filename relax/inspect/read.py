"""Files of rollouts as columns, a bounded piece at a time: JSON lines and Parquet."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path as File
from typing import Final, cast

import attrs

from relax.errors import RelaxError
from relax.inspect.faults import Faults
from relax.inspect.fields import Path

BYTES: Final = 256 << 10
"""JSON text that is held at a time, and the line that it ends in."""
ROWS: Final = 8192
"""Rows of Parquet that are held at a time."""
LOOKED_AT: Final = 100
"""First rows from which the fields are told."""
ENDINGS: Final = (".jsonl", ".ndjson", ".json", ".parquet")


Objects = tuple[Sequence[int], list[dict[str, object]]]
"""Lines and what stands in them."""


class Missing:
    """Stands where a row lacks a field."""


@attrs.frozen
class NoMapping:
    """Stands for a key of a field that holds something else: `value`."""

    value: object


MISSING: Final = Missing()


@attrs.frozen
class Batch:
    """Some rows: their lines in the file, and each path's values."""

    lines: Sequence[int]
    columns: Mapping[Path, Sequence[object]]


def files_of(paths: Iterable[File]) -> list[File]:
    """The files, and those in directories: short names first, so that step 9 precedes step 10.

    Errors: `RelaxError` for none.
    """
    found: list[File] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.rglob("*") if p.suffix in ENDINGS), key=lambda p: (len(str(p)), str(p)))
            if not inside:
                raise RelaxError(f"{path}: no file in it ends in {', '.join(ENDINGS)}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise RelaxError(f"{path}: no such file")
    return found


def head(file: File) -> list[Mapping[str, object]]:
    """The first rows that can be read, whole. Errors: `RelaxError` where there are none."""
    if _is_parquet(file):
        columns = next(_tables(file, None, LOOKED_AT), {})
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    else:
        rows = list(islice((row for _, objects in _objects(file, Faults()) for row in objects), LOOKED_AT))
    if not rows:
        raise RelaxError(f"{file}: no row in it can be read; it must be JSON lines (an object a line) or Parquet")
    return [*rows]


def batches(file: File, paths: Sequence[Path], faults: Faults) -> Iterator[Batch]:
    """All rows of a file; what cannot be read as a row goes to `faults`."""
    if _is_parquet(file):
        yield from _parquet_batches(file, paths)
        return
    for lines, rows in _objects(file, faults):
        fields = {path[0]: _column(rows, path[0]) for path in paths}
        yield Batch(lines, {path: _inside(fields[path[0]], path) for path in paths})


def _column(rows: Sequence[dict[str, object]], key: str) -> list[object]:
    try:
        return list(map(itemgetter(key), rows))  # three times as fast as `get`
    except KeyError:
        return [row.get(key, MISSING) for row in rows]


def _inside(values: Sequence[object], path: Path) -> Sequence[object]:
    if len(path) == 1:
        return values
    if set(map(type, values)) == {dict}:
        return _column(cast(Sequence[dict[str, object]], values), path[1])
    return [value.get(path[1], MISSING) if isinstance(value, dict) else NoMapping(value) for value in values]


# --- JSON lines -------------------------------------------------------------------------------------------------------


def _objects(file: File, faults: Faults) -> Iterator[Objects]:
    """The objects of JSON lines with their line numbers. Empty lines are none."""
    first = 1
    with _opening(file), file.open("rb") as stream:
        while texts := stream.readlines(BYTES):
            lines = range(first, first + len(texts))
            yield _together(lines, texts) or _one_by_one(lines, texts, str(file), faults)
            first += len(texts)


def _together(lines: Sequence[int], texts: Sequence[bytes]) -> Objects | None:
    """All lines in one call, half again as fast; None unless each is an object."""
    try:
        rows = json.loads("[" + b",".join(texts).decode() + "]")
    except (ValueError, RecursionError):
        return None
    return (lines, rows) if len(rows) == len(texts) and set(map(type, rows)) == {dict} else None


def _one_by_one(numbers: Sequence[int], texts: Sequence[bytes], file: str, faults: Faults) -> Objects:
    lines, rows = [], []
    for line, text in zip(numbers, texts, strict=True):
        if text.isspace():
            continue
        try:
            row = json.loads(text.decode())
        except ValueError as error:  # of JSON or of UTF-8
            faults.add(file, line, "line", f"is not JSON ({_reason(error)})", _start(text))
        except RecursionError:
            faults.add(file, line, "line", "is nested too deeply", _start(text))
        else:
            if type(row) is dict:
                lines.append(line)
                rows.append(row)
            else:
                faults.add(file, line, "line", "is not an object", _start(text))
    return lines, rows


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "nor UTF-8"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _start(text: bytes) -> str:
    return text[:60].decode(errors="backslashreplace").strip()


@contextmanager
def _opening(file: File) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RelaxError(f"{file}: {error.strerror or error}") from error


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _is_parquet(file: File) -> bool:
    with _opening(file), file.open("rb") as stream:
        return stream.read(4) == b"PAR1"


def _parquet_batches(file: File, paths: Sequence[Path]) -> Iterator[Batch]:
    first = 1
    for columns in _tables(file, {path[0] for path in paths}, ROWS):
        size = len(next(iter(columns.values()), ()))
        lacking = [MISSING] * size
        found = {path: _inside(columns.get(path[0], lacking), path) for path in paths}
        yield Batch(range(first, first + size), found)
        first += size


def _tables(file: File, wanted: set[str] | None, size: int) -> Iterator[dict[str, list[object]]]:
    """The wanted columns (None: all) of a file that has any of them, `size` rows at a time."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise RelaxError(f"{file}: reading Parquet needs pyarrow: pip install 'relax-rl[inspect]'") from None
    try:
        with _opening(file), ParquetFile(file) as parquet:
            names = [name for name in parquet.schema_arrow.names if wanted is None or name in wanted]
            for batch in parquet.iter_batches(batch_size=size, columns=names):
                yield {name: batch.column(name).to_pylist() for name in names}
    except ArrowException as error:
        raise RelaxError(f"{file}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from error
