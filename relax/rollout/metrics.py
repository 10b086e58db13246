"""What a rollout is judged by: numbers only, taken from every sample that was paid for."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from relax.data.samples import Sample
from relax.rollout.sampling import Group


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward under every numeric key, mean response length in tokens, share of responses that were cut."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in (sample.rewards or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(f"reward/{key}", []).append(float(value))
    return {
        **{key: fmean(entries) for key, entries in values.items()},
        "response/length": fmean(len(sample.completion.token_ids) for sample in samples),
        "response/truncated": fmean(not sample.completion.finished for sample in samples),
    }


def zero_signal_metrics(groups: Sequence[Group], silent: int, keys: Sequence[str]) -> dict[str, float]:
    """How many groups teach nothing: `silent` in all, and why.

    For several `keys`, `zero_std/<key>` counts the groups in which that component is flat; for one,
    `zero_std/count_<reward>` counts those whose samples all got that reward, rounded to one digit.
    """
    counts: Counter[str] = Counter({"zero_std/groups": silent})
    for group in groups:
        for key in keys:
            values = {sample.rewards[key] for sample in group if sample.rewards is not None}
            if len(keys) > 1:
                counts[f"zero_std/{key}"] += len(values) == 1
            elif len(values) == 1:
                counts[f"zero_std/count_{round(float(str(values.pop())), 1)}"] += 1
    return {name: float(count) for name, count in counts.items()}
