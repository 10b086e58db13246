"""Faults that a user can mend: shown as one clear line each, without a traceback."""

import difflib
from collections.abc import Iterable


class RelaxError(Exception):
    """A fault in what the user supplied or in the world around the run; the message says what, where and what to do."""


class PeerError(RelaxError):
    """Another rank of the job failed; the message says which, where and how."""


class PeerLost(PeerError):
    """A rank did not come, went elsewhere or cannot be reached: the ranks can do nothing together any more."""


class ConfigError(RelaxError):
    """All that is wrong with a configuration: `faults` holds one line each, flag or key first."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(map(_one_line, faults))
        super().__init__("\n".join(self.faults))


def _one_line(text: str) -> str:
    """Line breaks and other unprintable characters of what a user wrote, as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, if one of `known` is spelled nearly so."""
    near = difflib.get_close_matches(name, list(known), n=10)
    # Of equally near ones, that of the same letters: swapping two is the commonest slip.
    best = min(near, key=lambda word: sorted(word) != sorted(name), default=None)
    return f"; did you mean {best}?" if best else ""
