"""Estimators of the KL divergence from a reference policy, token by token (Schulman, "Approximating KL Divergence")."""

from typing import Final, Literal, assert_never

import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.checks import checked

Kind = Literal["k1", "k2", "k3", "low_var_kl"]
"""The estimators by name; `estimate` gives their formulas."""

EXPONENT_BOUND: Final = 20.0
"""Exponents of probability ratios are clamped to this size before `exp`, as in verl: no e^20 is worth learning from."""
LOW_VAR_BOUND: Final = 10.0
"""low_var_kl lies within -10 and 10 (THUDM/slime, verl)."""


@checked
def estimate(
    log_probs: Float[Tensor, " tokens"],
    ref_log_probs: Float[Tensor, " tokens"],
    kind: Kind,
    importance: Float[Tensor, " tokens"] | None = None,
) -> Float[Tensor, " tokens"]:
    """KL(policy, reference) of each token, from d = log_probs - ref_log_probs; half precision is raised to float32.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl = k3 within [-10, 10]. Where d < -20, k3 stays at its value
    there and has no gradient. An importance weight multiplies first, and is taken as a constant. Every token counts:
    where masked ones may hold a NaN, pass what `losses.select` leaves.

    The gradients are those of the formulas, without a score-function term: differentiated on samples of the policy
    itself, k2 gives an unbiased gradient of the KL, k1 one of expectation 0, k3 that of the reverse divergence. Take
    `loss` where a KL is to be minimized.
    """
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    d = log_probs.to(wide) - ref_log_probs.to(wide)
    match kind:
        case "k1":
            kl = d
        case "k2":
            kl = d.square() / 2
        case "k3" | "low_var_kl":
            d = d.clamp(min=-EXPONENT_BOUND)
            kl = torch.expm1(-d) + d
        case _:
            assert_never(kind)
    if importance is not None:
        kl = importance.detach().to(wide) * kl
    if kind == "low_var_kl":
        kl = kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return kl.to(log_probs.dtype)


@checked
def loss(
    log_probs: Float[Tensor, " tokens"],
    ref_log_probs: Float[Tensor, " tokens"],
    kind: Kind,
    importance: Float[Tensor, " tokens"] | None = None,
) -> Float[Tensor, " tokens"]:
    """`estimate`, differentiable into the gradient of the KL of each token given what precedes it.

    On samples of the policy itself the gradient of E[k] is E[grad k + k grad log_probs]; the second, score-function
    term is added for k1, k3 and low_var_kl, whose expectation is the KL (low_var_kl's up to its clamp). k2 has the
    right gradient without: E[d grad log_probs]. On samples of another policy pass `importance`, the ratio to it.
    """
    kl = estimate(log_probs, ref_log_probs, kind, importance)
    if kind == "k2":
        return kl
    score = (kl.detach() * (log_probs - log_probs.detach())).to(kl.dtype)
    return kl + score
