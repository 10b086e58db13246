"""Faults that a user can mend: shown as one clear line each, without a traceback."""

import difflib
from collections.abc import Iterable


class RelaxError(Exception):
    """A fault in what the user supplied or in the world around the run; the message says what, where and what to do."""


class ConfigError(RelaxError):
    """All that is wrong with a configuration: `faults` holds one line each, flag or key first."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, if one of `known` is spelled nearly so."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
