"""What a rollout is judged by: numbers only, taken from every sample that was paid for."""

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from statistics import fmean

from relax.data.samples import Sample
from relax.rollout.sampling import Group


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward under every numeric key, mean response length in tokens, share of responses that were cut.

    What is not trained on is nobody's to refuse: a key has no mean where one of its numbers is not finite.
    """
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in (sample.rewards or {}).items():
            if not isinstance(value, bool) and isinstance(value, Real):
                values.setdefault(f"reward/{key}", []).append(_float(value))
        if sample.greedy_reward is not None:
            values.setdefault("response/greedy_reward", []).append(sample.greedy_reward)
    return {
        **{key: fmean(entries) for key, entries in values.items() if all(map(math.isfinite, entries))},
        "response/length": fmean(sample.length for sample in samples),
        "response/truncated": fmean(not sample.completion.finished for sample in samples),
    }


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an int that no float holds
        return math.inf


def zero_signal_metrics(groups: Sequence[Group], silent: int, keys: Sequence[str]) -> dict[str, float]:
    """How many groups teach nothing: `silent` in all, and why.

    For several `keys`, `zero_std/<key>` counts the groups in which that component is flat; for one,
    `zero_std/count_<reward>` counts those whose samples all got that reward, rounded to one digit.
    """
    counts: Counter[str] = Counter({"zero_std/groups": silent})
    for group in groups:
        for key in keys:
            values = {sample.rewards.get(key) for sample in group if sample.rewards is not None} - {None}
            if len(keys) > 1:
                counts[f"zero_std/{key}"] += len(values) == 1
            elif len(values) == 1:
                counts[f"zero_std/count_{round(float(str(values.pop())), 1)}"] += 1
    return {name: float(count) for name, count in counts.items()}
