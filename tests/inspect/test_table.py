"""Rows become numbers and groups; what is broken has no vote and is told with its line."""

import math

import numpy as np
import pytest

from relax.inspect import table
from relax.inspect.faults import KEPT, Faults
from relax.inspect.fields import Fields
from relax.inspect.read import MISSING, Batch, NoMapping
from relax.inspect.table import Reader, Table

FIELDS = Fields("", (("g",),), {"a": ("m", "a"), "b": ("m", "b")}, None, ("n",), ("lp",))


def read(rows: list[tuple[object, ...]], fields: Fields = FIELDS) -> tuple[Table, Reader]:
    """Rows of group, a, b, length, log-probs."""
    columns = dict(zip((("g",), ("m", "a"), ("m", "b"), ("n",), ("lp",)), zip(*rows, strict=True), strict=True))
    reader = Reader(fields, Faults())
    batch = Batch(range(1, len(rows) + 1), columns)
    return Table.gathered(reader.columns, [reader.rows(batch, "f", 0)]), reader


def test_numbers_by_group_in_the_order_of_the_file() -> None:
    found, reader = read([("y", 1, 2.5, 3, [-0.5, -1]), ("x", 0, 0, 0, []), ("y", 4, 5, 1, [-2.0])])
    assert reader.columns == ("a", "b", "length", "log_prob")
    assert reader.faults.kept[0].problem == "must have as many entries as the response has tokens"
    assert found.groups.tolist() == [0, 0, 1]
    assert found.places.tolist() == [1, 3, 2]
    assert found.values[:, :3].tolist() == [[1, 2.5, 3], [4, 5, 1], [0, 0, 0]]
    assert [None if math.isnan(v) else v for v in found.values[:, 3]] == [None, -2.0, None]


@pytest.mark.parametrize(
    ("value", "problem", "shown"),
    [
        (MISSING, "is missing", ""),
        (None, "is null (aborted)", ""),
        (math.nan, "must be finite and fit into float32", "nan"),
        (-math.inf, "must be finite and fit into float32", "-inf"),
        (1e39, "must be finite and fit into float32", "1e+39"),
        (10**400, "must be finite and fit into float32", "1" + "0" * 56 + "..."),
        (True, "must be a number, not true or false", "True"),
        ("1.0", "must be a number, not text", "'1.0'"),
        ([1.0], "must be a number, not a list", "[1.0]"),
        ({}, "must be a number, not a mapping", "{}"),
    ],
)
def test_a_broken_reward_is_told_and_its_row_left_out(value: object, problem: str, shown: str) -> None:
    found, reader = read([("x", 1, 2, 1, [-1]), ("x", value, 2, 1, [-1]), ("x", 3, 2, 1, [-1])])
    assert found.places.tolist() == [1, 3]
    assert reader.left_out == 1
    (fault,) = reader.faults.kept
    assert (fault.file, fault.line, fault.key, fault.problem, fault.value) == ("f", 2, "a", problem, shown)


@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, "is null (aborted)"), (3, "must map keys to numbers, not be a number"), (MISSING, "is missing")],
)
def test_what_is_no_mapping_is_told_once(value: object, problem: str) -> None:
    _, reader = read([("x", NoMapping(value), NoMapping(value), 1, [-1])])
    assert [(fault.key, fault.problem) for fault in reader.faults.kept] == [("m", problem)]


def test_a_number_in_numpys_type_is_one() -> None:
    found, reader = read([("x", np.float32(0.5), np.int64(2), 1, [-1])])
    assert found.values[0, :2].tolist() == [0.5, 2.0]
    assert reader.faults.total == 0


def test_broken_lengths_and_log_probs_are_told_and_the_row_kept() -> None:
    found, reader = read(
        [("x", 1, 1, -1, [-1]), ("x", 1, 1, 1.5, [0.5]), ("x", 1, 1, MISSING, None), ("x", 1, 1, 1, [math.nan])]
    )
    assert len(found) == 4
    assert [(fault.line, fault.key) for fault in reader.faults.kept] == [
        (1, "n"), (2, "n"), (3, "n"), (2, "lp"), (3, "lp"), (4, "lp"),
    ]  # fmt: skip


def test_group_ids_of_any_kind() -> None:
    ids = [1, "1", [1], {"role": "user"}, {"role": "user"}, True, "a\ud800", 1]
    found, _ = read([(value, 0, 0, 1, [-1]) for value in ids])
    groups = dict(zip(found.places.tolist(), found.groups.tolist(), strict=True))
    assert [groups[line] for line in range(1, 9)] == [0, 1, 2, 3, 3, 4, 5, 0]


def test_groups_of_two_fields_are_not_confused() -> None:
    fields = Fields("", (("g",), ("h",)), {"a": ("a",)})
    reader = Reader(fields, Faults())
    columns = {("g",): ["a", "ab", "a", 1], ("h",): ["bc", "c", "bc", None], ("a",): [0, 0, 0, 0]}
    found = Table.gathered(reader.columns, [reader.rows(Batch(range(1, 5), columns), "f", 0)])
    assert found.groups.tolist() == [0, 0, 1]
    assert (reader.faults.kept[0].line, reader.faults.kept[0].key) == (4, "h")


def test_chunks_hold_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHUNK", 3)
    groups = np.array([0, 0, 1, 1, 1, 1, 2, 3, 3])
    found = Table(("a",), groups, np.arange(9), np.zeros((9, 1)))
    assert [(rows.start, rows.stop) for rows in found.chunks()] == [(0, 6), (6, 9)]


def test_no_rows() -> None:
    found = Table.gathered(("a",), [])
    assert (len(found), found.number, list(found.chunks())) == (0, 0, [])


def test_places() -> None:
    assert [table.file_and_line(place) for place in table.places(7, [1, 10**9]).tolist()] == [(7, 1), (7, 10**9)]


def test_faults_are_counted_where_they_are_no_longer_kept() -> None:
    faults = Faults()
    for line in range(KEPT + 5):
        faults.add("f", line, "k", "is bad")
    assert (faults.total, len(faults.kept)) == (KEPT + 5, KEPT)
