"""Rows come back from JSON lines and Parquet with their lines; what is none is told."""

import json
import sys
from pathlib import Path

import pytest

from relax.errors import RelaxError
from relax.inspect import read
from relax.inspect.faults import Faults
from tests.inspect.conftest import Write

PATHS = (("id",), ("rewards", "a"))


def all_of(file: Path, faults: Faults) -> list[tuple[int, object, object]]:
    found = []
    for batch in read.batches(file, PATHS, faults):
        found += list(zip(batch.lines, *(batch.columns[path] for path in PATHS), strict=True))
    return found


def test_lines_are_counted_over_empty_and_broken_ones(write: Write) -> None:
    file = write(
        ['{"id": 1, "rewards": {"a": 0.5}}', "", "  ", '{"id": 2', "[3]", '{"id": 4}', '{"rewards": {"b": 1}}']
    )
    faults = Faults()
    rows = all_of(file, faults)
    assert [row[:2] for row in rows] == [(1, 1), (6, 4), (7, read.MISSING)]
    assert rows[0][2] == 0.5
    assert rows[1][2] == read.NoMapping(read.MISSING)
    assert rows[2][2] is read.MISSING
    assert [(fault.line, fault.problem.split(" (")[0]) for fault in faults.kept] == [
        (4, "is not JSON"),
        (5, "is not an object"),
    ]


def test_pieces_do_not_show(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write([{"id": n, "rewards": {"a": n / 2}} for n in range(500)])
    whole = all_of(file, Faults())
    monkeypatch.setattr(read, "BYTES", 100)
    assert all_of(file, Faults()) == whole == [(n + 1, n, n / 2) for n in range(500)]


def test_two_objects_on_a_line_are_no_row(write: Write) -> None:
    faults = Faults()
    assert all_of(write(['{"id": 1},{"id": 2}', '{"id": 3}']), faults)[0][:2] == (2, 3)
    assert [fault.line for fault in faults.kept] == [1]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file, faults = tmp_path / "x.jsonl", Faults()
    file.write_bytes(b'{"id": "\xff"}\n{"id": 1, "rewards": {"a": 2}}')
    assert all_of(file, faults) == [(2, 1, 2)]
    assert str(faults.kept[0]) == f'{file}:1: line is not JSON (nor UTF-8), got {{"id": "\\xff"}}'


def test_parquet_gives_what_json_lines_give(write: Write, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": n // 2, "rewards": {"a": n * 0.5} if n % 7 else None, "text": "x"} for n in range(100)]
    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), file, row_group_size=9)
    assert all_of(file, Faults()) == all_of(write(rows), Faults())
    assert read.head(file)[:3] == rows[:3]
    assert len(read.head(file)) == 100


def test_a_column_that_parquet_lacks_is_missing(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"id": 5}]), file)
    assert all_of(file, Faults()) == [(1, 5, read.NoMapping(read.MISSING))]


def test_without_pyarrow_parquet_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 and more")
    with pytest.raises(RelaxError, match="not a Parquet file that can be read"):
        read.head(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RelaxError, match=r"reading Parquet needs pyarrow: pip install 'relax-rl\[inspect\]'"):
        read.head(file)


def test_directories_are_read_in_the_order_of_steps(write: Write, tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write([{"id": step}], f"dump/{step}.jsonl")
    (tmp_path / "dump" / "notes.txt").write_text("no rows")
    assert [path.name for path in read.files_of([tmp_path / "dump"])] == ["9.jsonl", "10.jsonl", "100.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "nowhere: no such file"), ("empty", "empty: no file in it ends in .jsonl")]
)
def test_no_file(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RelaxError, match=message):
        read.files_of([tmp_path / name])


def test_a_file_without_a_row(write: Write) -> None:
    with pytest.raises(RelaxError, match="no row in it can be read"):
        read.head(write(["", json.dumps([1])]))
