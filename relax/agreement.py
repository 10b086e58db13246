"""Errors on all ranks or on none: a stage of a run ends when every rank has ended it, or raises on every rank.

Agreement goes through the job's key-value store, not through collectives: ranks whose peer has failed hang in the
collective that it never joins, and a ballot that it casts instead would be taken for that collective.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import attrs
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from relax.errors import PeerError, PeerLost
from relax.gathering import ALONE, Gather, Gathering
from relax.lookout import SILENCE, Lookout, wait_until
from relax_core.collectives import is_anothers

LONGEST_MESSAGE: Final = 2_000  # characters of an error that travel to the other ranks
LONGEST_HINT: Final = 160  # characters of what a backend says, which knows of sockets only


@attrs.frozen
class _Verdict:
    """How a stage ended: the fault that `rank` told of, or none; `lost` where ranks can no longer work together."""

    rank: int
    fault: str | None = None
    lost: bool = False

    def error(self) -> PeerError:
        """The fault, for the ranks that heard of it."""
        return (PeerLost if self.lost else PeerError)(self.fault)


def stage(place: str) -> AbstractContextManager[None]:
    """A part of the run that all ranks go through together, named for whoever waits: "advantages of rollout 7".

    Who leaves it knows that every rank has come through. What one rank raises inside, all raise: the first that failed
    its own error, the others a `PeerError` with its rank and message; after it they may go on together, as those do who
    save what there is. A rank that does not come within the job's time limit, comes to another stage or is gone, is a
    `PeerLost` on all others. Stages do not nest. In a job of one process this is nothing.
    """
    return nullcontext() if _job is None else _job.stage(place)


def gathering(work: str) -> Gather:
    """For a `work` beside the stages, which a thread may do behind the training: tells how it goes on every rank.

    May be called several times, as often on every rank. All ranks must ask for their gatherings in the same order.
    """
    return ALONE if _job is None else _job.gathering(work)


@contextmanager
def joined(store: Store, rank: int, size: int, *, timeout_s: float) -> Iterator[None]:
    """Makes `stage` an agreement of the `size` processes that share `store`; waits end after `timeout_s` seconds.

    An error that leaves the block outside of every stage ends the next stage of the others. Where it says that a
    collective failed, it leaves as the `PeerLost` that tells who is gone.
    """
    global _job
    if size == 1:
        yield
        return
    with Lookout(PrefixStore("agreement", store), rank, size, timeout_s=timeout_s) as lookout:
        _job = Agreement(lookout)
        try:
            yield
            with _job.stage("the end of the job"):
                pass
        except BaseException as error:
            verdict = _job.publish(error, "a place outside of all stages")
            if isinstance(error, Exception) and _speaks_of_peers(error):
                raise verdict.error() from error
            raise
        finally:
            _job.leave()
            _job = None


class Agreement:
    """The stages of one rank. All ranks count theirs alike; what is agreed on about a stage is stored by its number."""

    def __init__(self, lookout: Lookout) -> None:
        self._lookout = lookout
        self._store, self._rank, self._size = lookout.store, lookout.rank, lookout.size
        self._number = 0
        self._inside = False
        self._gatherings = 0

    @contextmanager
    def stage(self, place: str) -> Iterator[None]:
        """See `stage`. Raises RuntimeError inside another stage."""
        if self._inside:
            raise RuntimeError(f"the stage {place!r} lies inside another one")
        self._inside = True
        try:
            with self._lookout.at(place, self._key("verdict")):
                try:
                    self._enter(place)
                    yield
                    self._come_through(place)
                except PeerError:
                    raise
                except BaseException as error:
                    verdict = self.publish(error, place)
                    own = verdict.rank == self._rank and not _speaks_of_peers(error)
                    if own or not isinstance(error, Exception):
                        raise
                    raise verdict.error() from error
        finally:
            self._inside = False
            self._number += 1

    def publish(self, error: BaseException, place: str) -> _Verdict:
        """Let `error` be what the others hear of the stage, unless another fault came first; what they hear."""
        if isinstance(error, PeerError):  # heard from them
            return _Verdict(self._rank, str(error))
        said = f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]
        fault, lost = f"rank {self._rank} failed at {place!r}: {said}", _speaks_of_peers(error)
        try:
            if is_anothers(error):
                wait_until(self._is_settled, SILENCE)
            elif lost and not self._is_settled():
                seen = f"seen by rank {self._rank}: {said[:LONGEST_HINT]}"
                fault = f"a collective failed at {place!r}: {self._lookout.report()} ({seen})"
            return self._settle(_Verdict(self._rank, fault, lost))
        except DistError:
            heard = self._lookout.heard()
            gone = f"{fault}; the store of the job is gone, and the rank that held it"
            return _Verdict(self._rank, heard or gone, lost=True)

    def gathering(self, work: str) -> Gather:
        """See `gathering`."""
        self._gatherings += 1
        own_connection: Store = self._store.clone()  # type: ignore[attr-defined]
        return Gathering(own_connection, f"{work} ({self._gatherings})", self._lookout)

    def leave(self) -> None:
        """The end. Rank 0, whose process may hold the store, waits until the others have read what stands there."""
        with suppress(DistError):
            self._count("gone")
            if self._rank == 0:
                wait_until(lambda: self._count("gone", 0) == self._size, SILENCE)

    def _enter(self, place: str) -> None:
        """Raises PeerError where a rank has already failed in this stage, or come to another one."""
        rank, theirs = self._first("place", [self._rank, place])
        if theirs != place:
            fault = f"rank {self._rank} came to {place!r}, but rank {rank} to {theirs!r}; their stages must be the same"
            self._settle(_Verdict(self._rank, fault, lost=True))
        if self._is_settled():
            self._heed(self._settle(_Verdict(self._rank)))

    def _come_through(self, place: str) -> None:
        """Wait for the others at the end of the stage. Raises PeerError when one has failed or does not come."""
        verdict = _Verdict(self._rank)
        if self._count(self._key("arrived")) == self._size:
            self._forget_the_last()
        else:
            self._lookout.waits_here()
            if (reason := self._lookout.wait(self._is_settled)) is not None:
                verdict = _Verdict(self._rank, f"not every rank came through {place!r}: {reason}", lost=True)
        self._heed(self._settle(verdict))

    def _is_settled(self) -> bool:
        """Whether there is a verdict on this stage."""
        with self._lookout.asking():
            return self._store.check([self._key("verdict")])

    def _settle(self, verdict: _Verdict) -> _Verdict:
        """The verdict on this stage: this one, unless there already is another."""
        return _Verdict(*self._first("verdict", attrs.astuple(verdict)))

    def _heed(self, verdict: _Verdict) -> None:
        if verdict.fault is not None:
            raise verdict.error()

    def _first(self, what: str, value: object) -> Any:
        """What the first rank said of this stage: `value`, unless another was faster."""
        with self._lookout.asking():
            return json.loads(self._store.compare_set(self._key(what), "", json.dumps(value)))

    def _count(self, key: str, more: int = 1) -> int:
        with self._lookout.asking():
            return self._store.add(key, more)

    def _forget_the_last(self) -> None:
        """Where all have arrived, all have read what was agreed on before."""
        with self._lookout.asking():
            for what in ("place", "arrived", "verdict"):
                self._store.delete_key(f"{what}/{self._number - 1}")

    def _key(self, what: str) -> str:
        return f"{what}/{self._number}"


_job: Agreement | None = None


def _speaks_of_peers(error: BaseException) -> bool:
    """Whether a collective failed, which tells of a connection but not of the rank behind it."""
    return (
        isinstance(error, DistError)
        or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
        or (error.__cause__ is not None and _speaks_of_peers(error.__cause__))
    )
