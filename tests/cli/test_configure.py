"""From layers of settings to one record, or to all that is wrong with them."""

from pathlib import Path

import attrs
import pytest

from relax.config import Config, ConfigError, configure
from relax.recipes import RECIPES, Recipe
from tests.cli.conftest import Register


def faults(file: Path | None = None, /, **values: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        configure(file, **values)
    return caught.value.faults


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flag_over_file_over_recipe_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {**RECIPES["arithmetic"].defaults, "lr": 1.0, "clip_grad": 2.0, "weight_decay": 3.0, "eps_clip": 0.1}
    recipe = Recipe(summary="", defaults=defaults, write_data=lambda seed, directory: {})
    monkeypatch.setitem(RECIPES, "other", recipe)
    file = written(tmp_path / "c.yaml", "recipe: other\nlr: 10\nclip_grad: 20\neps-clip: 0.3\n")
    config = configure(file, lr=100.0)
    assert (config.lr, config.clip_grad, config.weight_decay, config.adam_beta1) == (100.0, 20.0, 3.0, 0.9)
    assert config.hyperparameters.eps_clip == 0.3


def test_the_default_recipe_is_arithmetic_unless_there_is_data(own_data: dict[str, object]) -> None:
    assert configure().recipe == "arithmetic"
    config = configure(**own_data)
    assert (config.recipe, config.advantage_estimator, config.n_samples_per_prompt) == (None, "grpo", 1)


def test_a_recipe_sets_only_what_the_algorithm_reads() -> None:
    config = configure(advantage_estimator="grpo")
    assert config.gdpo_reward_keys == ()
    assert config.reward_keys == ("score",)
    assert not hasattr(config.hyperparameters, "gdpo_reward_weights")
    assert configure().reward_keys == ("correctness", "format", "length")


def test_the_batch_size_follows_from_the_rollout() -> None:
    config = configure(rollout_batch_size=6, n_samples_per_prompt=4, num_steps_per_rollout=3)
    assert config.global_batch_size == 8
    assert configure(rollout_batch_size=6, n_samples_per_prompt=4, global_batch_size=24).global_batch_size == 24


def test_a_contradicting_batch_size_is_refused_not_overwritten() -> None:
    (fault,) = faults(rollout_batch_size=6, n_samples_per_prompt=4, global_batch_size=12)
    assert "--global-batch-size 12" in fault
    assert "24" in fault
    (fault,) = faults(rollout_batch_size=6, n_samples_per_prompt=4, num_steps_per_rollout=5)
    assert "--num-steps-per-rollout 5" in fault


def test_everything_wrong_is_told_at_once() -> None:
    found = faults(lr=-1.0, eps_clip=-2.0, seed="x", adam_beta1=1.0, normalize_advantages=True, global_batch_size=7)
    flags = ("--lr", "--eps-clip", "--seed", "--adam-beta1", "--normalize-advantages", "--global-batch-size")
    assert sorted(fault.split(":")[0].split()[0] for fault in found) == sorted(flags)


def test_what_two_errors_share_is_told_once() -> None:
    found = faults(advantage_estimator="gpdo", lr=-1.0)
    assert len(found) == 2
    assert "did you mean gdpo?" in found[0]
    assert "grpo" in found[0]


def test_an_unknown_setting_gets_the_nearest_spelling(tmp_path: Path) -> None:
    (fault,) = faults(eps_clp=0.1)
    assert "did you mean eps_clip?" in fault
    (fault,) = faults(written(tmp_path / "c.yaml", "seed: 1\neps_clp: 0.1\n"))
    assert "line 2" in fault
    assert "did you mean eps_clip?" in fault


def test_a_hyperparameter_of_another_algorithm_is_refused() -> None:
    (fault,) = faults(disable_grpo_std_normalization=True)
    assert fault.startswith("--disable-grpo-std-normalization: gdpo has no such hyperparameter")
    assert "grpo" in fault


def test_made_up_hyperparameters_are_checked_and_passed_on(register: Register) -> None:
    register()
    config = configure(advantage_estimator="made_up", made_up_powers=[3], eps_clip=0.3)
    assert attrs.asdict(config.hyperparameters)["made_up_powers"] == (3,)
    assert config.hyperparameter_values()["eps_clip"] == 0.3
    (fault,) = faults(made_up_powers=[3])
    assert "it belongs to made_up" in fault


def test_own_data_needs_a_reward(own_data: dict[str, object]) -> None:
    found = faults(prompt_data=own_data["prompt_data"])
    assert [fault.split()[0] for fault in found] == ["--custom-rm-path", "--reward-key"]


def test_inputs_must_exist_and_outputs_must_not(own_data: dict[str, object], tmp_path: Path) -> None:
    (fault,) = faults(**{**own_data, "prompt_data": tmp_path / "missing.jsonl"})
    assert "missing.jsonl: no such file" in fault
    (fault,) = faults(output=tmp_path)  # it holds prompts.jsonl
    assert f"--resume {tmp_path}" in fault
    assert configure(output=tmp_path / "new").output == tmp_path / "new"


@pytest.mark.parametrize("path", ["score", "my-rewards.score", ".score", "a..b", "signal"])
def test_a_function_is_named_with_its_module(own_data: dict[str, object], path: str) -> None:
    (fault,) = faults(**{**own_data, "custom_rm_path": path})
    assert f"--custom-rm-path {path}: expected module.function" in fault


def test_the_record_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        configure().lr = 1.0  # type: ignore[misc]


def test_runs_are_named_after_what_they_do(own_data: dict[str, object]) -> None:
    assert configure(seed=3).name == "arithmetic-gdpo-3"
    assert configure(**own_data).name == "prompts-grpo-1234"
    assert configure(loss_type="sft").name == "arithmetic-sft-1234"


def test_recipes_hold_only_settings_that_exist() -> None:
    for name in RECIPES:
        assert isinstance(configure(recipe=name), Config)
