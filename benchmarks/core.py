"""relax_core against plain torch versions (padded, a loop over time steps or groups), in turn in one process."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from relax_core import Tokens, get_algorithm
from relax_core.advantages import discounted_returns, gae
from relax_core.vocabulary import from_hidden

Case = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]
GAMMA, LAMBDA, GROUP = 0.99, 0.95, 8


def plain_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """A loop over time steps. Masks are a prefix of each row."""
    last, following, steps = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        last = torch.where(mask[:, t], delta + GAMMA * LAMBDA * last, last)
        following = torch.where(mask[:, t], values[:, t], following)
        steps.append(last)
    return torch.stack(steps[::-1], dim=1)[mask]


def plain_returns(rewards: Tensor, mask: Tensor) -> Tensor:
    """A loop over time steps."""
    last, steps = torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        last = (rewards[:, t] + GAMMA * last) * mask[:, t]
        steps.append(last)
    return torch.stack(steps[::-1], dim=1)[mask]


def plain_gdpo(rewards: Tensor, groups: Tensor, tokens: Tokens) -> Tensor:
    """A loop over groups, then whitening over samples."""
    scores = torch.zeros(len(rewards), dtype=torch.float64)
    for group in groups.unique():
        part = rewards[groups == group].double()
        scores[groups == group] = ((part - part.mean(0)) / (part.std(0) + 1e-4)).sum(1)
    return ((scores - scores.mean()) / (scores.std() + 1e-4)).repeat_interleave(tokens.lengths)


def plain_clip(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf).sum(), leaf)[0]


def cases(samples: int, longest: int, words: int) -> list[Case]:
    """Name, relax_core's version, the plain one; both return what is compared."""
    torch.manual_seed(0)
    tokens = Tokens.full(torch.randint(longest // 2, longest + 1, (samples,)))
    rewards, values, old = torch.randn(3, tokens.num_tokens).unbind()
    padded, padded_values = tokens.to_padded(rewards), tokens.to_padded(values)
    mask = torch.arange(padded.shape[1]) < tokens.lengths[:, None]
    groups, components = torch.arange(samples) // GROUP, torch.rand(samples, 2)
    gdpo, grpo = get_algorithm("gdpo"), get_algorithm("grpo")
    h, g = gdpo.hyperparameters(), grpo.hyperparameters()
    new = old + 0.1 * torch.randn_like(old)
    hidden, weight = torch.randn(longest, 256), torch.randn(words, 256) / 16
    targets = torch.randint(words, (longest,))

    def plain_vocabulary(x: Tensor) -> Tensor:
        log_p = (x @ weight.T).log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0] - (log_p.exp() * log_p).sum(-1)

    def own_gdpo() -> Tensor:
        return gdpo.estimate_advantages(h, gdpo.normalize_rewards(h, components, groups), tokens).advantages

    return [
        (
            "gae",
            lambda: gae(rewards, values, tokens, gamma=GAMMA, lambd=LAMBDA).advantages,
            lambda: plain_gae(padded, padded_values, mask),
        ),
        (
            "discounted returns",
            lambda: discounted_returns(rewards, tokens, gamma=GAMMA),
            lambda: plain_returns(padded, mask),
        ),
        ("gdpo rewards to advantages", own_gdpo, lambda: plain_gdpo(components, groups, tokens)),
        (
            "grpo loss, forward + backward",
            lambda: gradient(lambda x: grpo.policy_loss(g, x, old, rewards, tokens).loss, new),
            lambda: gradient(lambda x: plain_clip(x, old, rewards), new),
        ),
        (
            "log-probs + entropy, f + b",
            lambda: gradient(lambda x: sum(from_hidden(x, weight, targets)), hidden),
            lambda: gradient(plain_vocabulary, hidden),
        ),
    ]


def table(samples: int, longest: int, words: int, rounds: int) -> None:
    print(f"{f'median of {rounds}':32}{'plain ms':>10}{'relax ms':>10}{'plain/relax':>13}{'max diff':>11}")
    for name, own, plain in cases(samples, longest, words):
        difference = (own().double() - plain().double()).abs().max().item()
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for side, spent in zip((plain, own), times, strict=True):
                start = time.perf_counter()
                side()
                spent.append(1e3 * (time.perf_counter() - start))
        a, b = map(statistics.median, times)
        print(f"{name:32}{a:10.2f}{b:10.2f}{a / b:13.2f}{difference:11.1e}", flush=True)
