"""What an objective reads is supplied before anything starts, or it does not start."""

from pathlib import Path

import attrs
import pytest
import torch

from relax.adapter import Objective
from relax.batches import Evidence
from relax.config import Config, ConfigError, configure
from relax.inputs import Input, prove, reads
from relax.megatron.trainer import MicroBatch
from relax.roles.critic import CriticRole
from relax_core import ALGORITHMS
from tests.runtime.conftest import SMALL
from tests.runtime.launch import relax
from tests.runtime.scripted import sample
from tests.runtime.test_settings import BRIEF, flags_for

EVIDENCE = {
    Input.OLD_LOG_PROBS: "old_log_probs",
    Input.REFERENCE_LOG_PROBS: "ref_log_probs",
    Input.VALUES: "values",
}


@attrs.frozen
class Bringer:
    supplies: frozenset[Input]


def configured(name: str, **values: object) -> Config:
    traits = ALGORITHMS[name].traits
    chosen: dict[str, object] = {
        "advantage_estimator": name,
        "reward_key": "score",
        "n_samples_per_prompt": 3,
        **values,
    }
    if traits.reads_components and not traits.component_names:
        chosen |= {"gdpo_reward_keys": ("a", "b"), "gdpo_reward_weights": (1.0, 1.0)}
    chosen |= {"normalize_advantages": True} if traits.normalize_advantages == "required" else {}
    chosen |= {"calculate_per_token_loss": True} if traits.global_token_loss else {}
    chosen |= {"kl_coef": 0.1} if traits.reward_kl == "required" else {}
    chosen |= {"use_kl_loss": True, "kl_loss_coef": 0.1} if traits.kl_loss == "required" else {}
    chosen |= {"kl_loss_type": traits.kl_estimator} if traits.kl_estimator != "any" else {}
    return configure(rollout_batch_size=4, **chosen)


def variants(name: str) -> list[Config]:
    """With and without what is optional and makes an objective read more."""
    found = []
    for more in ({}, {"kl_coef": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.1}, {"use_tis": True}):
        try:
            found.append(configured(name, **more))
        except ConfigError:
            continue
    assert found
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_whatever_is_missing_is_named_with_who_asks_for_it(name: str) -> None:
    for config in variants(name):
        wanted = reads(config)
        prove(config, "local", [Bringer(frozenset({one})) for one in wanted])
        with pytest.raises(ConfigError) as error:
            prove(config, "local", [])
        assert len(error.value.faults) == len(wanted)
        for one, reason in wanted.items():
            with pytest.raises(ConfigError) as error:
                prove(config, "local", [Bringer(frozenset(Input) - {one})])
            (fault,) = error.value.faults
            assert f"{name}: reads {one.value} ({reason}), which no role of the local runtime" in fault


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_not_declared_is_not_read(name: str) -> None:
    """The objective works on exactly the evidence that is declared, and on no less."""
    made = [
        attrs.evolve(sample(group, {"a": i % 2, "b": 3.0 * i, "score": float(i)}), greedy_reward=1.0)
        for group in (3, 9)
        for i in range(3)
    ]
    tokens = sum(one.length for one in made)
    for config in variants(name):
        declared = [field for one, field in EVIDENCE.items() if one in reads(config)]
        _train(config, made, Evidence(**{field: torch.full((tokens,), -1.0) for field in declared}))
        for left_out in declared:
            kept = {field: torch.full((tokens,), -1.0) for field in declared if field != left_out}
            with pytest.raises((AssertionError, ValueError)):
                _train(config, made, Evidence(**kept))


def _train(config: Config, made: list[object], evidence: Evidence) -> None:
    objective = Objective.of(config)
    (batch,) = objective.batches(made, [len(made)], evidence)
    count = batch.tokens.num_tokens
    objective.loss(batch, MicroBatch(0, len(made), torch.full((count,), -1.1), torch.ones(count)))


def silence_the_critic() -> None:
    CriticRole.supplies = property(lambda role: frozenset())


def test_a_run_whose_roles_do_not_bring_it_all_leaves_nothing_behind(desk: Path) -> None:
    critics = [name for name, algorithm in ALGORITHMS.items() if algorithm.traits.needs_critic]
    words = (*SMALL, *BRIEF, *flags_for(critics[0]), "--output", "no-values")
    finished = relax(desk, "train", *words, prepare=silence_the_critic)
    assert finished.status == 2
    assert "reads the critic's values (trait needs_critic)" in finished.err
    assert not (desk / "no-values").exists()
