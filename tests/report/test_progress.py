"""What a run shows: seldom enough for a log, with an end in sight, and with every component."""

import io
from contextlib import suppress

import pytest
from rich.console import Console

from relax.report.progress import Phase, Progress

PHASES = [Phase("sft", 4, "warm start"), Phase("rl", 10, "gdpo")]


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(phase: str, **values: float) -> dict[str, object]:
    return {"phase": phase, "step": 0, **{key.replace("__", "/"): value for key, value in values.items()}}


def shown(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log() -> Console:
    return Console(file=io.StringIO(), width=80)


def lines(log: Console) -> list[str]:
    assert isinstance(log.file, io.StringIO)
    return log.file.getvalue().splitlines()


def test_a_log_gets_a_line_every_few_seconds(clock: Clock, log: Console) -> None:
    with Progress([Phase("rl", 100, "gdpo")], console=log, clock=clock) as progress:
        for _ in range(100):
            clock.now += 1.0
            progress.step(record("rl", reward__correctness=0.5))
    said = lines(log)
    assert len(said) == 1 + 99 // 5 + 1
    assert said[0].startswith("gdpo 1/100  correctness 0.500")
    assert said[-1].startswith("gdpo 100/100")
    assert said[-1].endswith("(0 s left)")


def test_the_end_is_estimated_from_the_steps_alone(clock: Clock, log: Console) -> None:
    progress = Progress(PHASES, console=log, clock=clock)
    for _ in range(2):
        clock.now += 3.0
        progress.step(record("sft", loss=1.0))
    clock.now += 1000.0
    progress.evaluated({"step": 2, "reward/correctness": 0.25})
    clock.now += 3.0
    progress.step(record("sft", loss=1.0))
    assert "3/4" in shown(progress)
    assert "3 s left, then 10 steps of gdpo" in shown(progress)


def test_each_component_shows_the_mean_of_its_last_steps(clock: Clock, log: Console) -> None:
    progress = Progress(PHASES, done=4, console=log, clock=clock)
    for index in range(12):
        progress.step(record("rl", reward__correctness=float(index), reward__length=-20.0 - index))
    assert "correctness 6.500" in shown(progress)  # of 2 ... 11
    assert "length -26.5" in shown(progress)


def test_a_resumed_run_goes_on_where_it_was(clock: Clock, log: Console) -> None:
    progress = Progress(PHASES, done=9, console=log, clock=clock)
    assert "5/10" in shown(progress)
    clock.now += 1.0
    progress.step(record("rl"))
    assert "6/10" in shown(progress)
    assert "4 s left" in shown(progress)


def test_phases_without_steps_are_left_out(clock: Clock, log: Console) -> None:
    progress = Progress([Phase("sft", 0, "warm start"), Phase("rl", 2, "gdpo")], console=log, clock=clock)
    assert "gdpo" in shown(progress)
    progress.step(record("rl"))
    assert "1/2" in shown(progress)


def test_a_terminal_is_left_as_it_was(clock: Clock) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    with suppress(KeyboardInterrupt), Progress(PHASES, console=terminal, clock=clock) as progress:
        progress.step(record("sft", loss=1.0))
        raise KeyboardInterrupt
    assert isinstance(terminal.file, io.StringIO)
    written = terminal.file.getvalue()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is shown again


def test_markup_in_a_text_is_shown_as_it_is(clock: Clock, log: Console) -> None:
    progress = Progress([Phase("rl", 3, "[bold]x[/]")], console=log, clock=clock)
    progress.note("[red]kept[/red]")
    progress.step(record("rl"))
    assert lines(log) == ["[red]kept[/red]", "[bold]x[/] 1/3    (0 s left)"]
