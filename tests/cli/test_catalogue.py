"""What is told about algorithms follows from their records, and no other code knows their names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import relax
import relax_core
from relax.catalogue import Entry, as_text, trait_table
from relax_core import ALGORITHMS, Traits

ROOT = Path(relax.__file__).parent.parent
FREE_TO_NAME = ("relax_core/algorithms/", "relax_core/registry.py", "relax/recipes/")


def test_every_trait_is_in_the_table_with_its_default() -> None:
    table = {trait: default for trait, default, _ in trait_table()}
    assert list(table) == [field.name for field in attrs.fields(Traits)]
    assert (table["min_group_size"], table["reads_components"], table["ratio_level"]) == ("1", "no", "token")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_documented(name: str) -> None:
    entry = Entry.of(ALGORITHMS[name])
    assert len(entry.summary) > 20
    assert entry.use.startswith("Use it "), "say what it is for in the docstring of its module: 'Use it ...'"
    assert entry.use in as_text(name)
    assert all(entry.stages.values())
    assert all(option.help for option in entry.hyperparameters)
    assert max(map(len, as_text(name).splitlines())) <= 130


def _names_in(node: ast.AST) -> Iterator[tuple[int, str]]:
    for inner in ast.walk(node):
        text = (
            inner.value if isinstance(inner, ast.Constant) else inner.attr if isinstance(inner, ast.Attribute) else None
        )
        if isinstance(text, str) and text.lower() in ALGORITHMS:
            yield getattr(inner, "lineno", 0), text


@pytest.mark.parametrize("package", [relax, relax_core])
def test_no_code_decides_by_an_algorithms_name(package: object) -> None:
    found = []
    for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):  # type: ignore[attr-defined]
        name = str(path.relative_to(ROOT))
        if name.startswith(FREE_TO_NAME):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Match | ast.Dict | ast.Set):
                found += [f"{name}:{line} {text}" for line, text in _names_in(node)]
    assert found == []


def test_the_walk_would_find_one() -> None:
    source = "if algorithm.name == 'gdpo': pass\nx = {'grpo': 1}\nmatch y:\n    case 'grpo': pass\nz in {modes.gdpo}"
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.Match | ast.Dict | ast.Set)]
    assert {line for node in nodes for line, _ in _names_in(node)} == {1, 2, 4, 5}
