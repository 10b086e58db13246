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
    "reducer": "tokens -> weights",
    "value_loss": "returns -> critic's loss",
}
"""A record's functions, in the order in which a number passes them, and what each turns into what."""
WIDTH: Final = 100


@attrs.frozen
class Entry:
    """An algorithm as its record and docstrings describe it.

    Attributes:
        summary: the first sentence of its module's docstring; `description` is what follows, without the next two.
        use: the paragraph that begins with "Use it": what the algorithm is for.
        example: lines of the section "Example:", which the example of its page has instead of its own.
        traits: those that differ from the default.
    """

    name: str
    summary: str
    description: str
    use: str
    example: str
    papers: tuple[str, ...]
    traits: dict[str, object]
    hyperparameters: tuple[Option, ...]
    stages: dict[str, str]

    @classmethod
    def of(cls, algorithm: Algorithm[Any]) -> "Entry":
        """Reads the record, and the docstring of the module it stands in."""
        text = inspect.getdoc(sys.modules[algorithm.hyperparameters.__module__]) or ""
        prose, _, example = text.partition("\n\nExample:\n")
        first, *rest = prose.split("\n\n")
        summary = re.split(r"\.? *(?:After )?arXiv", " ".join(first.split()))[0].rstrip(".") + "."
        return cls(
            name=algorithm.name,
            summary=summary,
            description="\n\n".join(paragraph for paragraph in rest if not paragraph.startswith("Use it")),
            use="\n\n".join(paragraph for paragraph in rest if paragraph.startswith("Use it")),
            example=textwrap.dedent(example),
            papers=tuple(f"arXiv:{number}" for number in dict.fromkeys(re.findall(r"\d{4}\.\d{5}", text))),
            traits=_unusual(algorithm.traits),
            hyperparameters=tuple(options_of(algorithm.hyperparameters)),
            stages={stage: _formula(getattr(algorithm, stage)) for stage in STAGES if getattr(algorithm, stage)},
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
    return [(field.name, shown(field.default), rules.get(field.name, "")) for field in attrs.fields(Traits)]


def _untitled(entry: Entry) -> str:
    """The summary without the algorithm's name, which stands before it already."""
    title, _, rest = entry.summary.partition(": ")
    letters = re.sub(r"[^a-z]", "", title.lower().replace("+", "plus"))
    return rest if letters == entry.name.replace("_", "") else entry.summary


def _entry(name: str) -> Entry:
    if name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ConfigError([f"no algorithm {name!r}; there are {known}{suggestion(name, ALGORITHMS)}"])
    return Entry.of(ALGORITHMS[name])


def _in_full(entry: Entry) -> str:
    parts = [textwrap.fill(entry.summary, WIDTH), entry.description, entry.use]
    if entry.papers:
        parts.append("paper   " + ", ".join(entry.papers))
    parts.append(_columns("stages", [(STAGES[stage], text) for stage, text in entry.stages.items()]))
    rules = {trait: rule for trait, _, rule in trait_table()}
    traits = [(f"{name} = {shown(value)}", rules.get(name, "")) for name, value in entry.traits.items()]
    parts.append(_columns("traits that differ from the default", traits or [("none", "")]))
    flags = [(option.flag, f"{option.help} [{shown(option.default)}]") for option in entry.hyperparameters]
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
    return f"{without_reference(text)} {name}: {_first_paragraph(getattr(getattr(relax_core, module), name))}".strip()


def without_reference(text: str) -> str:
    """What a docstring says besides "See `module.name`." at its end: where that is told, too, it need not be named."""
    return re.sub(r"[,.:]? *\b[Ss]ee `\w+\.\w+`\.?$", ".", text).removeprefix(".")


def _first_paragraph(documented: object) -> str:
    text, _, _ = (inspect.getdoc(documented) or "").partition("\n\n")
    return " ".join(text.split())


def shown(value: object) -> str:
    """A value as tables and help texts show it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
