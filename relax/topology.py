"""Which roles a run is made of: from what the algorithm declares and how the work is placed, first match wins."""

from typing import Literal

import attrs

from relax_core import Traits

Role = Literal["actor", "critic", "rollout", "advantages", "reference", "actor_fwd", "sft"]
Mode = Literal["colocate", "hybrid", "fully_async"]
Debug = Literal["rollout", "train"]
LossType = Literal["policy_loss", "sft"]


@attrs.frozen
class Placement:
    """How a run is placed. `truly_on_policy`: samples never wait, so the actor's own log-probs are the old ones."""

    mode: Mode = "colocate"
    loss_type: LossType = "policy_loss"
    debug: Debug | None = None
    truly_on_policy: bool = False


def roles(traits: Traits, placement: Placement) -> tuple[Role, ...]:
    """The roles in the order in which they start. Errors: ValueError for a critic outside colocate and fully async."""
    if placement.debug is not None:
        return ("rollout",) if placement.debug == "rollout" else ("actor",)
    if placement.loss_type == "sft":
        return ("sft", "actor")
    if traits.needs_critic and placement.mode == "hybrid":
        raise ValueError("a critic has no place in hybrid mode: use colocate")
    critic: tuple[Role, ...] = ("critic",) if traits.needs_critic else ()
    if placement.mode != "fully_async":
        return ("actor", *critic, "rollout")
    forward: tuple[Role, ...] = () if placement.truly_on_policy else ("actor_fwd",)
    return ("actor", *critic, "rollout", "advantages", "reference", *forward)
