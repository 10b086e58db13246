"""Every generated page, by its place below `docs/`, and how they get there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from relax.catalogue import trait_table
from relax.documentation.algorithms import algorithm_page, algorithms_index
from relax.documentation.markdown import GENERATED, UNCHECKED, cell, table
from relax.documentation.reference import MODULES, reference_index, reference_page
from relax_core import ALGORITHMS

WHOLLY_GENERATED: Final = ("algorithms", "reference")
"""Directories in which nothing else lies: what is no longer generated is removed from them."""


def pages() -> dict[str, str]:
    """Path below `docs/` -> text. Errors: `RelaxError` where an algorithm's example does not run."""
    return {
        "traits.md": traits_page(),
        "algorithms/index.md": algorithms_index(),
        **{f"algorithms/{name}.md": algorithm_page(algorithm) for name, algorithm in ALGORITHMS.items()},
        "reference/index.md": reference_index(),
        **{f"reference/{module}.md": reference_page(module) for module in MODULES},
    }


def outdated(docs: Path, wanted: Mapping[str, str]) -> list[str]:
    """Paths below `docs` of pages that are missing, that differ, or that should not be there."""
    differing = [name for name, text in wanted.items() if not (docs / name).is_file() or _read(docs / name) != text]
    return sorted([*differing, *_stray(docs, wanted)])


def write(docs: Path) -> list[Path]:
    """Bring the generated pages below `docs` up to date. Returns the files that changed, removed ones included."""
    wanted = pages()
    changed = [docs / name for name in outdated(docs, wanted)]
    for name, text in wanted.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8")
    for name in _stray(docs, wanted):
        (docs / name).unlink()
    return changed


def traits_page() -> str:
    """What traits there are, and what a configuration is checked for."""
    rows = [(f"`{trait}`", cell(default), cell(rule or UNCHECKED)) for trait, default, rule in trait_table()]
    return f"""\
{GENERATED}
# Traits and their checks

An algorithm states facts about itself in its record's `traits`; what it does not state asserts the default. Before
anything starts, every configuration is checked against them, whether it came from flags, YAML or Python.

{table(("trait", "default", "what the configuration is checked for"), rows)}"""


def _stray(docs: Path, wanted: Mapping[str, str]) -> list[str]:
    found = [path.relative_to(docs).as_posix() for part in WHOLLY_GENERATED for path in (docs / part).glob("*.md")]
    return [name for name in found if name not in wanted]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
