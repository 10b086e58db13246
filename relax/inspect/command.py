"""`relax inspect`: its arguments, and what is done with them."""

import argparse
import math
from pathlib import Path

from relax.errors import ConfigError, RelaxError
from relax.importing import nothing_to_collect
from relax.inspect.fields import Choice

BROKEN = 1


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Fill the parser."""
    sub.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JSON lines or Parquet, or a directory of such files"
    )
    names = sub.add_argument_group("fields", "told from the first rows unless named; F.KEY is a key inside a mapping")
    names.add_argument(
        "--group", type=_names, default=(), metavar="F,F", help="fields that name a row's group together"
    )
    names.add_argument(
        "--rewards", type=_names, default=(), metavar="F,F", help="reward components: numbers, or a mapping of them"
    )
    names.add_argument("--reward-key", default="", metavar="F", help="what algorithms of one reward read")
    names.add_argument("--length", default="", metavar="F", help="response length in tokens")
    names.add_argument("--log-probs", default="", metavar="F", help="list of the response's log-probs")
    sub.add_argument(
        "--weights", type=_numbers, default=(), metavar="W,W", help="weights of the components (default: 1 each)"
    )
    sub.add_argument(
        "--compare", type=_names, default=(), metavar="A,A", help="algorithms (default: grpo,gdpo, as far as they fit)"
    )
    sub.add_argument("--json", action="store_true", help="for programs")
    sub.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots as well")
    sub.add_argument("--strict", action="store_true", help="exit with status 1 if any value is broken")


def run(namespace: argparse.Namespace) -> int:
    """Print the report, write the page. Errors: `ConfigError`, `RelaxError`."""
    html: Path | None = namespace.html
    if html is not None and not html.parent.is_dir():
        raise ConfigError([f"--html {html}: there is no directory {html.parent}"])
    with nothing_to_collect():
        import torch

        from relax.inspect.report import inspect
        from relax.inspect.text import as_json, as_text

    torch.set_num_threads(1)  # the workers of `examine` share the cores; threads of their operations only wait there
    choice = Choice(namespace.group, namespace.rewards, namespace.reward_key, namespace.length, namespace.log_probs)
    report = inspect(namespace.files, choice, namespace.weights, namespace.compare)
    print(as_json(report) if namespace.json else as_text(report))
    if html is not None:
        from relax.inspect.html import write_page

        try:
            write_page(html, report)
        except OSError as error:
            raise RelaxError(f"--html {html}: {error.strerror}") from error
    return BROKEN if namespace.strict and report.faults.total else 0


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} holds an empty name; separate names by single commas")
    return names


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, separated by commas") from None
    if not all(map(math.isfinite, numbers)):
        raise argparse.ArgumentTypeError(f"{text!r} must be finite")
    return numbers
