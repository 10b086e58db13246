"""The algorithms that a file is held against, and what each of them reads of it."""

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from relax.errors import ConfigError, suggestion
from relax.inspect.fields import Fields, dotted
from relax_core import ALGORITHMS, Algorithm, get_algorithm, signal
from relax_core.rewards import weight_vector

DEFAULT: Final = ("grpo", "gdpo")
"""Compared where nothing else is asked for, if they take as many components as there are."""
WEIGHTS: Final = "gdpo_reward_weights"
"""The hyperparameter that weighs components, for algorithms that have it."""


@attrs.frozen
class Asked:
    """An algorithm with hyperparameters.

    Attributes:
        reads: what its first stage gets, in words.
        scalar: the column that holds its one reward, where that is no sum of components.
    """

    algorithm: Algorithm[object]
    hyperparameters: object
    reads: str
    scalar: int | None = None

    def rewards(self, values: Tensor, weights: Tensor) -> Tensor:
        """What the first stage gets, [samples, columns], of a table's values [samples, columns]."""
        if self.scalar is not None:
            return values[:, self.scalar, None]
        return signal.readable(self.algorithm, values[:, : len(weights)], weights)


def weights_of(weights: Sequence[float], fields: Fields) -> Tensor:
    """One weight for each component, float64 [components]. Errors: `ConfigError`."""
    try:
        return weight_vector(tuple(weights), len(fields.components))
    except ValueError as error:
        names = ", ".join(fields.components)
        raise ConfigError([f"--weights: {error} (components: {names})"]) from error


def asked(names: Sequence[str], fields: Fields, weights: Tensor) -> list[Asked]:
    """The algorithms of those names, by default those of `DEFAULT` that take these components.

    Errors: `ConfigError` for unknown ones, for those that refuse so many components, and where none is left.
    """
    found: list[Asked] = []
    faults: list[str] = []
    for name in dict.fromkeys(names or DEFAULT):
        if name not in ALGORITHMS:
            faults.append(f"--compare {name}: known are {', '.join(ALGORITHMS)}{suggestion(name, ALGORITHMS)}")
            continue
        try:
            one = _asked(get_algorithm(name), fields, weights)
            _try_out(one, fields, weights)
        except ValueError as error:
            faults.append(f"--compare {name}: {error}")
        else:
            found.append(one)
    if faults and (names or not found):
        raise ConfigError(faults)
    return found


def _asked(algorithm: Algorithm[Any], fields: Fields, weights: Tensor) -> Asked:
    names, factors = list(fields.components), weights.tolist()
    terms = [name if factor == 1 else f"{factor:g} × {name}" for name, factor in zip(names, factors, strict=True)]
    if not algorithm.traits.reads_components:
        if fields.scalar is None:
            return Asked(algorithm, algorithm.hyperparameters(), " + ".join(terms))
        column = list(fields.numbers.values()).index(fields.scalar)
        return Asked(algorithm, algorithm.hyperparameters(), dotted(fields.scalar), column)
    if meanings := algorithm.traits.component_names:
        pairs = zip(names, meanings, strict=False)  # a wrong number is refused when the stage is tried out
        terms = [name if name == meaning else f"{name} as {meaning}" for name, meaning in pairs]
        return Asked(algorithm, algorithm.hyperparameters(), ", ".join(terms))
    if WEIGHTS not in attrs.fields_dict(algorithm.hyperparameters):
        return Asked(algorithm, algorithm.hyperparameters(), ", ".join(names))
    return Asked(algorithm, algorithm.hyperparameters(**{WEIGHTS: tuple(factors)}), ", ".join(terms))


def _try_out(one: Asked, fields: Fields, weights: Tensor) -> None:
    """Raise what the first stage says to so many components."""
    size = max(2, one.algorithm.traits.min_group_size)
    ones = torch.ones(size, len(fields.numbers), dtype=torch.float64)
    signal.group_scores(
        one.algorithm, one.hyperparameters, one.rewards(ones, weights), torch.zeros(size, dtype=torch.long)
    )
