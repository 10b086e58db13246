"""A user's own reward stage, in place of the algorithm's: one number for each sample."""

from collections.abc import Callable, Sequence
from numbers import Real

import attrs
import torch
from torch import Tensor

from relax.config import Config
from relax.config.record import REWARD_HOOKS
from relax.data.samples import Sample
from relax.errors import RelaxError
from relax.importing import import_function, users_code
from relax_core.numerics import FLOAT32_MAX


@attrs.frozen
class RewardHook:
    """A user's `function(samples) -> one number for each`, called with all samples that were rewarded together."""

    flag: str
    path: str
    function: Callable[[Sequence[Sample]], object]

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """The samples' scores, float64 [samples]. Errors: `RelaxError` naming the hook, the sample and the value."""
        where = f"{self.flag} {self.path}"
        with users_code(where):
            answer = self.function(samples)
        scores = answer.tolist() if isinstance(answer, Tensor) else answer
        if not isinstance(scores, Sequence) or len(scores) != len(samples):
            raise RelaxError(f"{where}: expected {len(samples)} numbers, one for each sample, got {answer!r}")
        for sample, score in zip(samples, scores, strict=True):
            number = isinstance(score, Real) and not isinstance(score, bool)
            if not number or not -FLOAT32_MAX <= score <= FLOAT32_MAX:
                raise RelaxError(
                    f"{where}: expected a finite number for each sample, got {score!r} "
                    f"for response {sample.response[:60]!r} of group {sample.group}"
                )
        return torch.tensor([float(score) for score in scores], dtype=torch.float64)


def load_hook(config: Config) -> RewardHook | None:
    """The first hook that the configuration names, if any. Errors: `RelaxError` if it cannot be imported."""
    for name in REWARD_HOOKS:
        path = getattr(config, name)
        if path is not None:
            flag = "--" + name.replace("_", "-")
            return RewardHook(flag, path, import_function(path, flag))
    return None
