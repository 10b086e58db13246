"""Ctrl-C asks for an orderly end; a second one does not ask."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `requested`; the next one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        print(f"\n{name}: finishing this step, then writing a checkpoint (again: stop at once)", file=sys.stderr)
