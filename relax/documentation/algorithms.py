"""An algorithm's page, and the page that lists them all."""

from typing import Any, Final

from relax.catalogue import STAGES, Entry, shown, trait_table, without_reference
from relax.documentation.example import example, printed
from relax.documentation.markdown import GENERATED, UNCHECKED, cell, linked, prose, references, table
from relax_core import ALGORITHMS, Algorithm

INTRODUCTION: Final = """\
# Algorithms

Each is a record of pure functions in a file of its own, from which its page here, its flags and its checks are drawn.
`relax train --advantage-estimator NAME` trains with it, `relax algorithms NAME` tells about it in a terminal, and
[your own](../adding-an-algorithm.md) is one file more.
"""


def algorithm_page(algorithm: Algorithm[Any]) -> str:
    """What it is and is for, its formulas, flags and traits, and an example with what it prints.

    Errors: `RelaxError` where the example does not run.
    """
    entry = Entry.of(algorithm)
    code = example(entry, algorithm)
    parts = [
        f"{GENERATED}\n# {entry.name}",
        linked(entry.summary),
        linked(entry.description),
        _papers(entry),
        f"## When to use it\n\n{linked(entry.use)}" if entry.use else "",
        f"## Formulas\n\n{_formulas(algorithm)}",
        f"## Flags\n\n{_flags(entry)}",
        f"## Traits\n\n{_traits(entry)}",
        f"## Example\n\n```python\n{code}```\n\n```text\n{printed(code, entry.name)}```",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def algorithms_index() -> str:
    """Every algorithm in a line, in the registry's order."""
    entries = [Entry.of(algorithm) for algorithm in ALGORITHMS.values()]
    rows = [(f"[{entry.name}]({entry.name}.md)", cell(entry.summary), cell(_one_line(entry.use))) for entry in entries]
    return f"{GENERATED}\n{INTRODUCTION}\n{table(('algorithm', 'what it is', 'when to use it'), rows)}"


def _papers(entry: Entry) -> str:
    links = [f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})" for paper in entry.papers]
    return f"Paper: {', '.join(links)}" if links else ""


def _formulas(algorithm: Algorithm[Any]) -> str:
    """What each function of the record says of itself, and the core functions that it names of themselves."""
    parts = []
    for stage, step in STAGES.items():
        function = getattr(algorithm, stage)
        if function is not None:
            own, *more = prose(function)
            parts += [f"### {step.replace('->', '→')}", linked(without_reference(own)), *map(linked, more)]
            for name, link, core in references(own):
                first, *rest = prose(core)
                parts += [f"[`{name}`]({link}): {linked(first)}", *map(linked, rest)]
    return "\n\n".join(filter(None, parts))


def _flags(entry: Entry) -> str:
    rows = [(f"`{flag.flag}`", cell(shown(flag.default)), cell(flag.help)) for flag in entry.hyperparameters]
    return table(("flag", "default", "what it does"), rows) if rows else "None of its own."


def _traits(entry: Entry) -> str:
    rules = {trait: rule for trait, _, rule in trait_table()}
    rows = [
        (f"`{trait}`", cell(shown(value)), cell(rules[trait] or UNCHECKED)) for trait, value in entry.traits.items()
    ]
    if not rows:
        return "All at their [defaults](../traits.md)."
    return "Those that differ from the [defaults](../traits.md):\n\n" + table(
        ("trait", "value", "what the configuration is checked for"), rows
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
