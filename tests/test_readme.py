"""What the documents show is what happens: their Python runs, and prints what is printed below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n```text\n(?P<output>.*?)```)?", re.DOTALL)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(match["code"], match["output"], id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, match in enumerate(EXAMPLE.finditer(document.read_text(encoding="utf-8")), start=1)
]


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_an_example_prints_what_the_document_says(code: str, output: str | None) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    if output is not None:
        assert printed.getvalue() == output


def test_the_readme_has_examples_with_output() -> None:
    assert any(parameter.values[1] for parameter in EXAMPLES), "the pattern above no longer finds any"
