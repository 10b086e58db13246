"""What `relax algorithms` tells: the registry in words, for people and for programs, read from the records."""

import inspect
import json
import re
import sys
import textwrap
from typing import Any, Final

import attrs

import relax_core
from relax.config.checks import CHECKS
from relax.config.options import Option, options_of
from relax.errors import ConfigError, suggestion
from relax_core import ALGORITHMS, Algorithm, Traits

STAGES: Final = {
    "normalize_rewards": "rewards -> scores",
    "estimate_advantages": "scores -> advantages",
    "policy_loss": "advantages -> loss",
}
WIDTH: Final = 100
TRAITS_INTRODUCTION: Final = """\
<!-- Written by `python -m relax.catalogue > docs/traits.md`; a test compares. -->
# Traits and their checks

An algorithm states facts about itself in its record's `traits`; what it does not state asserts the default. Before
anything starts, every configuration is checked against them, whether it came from flags, YAML or Python.
"""


@attrs.frozen
class Entry:
    """An algorithm as its record and docstrings describe it. `traits` are those that differ from the default."""

    name: str
    summary: str
    description: str
    papers: tuple[str, ...]
    traits: dict[str, object]
    hyperparameters: tuple[Option, ...]
    stages: dict[str, str]

    @classmethod
    def of(cls, algorithm: Algorithm[Any]) -> "Entry":
        """Reads the record, and the docstring of the module it stands in."""
        text = inspect.getdoc(sys.modules[algorithm.hyperparameters.__module__]) or ""
        first, _, rest = text.partition("\n\n")
        summary = re.split(r"\.? *(?:After )?arXiv", " ".join(first.split()))[0].rstrip(".") + "."
        return cls(
            name=algorithm.name,
            summary=summary,
            description=rest.strip(),
            papers=tuple(f"arXiv:{number}" for number in dict.fromkeys(re.findall(r"\d{4}\.\d{5}", text))),
            traits=_unusual(algorithm.traits),
            hyperparameters=tuple(options_of(algorithm.hyperparameters)),
            stages={stage: _formula(getattr(algorithm, stage)) for stage in STAGES},
        )


def as_text(name: str | None) -> str:
    """All algorithms, a line each, or everything about one. Errors: `ConfigError` for an unknown name."""
    if name is not None:
        return _in_full(_entry(name))
    width = max(map(len, ALGORITHMS)) + 2
    lines = [
        textwrap.fill(
            _untitled(Entry.of(algorithm)), WIDTH, initial_indent=name.ljust(width), subsequent_indent=" " * width
        )
        for name, algorithm in ALGORITHMS.items()
    ]
    return "\n".join(
        [*lines, "", "'relax algorithms NAME' tells more; 'relax train --advantage-estimator NAME' trains with it"]
    )


def as_json(name: str | None) -> str:
    """The same as an array of objects, or as one object. Errors: `ConfigError` for an unknown name."""
    entries = [_plain(_entry(name)) for name in ([name] if name is not None else ALGORITHMS)]
    return json.dumps(entries if name is None else entries[0], indent=2, ensure_ascii=False)


def trait_table() -> list[tuple[str, str, str]]:
    """(trait, default, what the configuration is checked for), for every trait: the table of the documentation."""
    rules = {check.trait: inspect.getdoc(check.faults) or "" for check in CHECKS if check.trait}
    return [(field.name, _shown(field.default), rules.get(field.name, "")) for field in attrs.fields(Traits)]


def _untitled(entry: Entry) -> str:
    """The summary without the algorithm's name, which stands before it already."""
    title, _, rest = entry.summary.partition(": ")
    letters = re.sub(r"[^a-z]", "", title.lower().replace("+", "plus"))
    return rest if letters == entry.name.replace("_", "") else entry.summary


def traits_page() -> str:
    """The page of the documentation that `trait_table` fills."""
    rows = "".join(
        f"| `{trait}` | {default} | {rule or 'not checked: it speaks to the runtime'} |\n"
        for trait, default, rule in trait_table()
    )
    return f"{TRAITS_INTRODUCTION}\n| trait | default | what the configuration is checked for |\n|---|---|---|\n{rows}"


def _entry(name: str) -> Entry:
    if name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ConfigError([f"no algorithm {name!r}; there are {known}{suggestion(name, ALGORITHMS)}"])
    return Entry.of(ALGORITHMS[name])


def _in_full(entry: Entry) -> str:
    parts = [textwrap.fill(entry.summary, WIDTH), entry.description]
    if entry.papers:
        parts.append("paper   " + ", ".join(entry.papers))
    parts.append(_columns("stages", [(STAGES[stage], text) for stage, text in entry.stages.items()]))
    rules = {trait: rule for trait, _, rule in trait_table()}
    traits = [(f"{name} = {_shown(value)}", rules.get(name, "")) for name, value in entry.traits.items()]
    parts.append(_columns("traits that differ from the default", traits or [("none", "")]))
    flags = [(option.flag, f"{option.help} [{_shown(option.default)}]") for option in entry.hyperparameters]
    parts.append(_columns("flags [default]", flags or [("none", "")]))
    return "\n\n".join(part for part in parts if part)


def _columns(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(left) for left, _ in rows) + 4
    lines = [
        textwrap.fill(right, WIDTH, initial_indent=f"  {left}".ljust(width), subsequent_indent=" " * width)
        if right
        else f"  {left}"
        for left, right in rows
    ]
    return "\n".join([title, *lines])


def _plain(entry: Entry) -> dict[str, object]:
    flags = [{"flag": option.flag, "default": option.default, "help": option.help} for option in entry.hyperparameters]
    return {**attrs.asdict(entry, recurse=False), "hyperparameters": flags}


def _unusual(traits: Traits) -> dict[str, object]:
    values = {field.name: (getattr(traits, field.name), field.default) for field in attrs.fields(Traits)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _formula(stage: object) -> str:
    """The first paragraph of a stage's docstring, then that of the core function it refers to: the formula."""
    text = _first_paragraph(stage)
    reference = re.search(r"`(\w+\.\w+)`", text)
    if reference is None:
        return text
    module, _, name = reference[1].partition(".")
    own = re.sub(r"[,.:]? *\b[Ss]ee `\w+\.\w+`\.?$", ".", text)
    return f"{own} {name}: {_first_paragraph(getattr(getattr(relax_core, module), name))}"


def _first_paragraph(documented: object) -> str:
    text, _, _ = (inspect.getdoc(documented) or "").partition("\n\n")
    return " ".join(text.split())


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


if __name__ == "__main__":
    print(traits_page(), end="")
