"""python -m tests.mutants numerics rewards advantages losses: do the core's tests notice small faults in its code?

Every mutant differs from a module of `relax_core` in one operator, number or keyword, as cosmic-ray changes them. It
lives in memory only: a child process imports it in place of the module and runs the tests until one fails. The parent
has imported all that the tests need from elsewhere, so that a mutant costs a second and not five. (cosmic-ray's own
runner starts a process each; mutmut leaves out functions that have a decorator, which most of the core's have.)

Left out is what no test need look at: annotations, which are checked by mypy; and bit operators and shifts in place of
arithmetic, which raise a TypeError for every float. Survivors, and why they live: docs/mutants.md.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import beartype  # noqa: F401  (so that children need not)
import jaxtyping  # noqa: F401
import numpy as np  # noqa: F401
import pytest
import torch
import torch.distributed.tensor  # which torch.testing imports otherwise
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from hypothesis import Phase, settings

SECONDS = 60
"""A mutant that takes more of a processor's time than this hangs, which counts as noticed."""
SLOW = "not gloo and not import and not one_graph and not config and not unlike_sizes and not travels"
"""Tests that start processes, compile, or look at other things than numbers."""
TESTS = {
    "numerics": ["numerics", "group_laws", "whitening_laws", "rewards", "whitening", "signal", "advantages", "golden"],
    "rewards": ["rewards", "golden", "group_laws", "algorithms", "corrections", "records", "signal", "checks"],
    "advantages": [
        "advantages",
        "golden",
        "whitening",
        "whitening_laws",
        "token_laws",
        "loss_laws",
        "algorithms",
        "records",
        "checks",
    ],
    "losses": [
        "losses",
        "golden",
        "corrections",
        "algorithms",
        "whole_batch_losses",
        "loss_laws",
        "token_laws",
        "transforms",
        "checks",
    ],
}
"""The files that look at a module, the likeliest to notice something first."""
POINTLESS = re.compile(r"ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod|Pow)_(RShift|LShift|BitOr|BitAnd|BitXor)")


# The same examples every time, and no search for the smallest one that fails.
settings.register_profile("mutants", max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])


@attrs.frozen
class Mutant:
    """A module's source with one change."""

    module: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    source: str


def mutants(module: str) -> Iterator[Mutant]:
    source = Path("relax_core", f"{module}.py").read_text(encoding="utf-8")
    lines, tree, annotated = source.splitlines(), get_ast(source), annotations(source)
    for name in operator_names():
        if POINTLESS.search(name) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        starts = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(starts):
            if any(low <= start < high for low, high in annotated):
                continue
            changed = mutate_code(source, operator, occurrence)
            if changed is not None and differs(changed, source):
                line = next(
                    n for n, (a, b) in enumerate(zip(lines, [*changed.splitlines(), ""], strict=False)) if a != b
                )
                after = changed.splitlines()[line].strip()
                yield Mutant(
                    module, name.removeprefix("core/"), occurrence, line + 1, lines[line].strip(), after, changed
                )


def differs(changed: str, source: str) -> bool:
    """Not to the parser, nor a bare * among parameters, which cosmic-ray takes for a multiplication."""
    if changed.count("*,") != source.count("*,"):
        return False
    try:
        return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end: (line, column), columns in bytes, which here are characters."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                found.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return found


class Instead(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports a mutant where its module is asked for."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(f"relax_core.{mutant.module}", str(Path("relax_core", f"{mutant.module}.py").resolve()))
        self.source = mutant.source

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname: str) -> object:
        return compile(self.source, self.path, "exec")


class Failure:
    """A plugin that tells the parent which test failed."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.pipe, report.nodeid.encode() + b"\n")


def notice(mutant: Mutant | None, *stages: list[str]) -> str | None:
    """What noticed it: a test, "import" or "time"; None if nothing did. Tests run stage by stage."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(20 * SECONDS)  # for what waits without working
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if mutant is not None:
            sys.meta_path.insert(0, Instead(mutant))
        options = ["-x", "-q", "-k", SLOW, "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
        options.append("--hypothesis-profile=mutants")
        failure = Failure(there)
        os._exit(any(pytest.main([*options, *stage], plugins=[failure]) for stage in stages if stage))
    os.close(there)
    _, status = os.waitpid(child, 0)
    with os.fdopen(here) as pipe:
        test = pipe.readline().strip()
    return "time" if os.WIFSIGNALED(status) else test or "import" if status else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", choices=TESTS)
    parser.add_argument("--results", type=Path, default=Path("build/mutants.jsonl"), help="a run goes on from it")
    parser.add_argument("--only", default="", help="mutants whose line contains this")
    parser.add_argument("--sample", type=int, help="this many of each module, drawn fairly")
    parser.add_argument("--retry", action="store_true", help="try survivors of earlier runs again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    known = arguments.results.read_text(encoding="utf-8").splitlines() if arguments.results.exists() else []
    rows = map(json.loads, known)
    noticed = {tuple(row["mutant"]): row["by"] for row in rows if row["by"] or not arguments.retry}
    for module in arguments.modules:
        folders = {name: "property_tests" if name.endswith("_laws") else "tests/core" for name in TESTS[module]}
        files = [f"{folder}/test_{name}.py" for name, folder in folders.items()]
        if by := notice(None, files):
            sys.exit(f"without a mutant the tests fail: {by}")
        every = [mutant for mutant in mutants(module) if arguments.only in mutant.before]
        random.Random(0).shuffle(every)  # so that what is done at any time is a fair sample
        every = every[: arguments.sample]
        likely: dict[int, list[str]] = {}
        lived = 0
        for done, mutant in enumerate(every, start=1):
            key = (module, mutant.operator, mutant.before, mutant.after, mutant.occurrence)
            if key not in noticed:
                # What noticed another change of the line comes first, then files in two parts: all are collected first.
                by = noticed[key] = notice(mutant, likely.get(mutant.line, [])[:4], files[:2], files[2:])
                if by and "::" in by and by not in likely.setdefault(mutant.line, []):
                    likely[mutant.line].insert(0, by)
                with arguments.results.open("a", encoding="utf-8") as results:
                    print(json.dumps({"mutant": key, "by": by, "line": mutant.line}), file=results)
            if not noticed[key]:
                lived += 1
                print(
                    f"{module}:{mutant.line}: {mutant.operator}\n    - {mutant.before}\n    + {mutant.after}",
                    flush=True,
                )
            if done % 50 == 0 or done == len(every):
                print(f"{module}: {done - lived} of {done} noticed, {len(every)} in all", flush=True)


if __name__ == "__main__":
    main()
