"""The table that is printed: each side's cost, their ratio, and the goal beside it."""

from collections.abc import Iterable

from benchmarks.cases import Case
from benchmarks.measure import cost_of

HEADER = (
    f"{'':30}{'against':13}{'peer ms':>9}{'relax ms':>10}{'ratio':>8}{'goal':>7}"
    f"{'peer MiB':>10}{'relax MiB':>11}{'ratio':>8}{'goal':>7}  {'results'}"
)


def show(cases: Iterable[Case], rounds: int) -> None:
    """Print a line as soon as a case is measured. A ratio is peer / relax: larger is better.

    Times are those of each side's best turn, which other work on the machine disturbs least.
    """
    print(HEADER)
    for case in cases:
        result, expected = case.own(), case.like_ours(case.other())
        same = f"{(result.double() - expected.double()).abs().max().item():.0e} apart"
        own, other = cost_of([case.own, case.other], rounds)
        time, memory = other.best / own.best, other.memory / own.memory
        print(
            f"{case.name:30}{case.peer:13}{other.best:9.2f}{own.best:10.2f}{time:8.2f}{goal(time, case.time):>7}"
            f"{other.memory:10.1f}{own.memory:11.1f}{memory:8.2f}{goal(memory, case.memory):>7}"
            f"  {(case.differ and 'differ: ' + case.differ) or same}",
            flush=True,
        )


def goal(ratio: float, least: float | None) -> str:
    """The goal, with a mark where it is missed."""
    return "" if least is None else f"{least:.3g}{' ' if ratio >= least else '!'}"
