"""Plain torch versions on padded [samples, time] tensors, which relax_core is held against where no peer is."""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
    """A loop over time steps. The mask is 1 on a prefix of each row."""
    last, following, steps = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        last = torch.where(mask[:, t] > 0, delta + gamma * lambd * last, last)
        following = torch.where(mask[:, t] > 0, values[:, t], following)
        steps.append(last)
    return torch.stack(steps[::-1], dim=1)


def returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """A loop over time steps."""
    last, steps = torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        last = (rewards[:, t] + gamma * last) * mask[:, t]
        steps.append(last)
    return torch.stack(steps[::-1], dim=1)


def gae_whitened(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
    return whiten(gae(rewards, values, mask, gamma, lambd), mask)


def returns_whitened(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    return whiten(returns(rewards, mask, gamma), mask)


def gdpo(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """A loop over groups, then whitening over samples."""
    scores = torch.zeros(len(rewards), dtype=torch.float64)
    for group in groups.unique():
        part = rewards[groups == group].double()
        scores[groups == group] = ((part - part.mean(0)) / (part.std(0) + 1e-4)).sum(1)
    whitened = (scores - scores.mean()) / (scores.std() + 1e-4)
    return whitened.float()[:, None] * mask


def group_mean_std(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Sums over groups by index_add, then the score on every token."""
    count = int(groups.max()) + 1
    size = torch.zeros(count).index_add(0, groups, torch.ones_like(rewards))
    centred = rewards - (torch.zeros(count).index_add(0, groups, rewards) / size)[groups]
    std = (torch.zeros(count).index_add(0, groups, centred.square()) / (size - 1)).sqrt()
    return (centred / (std[groups] + 1e-6))[:, None] * mask


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Two-pass, over the tokens of the mask."""
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean).square() * mask).sum() / (mask.sum() - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def ppo_clip(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Dual clip, mean over the mask's tokens; with the two usual metrics."""
    log_ratio = (log_probs - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    loss = torch.maximum(plain, clipped)
    loss = torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)
    for metric in (-log_ratio.detach(), (clipped > plain).float()):
        ((metric * mask).sum() / mask.sum()).item()
    return (loss * mask).sum() / mask.sum()


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    clipped = torch.clamp(values, old - 0.2, old + 0.2)
    loss = torch.maximum((values - returns).square(), (clipped - returns).square())
    return (loss * mask).sum() / mask.sum()


def vocabulary(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by `log_softmax().gather()`."""
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
