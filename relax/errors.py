"""Faults that a user can mend: shown as one clear line, without a traceback."""


class RelaxError(Exception):
    """A fault in what the user supplied or in the world around the run; the message says what, where and what to do."""
