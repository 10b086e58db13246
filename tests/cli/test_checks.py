"""Every trait check fires for every algorithm that declares the trait, and only for those."""

from collections.abc import Mapping

import pytest

from relax.config import ConfigError, checks, configure
from tests.cli.conftest import Register

# trait -> (its value, settings that violate it, settings that satisfy it, the flag that the message names)
TRAITS: Mapping[str, tuple[object, dict[str, object], dict[str, object], str]] = {
    "normalize_advantages=required": ("required", {}, {"normalize_advantages": True}, "--normalize-advantages"),
    "normalize_advantages=forbidden": ("forbidden", {"normalize_advantages": True}, {}, "--normalize-advantages"),
    "normalize_rewards": (
        "required",
        {"disable_rewards_normalization": True},
        {},
        "--disable-rewards-normalization",
    ),
    "min_group_size": (3, {"n_samples_per_prompt": 2}, {"n_samples_per_prompt": 3}, "--n-samples-per-prompt"),
    "reads_components": (True, {"gdpo_reward_keys": ["a"]}, {"gdpo_reward_keys": ["a", "b"]}, "--gdpo-reward-keys"),
    "component_names": (("reward", "length"), {"gdpo_reward_keys": ["a", "b"]}, {}, "--gdpo-reward-keys"),
    "allows_reward_hooks": (
        False,
        {"agentic_custom_advantage_path": "a.b"},
        {},
        "--agentic-custom-advantage-path",
    ),
    "reward_kl=required": ("required", {}, {"kl_coef": 0.1}, "--kl-coef"),
    "reward_kl=forbidden": ("forbidden", {"kl_coef": 0.1}, {}, "--kl-coef"),
    "kl_loss=required": ("required", {}, {"use_kl_loss": True, "kl_loss_coef": 0.1}, "--use-kl-loss"),
    "kl_loss=forbidden": ("forbidden", {"use_kl_loss": True}, {}, "--use-kl-loss"),
    "kl_estimator": (
        "k2",
        {"use_kl_loss": True, "kl_loss_type": "k3"},
        {"use_kl_loss": True, "kl_loss_type": "k2"},
        "--kl-loss-type",
    ),
    "global_token_loss": (True, {}, {"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
    "on_policy": (True, {"num_steps_per_rollout": 2}, {"num_steps_per_rollout": 1}, "--num-steps-per-rollout"),
    "complete_batch": (True, {"num_iters_per_train_update": 2}, {}, "--num-iters-per-train-update"),
    "needs_critic": (True, {"fully_async": True}, {}, "--fully-async"),
}


PPO = {"advantage_estimator": "ppo"}


@pytest.fixture(autouse=True)
def everything_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are about algorithms, not about what the runtime can do today."""
    monkeypatch.setattr(checks, "UNAVAILABLE", {})


def faults(values: Mapping[str, object]) -> list[str]:
    try:
        configure(**values)
    except ConfigError as error:
        return list(error.faults)
    return []


@pytest.mark.parametrize("row", TRAITS)
def test_a_trait_asks_its_algorithm_and_no_other(row: str, register: Register, own_data: dict[str, object]) -> None:
    value, violating, satisfying, flag = TRAITS[row]
    trait = row.split("=")[0]
    register("declares_it", **{trait: value}, **({"reads_components": True} if trait == "component_names" else {}))
    register("does_not")
    base = {**own_data, "n_samples_per_prompt": 4}
    (fault,) = faults({**base, **violating, "advantage_estimator": "declares_it"})
    assert fault.startswith(flag)
    assert "declares_it" in fault
    assert f"(trait {trait})" in fault
    assert faults({**base, **satisfying, "advantage_estimator": "declares_it"}) == []
    if trait not in ("reads_components", "component_names"):
        assert faults({**base, **violating, "advantage_estimator": "does_not"}) == []


def test_every_trait_check_is_in_the_table_above() -> None:
    assert {check.trait for check in checks.CHECKS if check.trait} == {row.split("=")[0] for row in TRAITS}


def test_scalar_algorithms_refuse_component_keys(own_data: dict[str, object]) -> None:
    (fault,) = faults({**own_data, "gdpo_reward_keys": ["a", "b"]})
    assert "--gdpo-reward-keys a b: grpo reads one number" in fault


def test_component_keys_are_different_and_weighted_one_by_one(own_data: dict[str, object]) -> None:
    base = {**own_data, "advantage_estimator": "gdpo", "n_samples_per_prompt": 2}
    (fault,) = faults({**base, "gdpo_reward_keys": ["a", "b", "a"]})
    assert "a key occurs twice" in fault
    (fault,) = faults({**base, "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.25, 9.0]})
    assert "3 weights for 2 keys" in fault
    assert faults({**base, "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, -0.25]}) == []


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"colocate": True, "fully_async": True}, ("--colocate", "--fully-async")),
        ({"hybrid": True, "fully_async": True}, ("--hybrid", "--fully-async")),
        ({"fully_async": True, "normalize_advantages": True}, ("--fully-async", "--normalize-advantages")),
        ({**PPO, "kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}, ("--kl-coef", "--kl-loss-coef")),
        ({"debug_rollout_only": True, "debug_train_only": True}, ("--debug-rollout-only", "--debug-train-only")),
        ({"tis_clip": 3.0}, ("--tis-clip", "--use-tis")),
        ({"opsm_delta": 1.0}, ("--opsm-delta", "--use-opsm")),
        ({"kl_loss_coef": 0.1}, ("--kl-loss-coef", "--use-kl-loss")),
        ({"kl_loss_type": "k3"}, ("--kl-loss-type", "--use-kl-loss", "--kl-coef")),
        ({"kl_coef": 0.1}, ("--kl-coef", "grpo", "--use-kl-loss")),
        ({"num_query_groups": 3}, ("--num-query-groups",)),
        ({"kv_channels": 31}, ("--kv-channels",)),
        ({"max_tokens_per_gpu": 512}, ("--max-tokens-per-gpu", "--use-dynamic-batch-size")),
        ({"use_dynamic_batch_size": True}, ("--max-tokens-per-gpu", "--use-dynamic-batch-size")),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 255},
            ("--max-tokens-per-gpu", "--max-position-embeddings"),
        ),
        ({"rollout_max_response_len": 256}, ("--rollout-max-response-len", "--max-position-embeddings")),
    ],
)
def test_contradictions_name_both_sides(
    own_data: dict[str, object], values: dict[str, object], flags: tuple[str, ...]
) -> None:
    (fault,) = faults({**own_data, **values})
    assert [flag for flag in flags if flag not in fault] == []


def test_the_order_of_the_checks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"n_samples_per_prompt": 1, "normalize_advantages": True, "tis_clip": 3.0, "global_batch_size": 7}
    forward = faults(values)
    monkeypatch.setattr(checks, "CHECKS", checks.CHECKS[::-1])
    assert sorted(faults(values)) == sorted(forward)
    assert len(forward) == 4


@pytest.mark.parametrize("name", ["hybrid", "fully_async"])
def test_what_is_not_available_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(checks, "UNAVAILABLE", {name: "not available yet; leave it out"})
    (fault,) = faults({name: True})
    assert fault == f"--{name.replace('_', '-')}: not available yet; leave it out"
