"""Dynamic sampling: which groups are worth training on.

A filter is asked about all groups of a draw at once, together with the algorithm's own answer for each: does it carry
signal? The built-in filter is that answer, so it cannot drift from the algorithm. It answers for each group with the
reason to drop it, or None to keep it.
"""

from collections.abc import Callable, Sequence

import attrs

from relax.data.samples import Sample
from relax.errors import RelaxError
from relax.importing import import_function, users_code

BUILT_IN = "signal"
NO_SIGNAL, REFUSED = "no_signal", "filter"
Filter = Callable[[Sequence[Sequence[Sample]], Sequence[bool]], list[str | None]]


def keep_all(groups: Sequence[Sequence[Sample]], signal: Sequence[bool]) -> list[str | None]:
    """No filter."""
    return [None] * len(groups)


def keep_signal(groups: Sequence[Sequence[Sample]], signal: Sequence[bool]) -> list[str | None]:
    """Keeps the groups from which the algorithm learns something."""
    return [None if carries else NO_SIGNAL for carries in signal]


@attrs.frozen
class UserFilter:
    """Asks a user's `function(samples of one group)`: True keeps the group; False drops it, or a text that says why."""

    path: str
    function: Callable[[Sequence[Sample]], object]

    def __call__(self, groups: Sequence[Sequence[Sample]], signal: Sequence[bool]) -> list[str | None]:
        return [self._ask(group) for group in groups]

    def _ask(self, group: Sequence[Sample]) -> str | None:
        where = f"--dynamic-sampling-filter-path {self.path}, group {group[0].group}"
        with users_code(where):
            keep = self.function(group)
        if isinstance(keep, bool):
            return None if keep else REFUSED
        if not isinstance(keep, str) or not keep.strip():
            raise RelaxError(f"{where}: returned {keep!r}, expected True (keep), False (drop) or the reason to drop")
        return keep.strip()


def load_filter(path: str | None) -> Filter:
    """What `--dynamic-sampling-filter-path` names: nothing, the built-in `signal`, or a user's own function."""
    if path is None:
        return keep_all
    if path == BUILT_IN:
        return keep_signal
    return UserFilter(path, import_function(path, "--dynamic-sampling-filter-path"))
