"""KL-Cov: tokens whose log-prob and advantage covary most pay for moving, which keeps entropy up. arXiv 2505.22617.

Use it where entropy falls early and exploration stops. The ratio is not clipped, so keep optimizer steps for each
rollout few.
"""

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.hyperparameters import GroupScale, between, hyperparameter
from relax_core.losses import covariance, largest, ratio_of, select, token_loss


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale):
    """Group scale, and which tokens pay how much."""

    kl_cov_ratio: float = hyperparameter(0.002, "Share of the tokens that pay, at least one.", check=between(0.0, 1.0))
    kl_cov_coef: float = hyperparameter(1.0, "What they pay for each unit of |log-ratio|.", check=between(0.0))


@checked
def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """-ratio A, + kl_cov_coef |log-ratio| for the share of the tokens passed that covaries most.

    `clipfrac`: 1 where a token pays.
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    log_ratio = lp - old
    chosen = largest(covariance(lp, adv, tokens), tokens.mask, hyperparameters.kl_cov_ratio, tokens)
    price = torch.where(chosen, hyperparameters.kl_cov_coef * log_ratio.abs(), 0.0)
    return token_loss(-ratio_of(log_ratio) * adv + price, log_probs, ppo_kl=-log_ratio, clipfrac=chosen.to(lp.dtype))


KL_COV = Algorithm[Hyperparameters](
    name="kl_cov",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    traits=Traits(whole_batch_loss=True, supports_context_parallel=False),
)
