"""The functions of verl and TRL in the forms that `cases` calls them by, where they are installed."""

import copy
import importlib.metadata
import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LOSSES: Mapping[str, str] = {
    "ppo_clip": "vanilla",
    "gspo_token": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "gmpo": "geo_mean",
    "cispo": "cispo",
}
"""Of each policy loss that both have: the name here and verl's. verl's dppo_tv, dppo_kl and dro have no counterpart."""


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Verl:
    """verl's functions. Padded [samples, time] tensors and the int64 mask of its trainer; groups are its string ids."""

    def __init__(self) -> None:
        logging.disable(logging.WARNING)  # what its imports find missing does not concern the functions compared
        from verl.trainer.config import AlgoConfig
        from verl.trainer.ppo import core_algos
        from verl.utils import torch_functional
        from verl.workers.config import ActorConfig

        logging.disable(logging.NOTSET)
        self.algos, self.functional, self.config = core_algos, torch_functional, AlgoConfig
        self.actor = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1)

    def gae(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
        return self.algos.compute_gae_advantage_return(rewards, values, mask, gamma, lambd)[1] - values

    def gae_whitened(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
        return self.algos.compute_gae_advantage_return(rewards, values, mask, gamma, lambd)[0]

    def returns(self, rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
        config = self.config(gamma=gamma)
        return self.algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)[1]

    def returns_whitened(self, rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
        config = self.config(gamma=gamma)
        return self.algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)[0]

    def gdpo(self, components: Tensor, groups: np.ndarray, mask: Tensor) -> Tensor:
        keys = [f"reward{k}" for k in range(components.shape[1])]
        return self.algos.compute_gdpo_outcome_advantage(
            torch.zeros(mask.shape),
            mask,
            groups,
            config=self.config(adv_estimator="gdpo", gdpo_reward_keys=keys),
            non_tensor_batch=dict(zip(keys, components.T.numpy(), strict=True)),
            batch={"prompts": mask[:, :0], "attention_mask": mask},
        )[0]

    def group_mean_std(self, token_rewards: Tensor, groups: np.ndarray, mask: Tensor) -> Tensor:
        return self.algos.compute_grpo_vectorized_outcome_advantage(token_rewards, mask, groups)[0]

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        return self.functional.masked_whiten(values, mask)

    def loss(self, name: str, tokens: int) -> Loss:
        function, config = self.algos.get_policy_loss_fn(LOSSES[name]), copy.copy(self.actor)
        config.global_batch_info["batch_num_tokens"] = tokens
        return lambda new, old, advantages, mask: function(
            old, new, advantages, mask, loss_agg_mode="token-mean", config=config
        )[0]

    def value_loss(self, values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        return 2 * self.algos.compute_value_loss(values, returns, old, mask, 0.2)[0]


def trl_vocabulary(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's two functions on one tensor of logits, as its trainers call them."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = hidden @ weight.T
    return selective_log_softmax(logits, targets), entropy_from_logits(logits)
