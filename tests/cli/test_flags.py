"""The flags are a contract with the people who script them: adding or renaming one has to be meant."""

import attrs
import pytest

from relax.config import Config, options
from tests.cli.conftest import Register

# What users of Relax know, name by name.
KNOWN_FLAGS = """
--advantage-estimator --gdpo-reward-keys --gdpo-reward-weights --reward-key --custom-rm-path
--custom-reward-post-process-path --agentic-custom-advantage-path --dynamic-sampling-filter-path
--n-samples-per-prompt --rollout-batch-size --global-batch-size --num-steps-per-rollout --micro-batch-size
--num-rollout --eps-clip --eps-clip-high --eps-clip-c --value-clip --kl-coef --kl-loss-type --use-kl-loss
--kl-loss-coef --entropy-coef --gamma --lambd --normalize-advantages --disable-grpo-std-normalization
--disable-rewards-normalization --sapo-tau-pos --sapo-tau-neg --use-tis --tis-clip --tis-clip-low --use-opsm
--opsm-delta --calculate-per-token-loss --loss-type --colocate --hybrid --fully-async --max-staleness
--num-iters-per-train-update --balance-data --qkv-format --clip-grad --lr --seed --use-dynamic-batch-size
--max-tokens-per-gpu
"""

# The settings that are no algorithm's own.
FIELD_NAMES = """
recipe output seed debug_rollout_only debug_train_only prompt_data eval_prompt_data sft_data input_key
apply_chat_template tokenizer
hf_checkpoint num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
max_position_embeddings rotary_base bf16 recompute_activations transformer_impl
rollout_engine rollout_batch_size n_samples_per_prompt num_rollout
rollout_max_response_len rollout_temperature dynamic_sampling_filter_path max_resampling custom_rm_path
reward_key gdpo_reward_keys disable_rewards_normalization custom_reward_post_process_path
agentic_custom_advantage_path advantage_estimator loss_type normalize_advantages calculate_per_token_loss
entropy_coef use_kl_loss kl_loss_coef kl_loss_type kl_coef use_tis tis_clip tis_clip_low use_opsm opsm_delta
num_steps_per_rollout global_batch_size micro_batch_size use_dynamic_batch_size max_tokens_per_gpu
lr critic_lr lr_warmup_fraction lr_decay_style weight_decay adam_beta1 adam_beta2 use_distributed_optimizer
clip_grad warm_start_steps warm_start_batch_size warm_start_lr eval_interval
eval_samples save_interval keep_checkpoints async_save colocate hybrid fully_async max_staleness
num_iters_per_train_update tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
distributed_timeout_minutes
balance_data qkv_format
"""

DEFAULTS = {
    "eps_clip": 0.2,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "entropy_coef": 0.0,
    "clip_grad": 1.0,
    "lr": 1e-6,
    "n_samples_per_prompt": 1,
    "max_staleness": 0,
    "seed": 1234,
}


def test_every_known_flag_exists() -> None:
    flags = {option.flag for option in options().values()}
    assert set(KNOWN_FLAGS.split()) - flags == set()


def test_the_settings_are_frozen() -> None:
    names = [field.name for field in attrs.fields(Config) if field.name != "hyperparameters"]
    assert names == FIELD_NAMES.split()


@pytest.mark.parametrize(("name", "default"), DEFAULTS.items())
def test_documented_defaults(name: str, default: object) -> None:
    assert options()[name].default == default


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, option in options().items() if not option.help or not option.section] == []


def test_an_algorithm_brings_its_own_flags(register: Register) -> None:
    assert "made_up_powers" not in options()
    register()
    option = options()["made_up_powers"]
    assert (option.flag, option.default, option.algorithms) == ("--made-up-powers", (1, 2), ("made_up",))
    assert "made_up" in (options()["eps_clip"].algorithms or ())
