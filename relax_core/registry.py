"""Every algorithm, by name. Adding one is a file in `relax_core/algorithms/` and a line here."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from relax_core.algorithm import Algorithm
from relax_core.algorithms.gdpo import GDPO
from relax_core.algorithms.grpo import GRPO

# `Any`, since a mapping holds algorithms of unlike hyperparameters: the one place where their type is not known.
ALGORITHMS: Final[Mapping[str, Algorithm[Any]]] = {
    "grpo": GRPO,
    "gdpo": GDPO,
}


def get_algorithm(name: str) -> Algorithm[Any]:
    """The algorithm of that name.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    close = get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown algorithm {name!r}: known are {', '.join(ALGORITHMS)}{hint}")
