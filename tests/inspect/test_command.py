"""`relax inspect` from outside: what it prints, writes and exits with."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from relax import cli
from tests.inspect.conftest import Write

ROWS = [
    {"group_id": "x", "rewards": {"right": 1, "short": 3}, "response_length": 2},
    {"group_id": "x", "rewards": {"right": 0, "short": 8}, "response_length": 9},
    {"group_id": "y", "rewards": {"right": 1, "short": 0}, "response_length": 4},
    {"group_id": "y", "rewards": {"right": 0, "short": 1}, "response_length": 4},
]
BROKEN = [*ROWS, {"group_id": "y", "rewards": None, "response_length": 4}]


def test_for_people(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(BROKEN)
    assert cli.main(["inspect", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"{file}: 4 rows in 2 groups of 2\ngroup: group_id; rewards: rewards.right, rewards.short\n1 row left" in out
    assert re.search(r"^grpo +right \+ short +1 \(50.0 %\) +1 +3 +2 +0.707$", out, re.MULTILINE)
    assert f"1 broken value\n  {file}:5: rewards is null (aborted)\n" in out


def test_strict_is_a_status(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--strict", str(write(ROWS))]) == 0
    assert cli.main(["inspect", "--strict", str(write(BROKEN))]) == 1
    assert "1 broken value" in capsys.readouterr().out


def test_for_programs(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(BROKEN))
    assert cli.main(["inspect", "--json", file, "--compare", "grpo,rloo"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["files"], told["rows"], told["left_out"], told["sizes"]) == ([file], 4, 1, {"2": 2})
    grpo, rloo = told["outcomes"]
    assert grpo["silent"] == {"count": 1, "examples": [{"file": file, "line": 3}]}
    assert rloo["largest"] == 4.0  # the sums 4 and 8
    assert told["fields"]["components"] == {"right": "rewards.right", "short": "rewards.short"}
    assert told["broken"]["first"] == [
        {"file": file, "line": 5, "key": "rewards", "value": "", "problem": "is null (aborted)"}
    ]


def test_a_page_that_needs_nothing_else(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    rows = [{**row, "rewards": {"<b>": row["rewards"]["right"], "a&b": 2}} for row in ROWS]  # type: ignore[index]
    assert cli.main(["inspect", str(write(rows)), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))  # type: ignore[method-assign]
    parser.feed(text)
    assert not [tag for tag, attributes in tags if {"src", "href"} & {*attributes}]
    assert "b" in dict(tags)  # of the page's own
    assert "&lt;b&gt;" in text
    assert "a&amp;b" in text
    charts = [attributes["aria-label"] for tag, attributes in tags if tag == "svg"]
    assert charts == [
        "advantages of grpo: 4 values from −0.707 to 0.707",
        "advantages of gdpo: 4 values from −0.707 to 0.707",
        "<b>: 4 values from 0 to 1",
        "a&b: 4 values from 1.5 to 2.5",
    ]
    bins = re.findall(r"<title>(\d+) from", text)
    assert sum(map(int, bins)) == 16


def test_a_page_of_no_rows(write: Write, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    file = write([{"group": 1, "reward": None}, {"group": 1, "reward": "x"}])
    assert cli.main(["inspect", str(file), "--rewards", "reward", "--html", str(page)]) == 0
    assert "reward must be a number, not text" in page.read_text()


def test_files_of_several_steps(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same prompt in two steps is two groups; a group may go over files."""
    row = {"input": "p", "output": "o", "score": 0.0, "fmt": 1, "brief": 0.5}
    for step in (1, 2):
        write([{**row, "step": step, "score": score} for score in (0.0, 1.0)], f"dump/{step}.jsonl")
    assert cli.main(["inspect", str(tmp_path / "dump"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["fields"]["source"], told["groups"], told["fields"]["scalar"]) == ("verl", 2, "score")
    assert [(o["name"], o["reads"], o["signal"]) for o in told["outcomes"]] == [
        ("grpo", "score", 2),
        ("gdpo", "fmt, brief", 0),
    ]
    assert cli.main(["inspect", str(tmp_path / "dump"), "--group", "input"]) == 0
    out = capsys.readouterr().out
    assert "1.jsonl and 1 more file: 4 rows in 1 group of 4, written by verl" in out


def test_trl_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"step": "1", "prompt": p, "completion": "c", "len": a, "fmt": b, "advantage": 0.0}
        for p, a, b in (("p", 0.0, 1.0), ("p", 1.0, 1.0), ("q", 2.0, 0.0), ("q", 2.0, float("nan")), ("q", 1.0, 1.0))
    ]
    file = tmp_path / "completions_00001.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    assert cli.main(["inspect", str(file)]) == 0
    out = capsys.readouterr().out
    assert "4 rows in 2 groups of 2, written by TRL\ngroup: step, prompt; rewards: len, fmt" in out
    assert f"{file}:4: fmt must be finite and fit into float32, got nan" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "gpdo"], "did you mean gdpo?"),
        (["--compare", "grpo,,gdpo"], "argument --compare: 'grpo,,gdpo' holds an empty name"),
        (["--weights", "1,x"], "argument --weights: '1,x' must be numbers, separated by commas"),
        (["--weights", "1,nan"], "argument --weights: '1,nan' must be finite"),
        (["--weights", "1,2,3"], "--weights: 3 reward weights for 2 reward components (components: right, short)"),
        (["--weights", "0,0"], "--weights: reward weights must not all be zero"),
        (["--group", "x"], "--group x: no such field among group_id, rewards, response_length"),
        (["--rewards", "rewards.rigth"], "did you mean rewards.right?"),
        (["--html", "nowhere/page.html"], "--html nowhere/page.html: there is no directory nowhere"),
        (["--jsn"], "unexpected '--jsn'"),
    ],
)
def test_wrong_flags(arguments: list[str], said: str, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(write(ROWS)), *arguments]) == 2
    out, err = capsys.readouterr()
    line, last = err.splitlines()
    assert line.startswith("relax inspect: error: ")
    assert said in line
    assert last == "relax inspect: 'relax inspect --help' lists what there is; nothing was started"
    assert out == ""


def test_no_file(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    assert cli.main(["inspect"]) == 2
    assert cli.main(["inspect", "nowhere.jsonl"]) == 1
    assert capsys.readouterr().err.endswith("relax inspect: error: nowhere.jsonl: no such file\n")


def test_json_lines_need_no_pyarrow(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "pyarrow"] or ["pyarrow"]:
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["inspect", str(write(ROWS))]) == 0
    assert "4 rows" in capsys.readouterr().out


def test_a_page_that_cannot_be_written(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page").mkdir()
    assert cli.main(["inspect", str(write(ROWS)), "--html", str(tmp_path / "page")]) == 1
    assert "--html" in capsys.readouterr().err
