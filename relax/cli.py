"""The commands. Each imports what it needs when it is called: help costs no more than the settings it describes."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NoReturn

import attrs

from relax.errors import ConfigError, RelaxError, suggestion

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
DESCRIPTION: Final = "Reinforcement learning for language models, with algorithms that are pure functions."
EPILOG: Final = """\
for instance:
  relax train                                  the arithmetic recipe: a few minutes on two cores
  relax train --advantage-estimator grpo       the same with another algorithm
  relax report runs/arithmetic-gdpo-1234       what came of it, as a page
"""


class Parser(argparse.ArgumentParser):
    """Raises what is wrong, so that it is reported together with the rest and in the same form."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as they are, and the commands in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


@attrs.frozen
class Command:
    """A sub-command: `fill` adds its arguments once it is called for, `run` does it and returns the exit status.

    One that `tells` has nothing open when it returns: no process, no thread, no file.
    """

    help: str
    fill: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]
    tells: bool = False


def program() -> None:
    """What the shell starts: `main`, and an end.

    Taking torch down again costs about a third of what its import did, so commands that only tell something leave
    that to the operating system.
    """
    command = COMMANDS.get(_command(sys.argv[1:]))
    if command is None or not command.tells:
        sys.exit(main())
    try:
        status = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        status = FAILED
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 done, 1 failed, 2 wrong usage (nothing was started), 130 stopped.
    """
    # How long GNU OpenMP's threads, torch's on Linux, spin for their next work before they sleep: a fraction of a
    # millisecond. By default they spin 30 times as long, and two runs that share cores stop each other; threads that
    # never spin make a run that is alone a quarter slower. Read once, when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _command(words)
    name = f"relax {command}" if command in COMMANDS else "relax"
    try:
        if command and command not in COMMANDS:
            raise ConfigError([f"no command {command!r}{suggestion(command, COMMANDS)}"])
        if not words:
            words = ["--help"]
        namespace, rest = parser(command).parse_known_args(words)
        return COMMANDS[namespace.command].run(namespace, rest)
    except ConfigError as error:
        for fault in error.faults:
            print(f"{name}: error: {fault}", file=sys.stderr)
        print(f"{name}: '{name} --help' lists what there is; nothing was started", file=sys.stderr)
        return WRONG_USAGE
    except RelaxError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _command(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def parser(command: str) -> argparse.ArgumentParser:
    """The parser of all commands; only the arguments of `command` are filled in, since theirs cost imports."""
    root = Parser(
        prog="relax", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False, formatter_class=HelpFormatter
    )
    root.add_argument("--version", action="version", version=f"relax {version('relax-rl')}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, entry in COMMANDS.items():
        sub = commands.add_parser(name, help=entry.help, description=entry.help, allow_abbrev=False)
        if name == command:
            entry.fill(sub)
    return root


def refuse(rest: Sequence[str]) -> None:
    """Errors: `ConfigError` for words that no argument took."""
    if rest:
        raise ConfigError(f"unexpected {word!r}" for word in rest)


def _fill_train(sub: argparse.ArgumentParser) -> None:
    from relax.config.command_line import add_arguments

    add_arguments(sub)


def _train(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    from relax.config.command_line import given, unknown
    from relax.config.configure import resolve

    flags = given(namespace)
    if namespace.resume is not None:
        return _resume(namespace.resume, [*(flag.origin for flag in flags), *rest])
    config = resolve(flags, namespace.config, unknown(rest))
    from relax.runtime.local import train

    return train(config, config.output or new_run_directory(config.name), resume=False)


def _resume(run: Path, others: Sequence[str]) -> int:
    if others:
        raise ConfigError([f"--resume {run}: continues the run as it was configured; leave out {' '.join(others)}"])
    from relax.config.configure import configure
    from relax.runtime.local import train

    return train(configure(configuration_of(run)), run, resume=True)


def new_run_directory(name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on: the first that does not exist."""
    number = 1
    while (path := Path("runs", name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def configuration_of(run: Path) -> Path:
    """The configuration file of a run. Errors: `RelaxError` if there is none."""
    path = run / "config.yaml"
    if not path.is_file():
        raise RelaxError(f"{run}: not the directory of a run (it has no config.yaml)")
    return path


def _fill_run(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run")


def _fill_eval(sub: argparse.ArgumentParser) -> None:
    _fill_run(sub)
    sub.add_argument("--checkpoint", type=int, metavar="N", help="step of the checkpoint (default: the latest)")
    sub.add_argument("--samples", type=int, metavar="N", help="held-out problems (default: as configured)")


def _eval(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse(rest)
    if namespace.samples is not None and namespace.samples < 1:
        raise ConfigError([f"--samples {namespace.samples}: must be at least 1"])
    configuration_of(namespace.run_dir)
    from relax.runtime.local import evaluate

    return evaluate(namespace.run_dir, checkpoint=namespace.checkpoint, samples=namespace.samples)


def _fill_sample(sub: argparse.ArgumentParser) -> None:
    _fill_run(sub)
    sub.add_argument("prompts", nargs="+", metavar="PROMPT", help="what to answer")
    sub.add_argument("-n", type=int, default=1, metavar="N", help="responses to each prompt (default: 1)")
    sub.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default: always the likeliest token"
    )
    sub.add_argument("--checkpoint", type=int, metavar="N", help="step of the checkpoint (default: the latest)")


def _sample(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse(rest)
    if namespace.n < 1:
        raise ConfigError([f"-n {namespace.n}: must be at least 1"])
    if not 0 <= namespace.temperature < float("inf"):
        raise ConfigError([f"--temperature {namespace.temperature}: must be 0 or more"])
    configuration_of(namespace.run_dir)
    from relax.runtime.local import sample

    return sample(
        namespace.run_dir,
        namespace.prompts,
        n=namespace.n,
        temperature=namespace.temperature,
        checkpoint=namespace.checkpoint,
    )


def _fill_report(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="directories of runs")
    sub.add_argument("--figure", type=Path, metavar="FILE.png", help="draw one picture that compares the runs")


def _report(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse(rest)
    for run in namespace.run_dirs:
        configuration_of(run)
    if namespace.figure is not None:
        from relax.report.figure import write_figure

        print(write_figure(namespace.run_dirs, namespace.figure))
        return 0
    from relax.report.html import write_report

    for run in namespace.run_dirs:
        print(write_report(run))
    return 0


def _fill_algorithms(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", nargs="?", metavar="NAME", help="show this one in full")
    sub.add_argument("--json", action="store_true", help="for programs")


def _algorithms(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse(rest)
    from relax.catalogue import as_json, as_text

    print(as_json(namespace.name) if namespace.json else as_text(namespace.name))
    return 0


def _fill_inspect(sub: argparse.ArgumentParser) -> None:
    from relax.inspect.command import add_arguments

    add_arguments(sub)


def _inspect(namespace: argparse.Namespace, rest: Sequence[str]) -> int:
    refuse(rest)
    from relax.inspect.command import run

    return run(namespace)


COMMANDS: Final[Mapping[str, Command]] = {
    "train": Command("train a model", _fill_train, _train),
    "eval": Command("measure a run's model on held-out problems", _fill_eval, _eval),
    "sample": Command("answer prompts with a run's model", _fill_sample, _sample),
    "report": Command("write report.html of runs, or a figure that compares them", _fill_report, _report, tells=True),
    "inspect": Command(
        "tell what rollouts of your own would teach, before you train", _fill_inspect, _inspect, tells=True
    ),
    "algorithms": Command("list the algorithms, or show one", _fill_algorithms, _algorithms, tells=True),
}

if __name__ == "__main__":
    program()
