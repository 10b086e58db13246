"""Dr. GRPO: GRPO without its two biases. arXiv 2503.20783.

The score is not divided by the group's std, which favours questions that are too easy or too hard, and the loss of a
response is divided by a constant, not by its own length, which favours long wrong responses.

Use it where responses grow longer without getting better, or where prompts differ much in difficulty. Set the length to
the most tokens that a response may have; the learning rate that fits depends on it.
"""

import attrs
from jaxtyping import Float64
from torch import Tensor

from relax_core import reducers
from relax_core.algorithm import Algorithm
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.collectives import Reduce, local
from relax_core.hyperparameters import Clip, between, hyperparameter


@attrs.frozen(kw_only=True)
class Hyperparameters(Clip):
    """Clip range and the constant length."""

    dr_grpo_length: float = hyperparameter(
        1024.0,
        "What the summed loss of a response is divided by: the most tokens that a response may have.",
        check=between(0.0, open_low=True),
    )


def reducer(hyperparameters: Hyperparameters, tokens: Tokens, *, reduce: Reduce = local) -> Float64[Tensor, " tokens"]:
    """See `reducers.constant_length`."""
    return reducers.constant_length(tokens, hyperparameters.dr_grpo_length, reduce=reduce)


DR_GRPO = Algorithm[Hyperparameters](
    name="dr_grpo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean,
    estimate_advantages=stages.broadcast,
    policy_loss=stages.ppo_clip,
    reducer=reducer,
)
