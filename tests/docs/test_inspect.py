"""docs/inspect.md shows what the command prints for the file it shows."""

import re
from pathlib import Path

import pytest

from relax import cli
from tests.docs.copied import ROOT

PAGE = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rollouts.jsonl").write_text(block("json"))
    command, _, output = block("console").partition("\n")
    assert cli.main(command.removeprefix("$ relax ").split()) == 0
    assert capsys.readouterr().out == output


def test_the_page_names_every_field_that_is_taken_by_itself() -> None:
    from relax.inspect import fields

    known = (*fields.GROUPS, *fields.REWARDS, *fields.LENGTHS, *fields.LOG_PROBS)
    assert [name for name in known if f"`{name}`" not in PAGE] == []
