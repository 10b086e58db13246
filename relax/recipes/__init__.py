"""Ready configurations: values for the fields that a user did not set, and the data they train on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs

from relax.data.files import DataFiles
from relax.recipes import arithmetic

FieldValue = str | int | float | bool | tuple[str, ...] | tuple[float, ...]


@attrs.frozen
class Recipe:
    """`defaults` stand between the program's defaults and what the user sets; `write_data(seed, directory)` makes the
    data files that the user does not bring."""

    summary: str
    defaults: Mapping[str, FieldValue]
    write_data: Callable[[int, Path], DataFiles]


RECIPES: Final[Mapping[str, Recipe]] = {
    "arithmetic": Recipe(
        summary="a small Qwen3 learns to add: warm start on flawed demonstrations, then three rewards",
        defaults={
            "advantage_estimator": "gdpo",
            "gdpo_reward_keys": ("correctness", "format", "length"),
            "gdpo_reward_weights": (1.0, 1.0, 1.0),
            "reward_key": "score",
            "custom_rm_path": "relax.rewards.arithmetic.score",
            "dynamic_sampling_filter_path": "signal",
            "warm_start_steps": 500,
            "warm_start_batch_size": 64,
            "warm_start_lr": 1e-3,
            "num_rollout": 120,
            "rollout_batch_size": 32,
            "n_samples_per_prompt": 8,
            "micro_batch_size": 256,
            "rollout_max_response_len": 20,
            "lr": 1e-4,
            "lr_warmup_fraction": 0.17,
            "lr_decay_style": "linear",
            "eval_interval": 10,
            "eval_samples": 500,
            "save_interval": 50,
        },
        write_data=arithmetic.write_data,
    ),
}
