"""Markdown out of docstrings: tables, and links from the names in backticks to the reference."""

import inspect
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Final

import relax_core

GENERATED: Final = "<!-- Written by `python -m relax.documentation`; a test compares. -->"
UNCHECKED: Final = "not checked: it speaks to the runtime"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the rows' cells are Markdown already."""
    top, *lines = (f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return "".join([top, "|---" * len(head) + "|\n", *lines])


def cell(text: str) -> str:
    """Text that may stand in a table: the bar of |x| ends no cell there."""
    return text.replace("|", r"\|")


def prose(documented: object) -> list[str]:
    """The paragraphs of a docstring, a line each, up to the sections on arguments and errors."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(documented) or "").split("\n\n")]
    return list(itertools.takewhile(lambda paragraph: not paragraph.startswith(("Args:", "Raises:")), paragraphs))


def linked(text: str) -> str:
    """Text in which `module.name` of relax_core, in backticks, leads to the reference."""
    for name, link, _ in references(text):
        for spelled in (f"`{name}`", f"`relax_core.{name}`"):
            text = text.replace(spelled, f"[{spelled}]({link})")
    return text


def references(text: str) -> list[tuple[str, str, object]]:
    """Functions and constants of relax_core that a text names in backticks as `module.name`, each once.

    As (name, where the reference tells of it as seen from an algorithm's page, what it is).
    """
    found = dict.fromkeys(re.findall(r"`(?:relax_core\.)?(\w+\.\w+)`", text))
    split = [name.partition(".") for name in found]
    return [
        (f"{module}.{name}", f"../reference/{module}.md#relax_core.{module}.{name}", getattr(owner, name))
        for module, _, name in split
        if hasattr(owner := getattr(relax_core, module, None), name)
    ]
