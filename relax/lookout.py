"""Who is where: every rank shows where it is and since when, and ends by itself where it would wait without an end."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import attrs
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

BEAT: Final = 0.5  # seconds between two signs of life
SILENCE: Final = 4 * BEAT  # a rank without a sign of life for so long is stopped or gone, as far as one can see
PATIENCE: Final = 15.0  # seconds that a silent rank may come back in: a machine may pause, or swap
LONGEST_PAUSE: Final = 0.25  # seconds between two looks at the store
GRACE: Final = 3.0  # seconds for a rank to leave a stage that another has failed in

_Shown = dict[str, Any] | None
"""What a rank tells of itself: its beat, its place and since when; None: it has not joined."""


@attrs.frozen(eq=False)
class _Place:
    """Where a rank is: in a stage, whose verdict (rank, fault, lost) stands under this key, or waiting at its end."""

    name: str
    verdict: str | None = None
    waits: bool = False
    since: float = attrs.field(factory=time.time)  # of the clock on the wall, for the other ranks


@attrs.frozen
class _Failure:
    """What this rank has heard of another's fault, at `place`, and when (monotonic seconds)."""

    place: _Place
    fault: str
    heard: float


class Lookout:
    """Two threads beside the one that works: one tells the store where this rank is and asks whether the stage has
    failed, one touches nothing that can block and ends the process where nothing else can.

    The last resort is for a rank that sits in a collective, in somebody's slow code or before a store that does not
    answer: no exception reaches it there, and its peers must not wait for it.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        self.store, self.rank, self.size, self.timeout_s = store, rank, size, timeout_s
        self._own_connection: Store = store.clone()  # type: ignore[attr-defined]  # a connection serves one request at a time
        self._place = _Place("the beginning of the job")
        self._beat = 0
        self._telling = threading.Lock()
        self._asking_since: float | None = None
        self._failure: _Failure | None = None
        self._farewell: str | None = None
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._show, self._watch)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(GRACE)

    @contextmanager
    def at(self, name: str, verdict: str) -> Iterator[None]:
        """This rank is in the stage `name`, whose verdict will stand under the key `verdict`."""
        self._move(_Place(name, verdict))
        try:
            yield
        finally:
            self._place = _Place(f"a place after {name}")

    def waits_here(self) -> None:
        """From now on this rank waits for the others at the end of its stage."""
        self._move(attrs.evolve(self._place, waits=True, since=time.time()))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The store is asked: if it does not answer within the limit, the process ends."""
        before, self._asking_since = self._asking_since, self._asking_since or time.monotonic()
        try:
            yield
        finally:
            self._asking_since = before

    def heard(self) -> str | None:
        """The fault of another rank in this stage, as far as it is known here."""
        failure = self._failure
        return failure.fault if failure is not None and failure.place.name == self._place.name else None

    def report(self) -> str:
        """Who is where, since when, and who shows no sign of life. Takes `SILENCE` seconds."""
        return _told(*self._two_looks())

    def wait(self, holds: Callable[[], bool]) -> str | None:
        """Wait until something holds to which every rank has a part. Where it will not, why: None says that it holds.

        The time may be over, a rank may have ended itself, or it shows no sign of life for `PATIENCE` seconds or more.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            before = self._look()
            if wait_until(lambda: holds() or self._ended() is not None, min(PATIENCE, deadline - time.monotonic())):
                return self._ended()
            if time.monotonic() >= deadline:
                return f"the limit of {self.timeout_s:g} s is over: {self.report()}"
            if any(map(_is_silent, before, self._look())):
                looks = self._two_looks()  # all may have stood still together, as the processes of a paused machine do
                if any(map(_is_silent, *looks)):
                    return _told(*looks)

    def _ended(self) -> str | None:
        """Which rank ended itself, and why; None while none has."""
        with self.asking():
            return self.store.get(_ENDED).decode() if self.store.check([_ENDED]) else None

    def _two_looks(self) -> tuple[list[_Shown], list[_Shown]]:
        before = self._look()
        time.sleep(SILENCE)
        return before, self._look()

    def _look(self) -> list[_Shown]:
        """What every rank shows."""
        return [self._shown(rank) for rank in range(self.size)]

    def _shown(self, rank: int) -> _Shown:
        key = _key(rank)
        with self.asking():
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _move(self, place: _Place) -> None:
        self._place = place
        with self.asking(), suppress(DistError):  # who asks a store that is gone finds that out, inside the stage
            self._tell(self.store)

    def _tell(self, store: Store) -> None:
        with self._telling:  # what the other thread tells must not be older
            place = self._place
            record = {"beat": self._beat, "place": place.name, "waits": place.waits, "since": place.since}
            store.set(_key(self.rank), json.dumps(record))

    def _show(self) -> None:
        while not self._closed.wait(BEAT):
            self._beat += 1
            try:
                self._tell(self._own_connection)
                self._listen(self._place)
                if self._farewell is not None:
                    self._own_connection.set(_ENDED, self._farewell)
                    return
            except DistError:
                return  # without its store the job has no future; the working thread finds that out

    def _listen(self, place: _Place) -> None:
        if place.verdict is None or place.waits or not self._own_connection.check([place.verdict]):
            return
        if self._failure is None or self._failure.place is not place:
            _, fault, _ = json.loads(self._own_connection.get(place.verdict))
            if fault is not None:
                self._failure = _Failure(place, fault, time.monotonic())

    def _watch(self) -> None:
        while not self._closed.wait(BEAT):
            place, failure, asking, now = self._place, self._failure, self._asking_since, time.monotonic()
            if failure is not None and failure.place is place and now - failure.heard > GRACE:
                self._farewell = f"rank {self.rank} was still busy at {place.name!r} and is ended"
                self._threads[0].join(SILENCE)  # it tells the others
                self._end(f"{failure.fault} ({self._farewell})")
            if asking is not None and now - asking > self.timeout_s:
                self._end(
                    f"the store of the job does not answer rank {self.rank} at {place.name!r} since {now - asking:.0f} "
                    "s: the process that holds it (rank 0, unless a launcher does) is stopped or cannot be reached"
                )

    def _end(self, message: str) -> NoReturn:
        print(f"relax: error: {message}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        os._exit(1)


def wait_until(holds: Callable[[], bool], limit: float) -> bool:
    """Whether something holds within `limit` seconds. The longer it takes, the less often it is looked at."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        if waited > limit:
            return False
        time.sleep(min(LONGEST_PAUSE, max(1e-4, waited / 10)))
    return True


_ENDED: Final = "ended"
_SILENT: Final = " and shows no sign of life: stopped or gone"


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _blameless(described: str) -> tuple[bool, bool]:
    """Who is gone comes first, then who is waited for."""
    return not described.endswith(_SILENT), " waits at " in described


def _told(before: list[_Shown], after: list[_Shown]) -> str:
    return "; ".join(sorted(map(_described, range(len(after)), before, after), key=_blameless))


def _is_silent(earlier: _Shown, now: _Shown) -> bool:
    return earlier is not None and now is not None and earlier["beat"] == now["beat"]


def _described(rank: int, earlier: _Shown, now: _Shown) -> str:
    if now is None:
        return f"rank {rank} has not joined"
    silent = _is_silent(earlier, now)
    verb = "was last seen at" if silent else "waits at" if now["waits"] else "is at"
    state = _SILENT if silent else ""
    return f"rank {rank} {verb} {now['place']!r} since {time.time() - now['since']:.0f} s{state}"
