"""Tells everybody who listens how a run goes: files for programs, TensorBoard, and whoever watches the terminal."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from relax.report.metrics import JsonLines
from relax.report.progress import Phase, Progress
from relax.report.tensorboard import TensorBoard
from relax.runtime.files import RunFiles


class Recorder:
    """One record for each optimizer step, one for each evaluation. `done` steps were recorded before."""

    def __init__(self, files: RunFiles, phases: tuple[Phase, ...], done: int) -> None:
        self._files = files
        self._phases = phases
        self._done = done
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._metrics = stack.enter_context(JsonLines(self._files.metrics))
            self._evaluations = stack.enter_context(JsonLines(self._files.evaluations))
            resumed_at = self._done or None
            self._tensorboard = stack.enter_context(TensorBoard(self._files.tensorboard, resumed_at=resumed_at))
            self._progress = stack.enter_context(Progress(self._phases, done=self._done))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def step(self, record: Mapping[str, object]) -> None:
        """Record an optimizer step."""
        self._metrics.write(record)
        self._tensorboard.write(record)
        self._progress.step(record)

    def evaluation(self, record: Mapping[str, object]) -> None:
        """Record an evaluation."""
        self._evaluations.write(record)
        self._tensorboard.write(record)
        self._progress.evaluated(record)


class Silence(Recorder):
    """Of the ranks beside the first, which tells what all know."""

    def __enter__(self) -> Self:
        return self

    def step(self, record: Mapping[str, object]) -> None:
        """Nothing."""

    def evaluation(self, record: Mapping[str, object]) -> None:
        """Nothing."""
