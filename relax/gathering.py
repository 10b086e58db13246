"""What ranks tell each other beside the stages, and in threads behind the training: what is the matter on each."""

import json
from collections.abc import Callable
from typing import Final

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from relax.errors import PeerLost
from relax.lookout import Lookout, wait_until

Gather = Callable[[str | None], list[str]]
"""Tells this rank's fault (None: there is none), waits until every rank has told, and returns all faults."""


class Gathering:
    """A `Gather` of several ranks through the job's store, a key for each call and rank."""

    def __init__(self, store: Store, work: str, lookout: Lookout) -> None:
        self._store = PrefixStore(f"gathering/{work}", store)
        self._work = work
        self._rank, self._size, self._timeout_s = lookout.rank, lookout.size, lookout.timeout_s
        self._calls = 0

    def __call__(self, fault: str | None) -> list[str]:
        """The faults, each with its rank. Raises PeerLost when a rank does not tell in time."""
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], json.dumps(fault))
            if not wait_until(lambda: self._store.check(keys), self._timeout_s):
                missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                limit = f"within {self._timeout_s:g} s"
                raise PeerLost(f"{self._work}: nothing was heard {limit} of rank {', '.join(missing)}")
            told = [json.loads(self._store.get(key)) for key in keys]
            self._store.delete_key(f"{self._calls - 1}/{self._rank}")  # whoever has told again has read it
        except DistError as error:
            raise PeerLost(f"the store of the job is gone, and the rank that held it ({error})") from error
        return [f"rank {rank}: {theirs}" for rank, theirs in enumerate(told) if theirs is not None]


def _alone(fault: str | None) -> list[str]:
    return [] if fault is None else [fault]


ALONE: Final[Gather] = _alone
"""The gathering of a single process."""
