"""Every pair of settings is accepted, and can then be built, or refused by a line that names what is at fault."""

from itertools import combinations

import pytest

from relax.config import ConfigError, checks, configure, options
from relax_core import ALGORITHMS, pipeline

VARIED: dict[str, tuple[object, ...]] = {
    "advantage_estimator": tuple(ALGORITHMS),
    "loss_type": ("policy_loss", "sft"),
    "colocate": (True,),
    "hybrid": (True,),
    "fully_async": (True,),
    "debug_rollout_only": (True,),
    "debug_train_only": (True,),
    "normalize_advantages": (True,),
    "disable_rewards_normalization": (True,),
    "calculate_per_token_loss": (True,),
    "n_samples_per_prompt": (1, 2, 7),
    "num_steps_per_rollout": (2, 5),
    "global_batch_size": (256, 7),
    "max_staleness": (1,),
    "num_iters_per_train_update": (2,),
    "gdpo_reward_keys": ((), ("a",), ("a", "b"), ("a", "b", "c")),
    "gdpo_reward_weights": ((), (1.0, 2.0), (0.0, 0.0)),
    "reward_key": (None, "total"),
    "custom_reward_post_process_path": ("a.b",),
    "agentic_custom_advantage_path": ("a.b", "a"),
    "dynamic_sampling_filter_path": (None, "signal", "a.b"),
    "kl_coef": (0.1,),
    "use_kl_loss": (True,),
    "kl_loss_coef": (0.1,),
    "kl_loss_type": ("k3",),
    "use_tis": (True,),
    "tis_clip": (3.0,),
    "use_opsm": (True,),
    "eps_clip": (0.1, 2.0),
    "eps_clip_c": (3.0, 0.5),
    "disable_grpo_std_normalization": (True,),
    "recipe": (None, "arithmetic", "unheard_of"),
    "qkv_format": ("thd",),
}
PAIRS = [
    {first: one, second: other}
    for first, second in combinations(VARIED, 2)
    for one in VARIED[first]
    for other in VARIED[second]
]


@pytest.mark.parametrize("available", [True, False], ids=["everything available", "as it is"])
def test_all_pairs_of_settings(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    if available:
        monkeypatch.setattr(checks, "UNAVAILABLE", {})
    flags = {option.flag for option in options().values()}
    accepted = 0
    for values in PAIRS:
        try:
            config = configure(**values)
        except ConfigError as error:
            for fault in error.faults:
                named = {word.rstrip(":,;") for word in fault.split()} & flags
                assert named, (values, fault)
            continue
        accepted += 1
        assert config.roles
        assert callable(pipeline(config.algorithm, config.hyperparameters))
    assert len(PAIRS) > 500
    assert accepted > 100
