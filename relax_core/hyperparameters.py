"""Hyperparameters that several algorithms share: equal names mean equal things.

A field's name is its flag (`eps_clip` is `--eps-clip`), its metadata holds the help text.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import attrs

T = TypeVar("T")


def hyperparameter(default: T, help: str, *, check: Callable[[object], str | None] | None = None) -> T:
    """An attrs field with a default, a help text and a check: a function that says what is wrong, or None."""

    def validate(_instance: object, attribute: "attrs.Attribute[T]", value: T) -> None:
        fault = check(value) if check is not None else None
        if fault is not None:
            raise ValueError(f"{attribute.name} {fault}, got {value!r}")

    return attrs.field(default=default, metadata={"help": help}, validator=validate)


def between(
    low: float, high: float = math.inf, *, open_low: bool = False, optional: bool = False
) -> Callable[[object], str | None]:
    """A check for a finite real number of [low, high] (without `low` itself where `open_low`)."""

    def check(value: object) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return "must be a finite number"
        if value < low or value > high or (open_low and value == low):
            bounds = f"{'more than' if open_low else 'at least'} {low:g}"
            return f"must be {bounds}" + (f" and at most {high:g}" if high < math.inf else "")
        return None

    return check


def boolean(value: object) -> str | None:
    """A check for True or False."""
    return None if isinstance(value, bool) else "must be True or False"


@attrs.frozen(kw_only=True, slots=False)
class GroupScale:
    """For algorithms whose scores are a group's mean/std."""

    disable_grpo_std_normalization: bool = hyperparameter(
        False, "Only subtract a group's mean reward, without dividing by its standard deviation.", check=boolean
    )


@attrs.frozen(kw_only=True, slots=False)
class KlInReward:
    """For algorithms whose token rewards carry a KL penalty."""

    kl_coef: float = hyperparameter(
        0.0, "Weight of the KL from the reference policy in each token's reward.", check=between(0.0)
    )


@attrs.frozen(kw_only=True, slots=False)
class Discount:
    """For algorithms whose tokens look ahead."""

    gamma: float = hyperparameter(1.0, "Discount of the reward from one token to the next.", check=between(0.0, 1.0))


@attrs.frozen(kw_only=True, slots=False)
class ClipRange:
    """The probability ratio counts within [1 - eps_clip, 1 + eps_clip_high]."""

    eps_clip: float = hyperparameter(
        0.2, "The probability ratio is clipped below 1 minus this.", check=between(0.0, 1.0)
    )
    eps_clip_high: float | None = hyperparameter(
        None,
        "The probability ratio is clipped above 1 plus this (default: eps_clip, unless the algorithm says otherwise).",
        check=between(0.0, optional=True),
    )


@attrs.frozen(kw_only=True, slots=False)
class Clip(ClipRange):
    """For the clipped surrogate loss."""

    eps_clip_c: float | None = hyperparameter(
        None,
        "Dual clip: where the advantage is negative, the loss is at most this times its size (default: no bound).",
        check=between(1.0, open_low=True, optional=True),
    )
