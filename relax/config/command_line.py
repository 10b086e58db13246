"""The settings as flags: one for each option, in the sections of the configuration."""

import argparse
import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from relax.config.checks import UNAVAILABLE
from relax.config.configure import options
from relax.config.options import Given, Option
from relax.errors import suggestion
from relax_core import ALGORITHMS

# argparse takes `-1e-3` for a flag otherwise.
NEGATIVE_NUMBER: Final = re.compile(r"^-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")
EPILOG: Final = """\
A switch is turned off again (over a file or a recipe) with --no- before its name. Values come from flags, over the
--config file, over the recipe, over the defaults shown; the run's config.yaml holds what came of it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting, `--config` and `--resume`."""
    parser._negative_number_matcher = NEGATIVE_NUMBER
    parser.epilog = EPILOG
    parser.formatter_class = HelpFormatter
    parser.usage = "relax train [--config FILE.yaml] [--SETTING VALUE ...]\n       relax train --resume RUN"
    sections = dict.fromkeys(option.section for option in options().values())
    groups = {section: parser.add_argument_group(section) for section in sections}
    first = next(iter(groups.values()))
    first.add_argument(
        "--config", "--custom-config-path", type=Path, metavar="FILE.yaml", help="settings from a file, names as here"
    )
    first.add_argument("--resume", type=Path, metavar="RUN", help="continue a run that was stopped")
    for option in options().values():
        _add(groups[option.section], option)


class HelpFormatter(argparse.HelpFormatter):
    """Shows a flag with the value it takes, on a line of its own where both do not fit."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 120)
        super().__init__(prog, max_help_position=38, width=width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # Our flags take "?" or "*" values only so that a missing one is ours to report.
        name = str(action.metavar or default_metavar)
        return f"{name} [{name} ...]" if action.nargs == "*" else name


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    if option.kind.base is bool:
        hidden = argparse.SUPPRESS
        off = "--no-" + option.flag.removeprefix("--")
        group.add_argument(option.flag, action="store_true", default=hidden, help=_help(option))
        group.add_argument(off, dest=option.name, action="store_false", default=hidden, help=hidden)
        return
    # A flag without its value is let through, to be reported together with everything else.
    group.add_argument(
        option.flag,
        nargs="*" if option.kind.many else "?",
        default=argparse.SUPPRESS,
        metavar=option.kind.metavar,
        help=_help(option),
    )


def _help(option: Option) -> str:
    notes = []
    if option.algorithms is not None:
        notes.append(_owners(option.algorithms))
    if option.default not in (None, ()) and option.default is not False:
        notes.append(f"default {option.default}")
    if option.name in UNAVAILABLE:
        notes.append("not available yet")
    text = _lower_first(option.help).removesuffix(".") + (f" ({'; '.join(notes)})" if notes else "")
    return text.replace("%", "%%")


def _owners(having: Sequence[str]) -> str:
    """Which algorithms have a hyperparameter, in the shorter way."""
    lacking = [name for name in ALGORITHMS if name not in having]
    if len(lacking) < len(having):
        return f"all but {', '.join(lacking)}" if lacking else "all"
    return ", ".join(having)


def _lower_first(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def given(namespace: argparse.Namespace) -> list[Given]:
    """What the flags set."""
    return [_given(option, getattr(namespace, name)) for name, option in options().items() if name in namespace]


def _given(option: Option, value: bool | str | list[str] | None) -> Given:
    if isinstance(value, bool):
        return Given(option.name, value, option.flag)
    if not value:
        return Given(option.name, None, option.flag, fault=f"expects {option.kind.expected}, got nothing")
    try:
        return Given(option.name, option.kind.read(value), option.flag)
    except ValueError as error:
        return Given(option.name, None, option.flag, fault=str(error))


def unknown(words: Sequence[str]) -> list[str]:
    """A line for every flag that does not exist, with the nearest one that does, and for every stray word."""
    flags = [option.flag for option in options().values()] + ["--config", "--resume", "--help"]
    faults = []
    for before, word in pairwise(("", *words)):
        if word.startswith("--"):
            name = word.partition("=")[0]
            faults.append(f"{name}: unknown flag{suggestion(name, flags)}")
        elif not before.startswith("--"):  # else it was meant as that flag's value
            faults.append(f"unexpected {word!r}")
    return faults
