"""What a run shows while it goes: where it is, how well it does, and when it will be done."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import attrs
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Record = Mapping[str, object]
RECENT: Final = 10  # records that the shown means are taken over
STEADY: Final = 30  # steps that the estimate of the end is taken from
PLAIN_INTERVAL: Final = 5.0  # seconds between lines where there is no terminal
SHOWN: Final = {"response/length": "response length", "loss": "loss"}


@attrs.frozen
class Phase:
    """A part of the run: the `phase` that its records carry, its number of optimizer steps, and what people call it."""

    key: str
    steps: int
    title: str


class Progress:
    """Shows the records of a run as they come: a live display on a terminal, else a plain line every few seconds.

    `done` steps, counted over all phases, lie behind already (a resumed run). Use it as a context manager, so that the
    terminal is left as it was.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        *,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phases = [phase for phase in phases if phase.steps]
        self._done = done
        self._console = console or Console()
        self._clock = clock
        self._started = self._last = self._said = clock()
        self._phase = self._phase_at(done)
        self._durations: deque[float] = deque(maxlen=STEADY)
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._live = Live(self, console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def step(self, record: Record) -> None:
        """Take the metrics of one more optimizer step."""
        now = self._clock()
        key = str(record.get("phase", self._phase.key))
        first = key != self._phase.key or not self._recent
        if key != self._phase.key:
            self._phase = next((phase for phase in self._phases if phase.key == key), Phase(key, 0, key))
            self._durations.clear()
            self._recent.clear()
        self._durations.append(now - self._last)
        self._recent.append(record)
        self._last = now
        self._done += 1
        at, total = self._position()
        if self._console.is_terminal:
            self._live.refresh()
        elif first or at == total or now - self._said >= PLAIN_INTERVAL:
            self._said = now
            self._console.print(Text(self._line()), soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._console.print(Text(text), soft_wrap=True)
        self._last = self._clock()  # what took this long was no step

    def evaluated(self, record: Record) -> None:
        """Say what an evaluation (a record of eval.jsonl) found."""
        found = {k.removeprefix("reward/"): v for k, v in record.items() if k.startswith("reward/")}
        scores = "  ".join(f"{name} {_number(value)}" for name, value in found.items())
        self.note(f"held-out, step {record.get('step')}:  {scores}")

    def __rich__(self) -> Group:
        at, total = self._position()
        table = Table.grid(padding=(0, 2))
        table.add_row(
            Text(self._phase.title, style="bold"),
            ProgressBar(total=max(total, 1), completed=at, width=30),
            Text(f"{at}/{total}"),
            Text(f"{_duration(self._last - self._started)} so far", style="dim"),
            Text(self._estimate(), style="dim"),
        )
        means = Text("  ").join(
            Text.assemble((f"{name} ", "dim"), _number(value)) for name, value in self._means().items()
        )
        return Group(table, means)

    def _line(self) -> str:
        at, total = self._position()
        means = "  ".join(f"{name} {_number(value)}" for name, value in self._means().items())
        return f"{self._phase.title} {at}/{total}  {means}  ({self._estimate()})"

    def _phase_at(self, done: int) -> Phase:
        """The phase of the next step after `done`."""
        for phase in self._phases:
            if done < phase.steps:
                return phase
            done -= phase.steps
        return self._phases[-1] if self._phases else Phase("", 0, "")

    def _position(self) -> tuple[int, int]:
        """Steps done in the current phase, and its steps in all."""
        before = 0
        for phase in self._phases:
            if phase.key == self._phase.key:
                break
            before += phase.steps
        return self._done - before, self._phase.steps

    def _means(self) -> dict[str, float]:
        """Each reward component's mean over the last steps, then what else is worth a glance."""
        latest = self._recent[-1] if self._recent else {}
        names = {key: key.removeprefix("reward/") for key in latest if key.startswith("reward/")} | SHOWN
        means = {}
        for key, name in names.items():
            values = [value for record in self._recent if isinstance(value := record.get(key), int | float)]
            if values:
                means[name] = sum(values) / len(values)
        return means

    def _estimate(self) -> str:
        """When this phase ends at the pace of its last steps, and how many steps come after it."""
        at, total = self._position()
        if not self._durations:
            return "starting"
        text = f"{_duration((total - at) * sum(self._durations) / len(self._durations))} left"
        later = self._phases[self._phases.index(self._phase) + 1 :] if total else []
        return text + "".join(f", then {phase.steps} steps of {phase.title}" for phase in later)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _number(value: object) -> str:
    """Three digits are enough for a glance."""
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
