"""The table of roles, row by row."""

import pytest

from relax.topology import Placement, Role, roles
from relax_core import Traits

PLAIN, CRITIC = Traits(), Traits(needs_critic=True)

TABLE: list[tuple[Traits, Placement, tuple[Role, ...]]] = [
    (PLAIN, Placement(debug="rollout"), ("rollout",)),
    (CRITIC, Placement(mode="fully_async", debug="rollout", loss_type="sft"), ("rollout",)),
    (PLAIN, Placement(debug="train"), ("actor",)),
    (PLAIN, Placement(loss_type="sft"), ("sft", "actor")),
    (CRITIC, Placement(mode="fully_async", loss_type="sft"), ("sft", "actor")),
    (CRITIC, Placement(mode="fully_async"), ("actor", "critic", "rollout", "advantages", "reference", "actor_fwd")),
    (
        CRITIC,
        Placement(mode="fully_async", truly_on_policy=True),
        ("actor", "critic", "rollout", "advantages", "reference"),
    ),
    (CRITIC, Placement(), ("actor", "critic", "rollout")),
    (PLAIN, Placement(mode="hybrid"), ("actor", "rollout")),
    (PLAIN, Placement(), ("actor", "rollout")),
    (PLAIN, Placement(truly_on_policy=True), ("actor", "rollout")),
    (PLAIN, Placement(mode="fully_async"), ("actor", "rollout", "advantages", "reference", "actor_fwd")),
    (PLAIN, Placement(mode="fully_async", truly_on_policy=True), ("actor", "rollout", "advantages", "reference")),
]


@pytest.mark.parametrize(("traits", "placement", "expected"), TABLE)
def test_the_roles_of_every_row(traits: Traits, placement: Placement, expected: tuple[Role, ...]) -> None:
    assert roles(traits, placement) == expected


def test_a_critic_has_no_place_in_hybrid_mode() -> None:
    with pytest.raises(ValueError, match="critic"):
        roles(CRITIC, Placement(mode="hybrid"))
