"""What is compared: the same work by relax_core (ragged) and by a peer or a plain version (padded)."""

from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor

from benchmarks import peers, plain
from relax_core import Tokens, get_algorithm, pipeline, reducers
from relax_core.advantages import broadcast, discounted_returns, gae, whiten
from relax_core.losses import value_loss
from relax_core.rewards import group_mean_std
from relax_core.vocabulary import from_hidden

GAMMA, LAMBDA, GROUP, WIDTH = 0.99, 0.95, 8, 256


@attrs.frozen(kw_only=True)
class Case:
    """One line of the table: the same work done by both sides, which return what is compared.

    Attributes:
        time: how many times ours the peer's time is to be, at least; None where nothing was promised.
        memory: the same of peak memory.
        differ: why the two results are not the same numbers, where they are not.
        like_ours: brings the peer's result into the form of ours, to compare them; not timed.
    """

    name: str
    peer: str
    own: Callable[[], Tensor]
    other: Callable[[], Tensor]
    time: float | None = None
    memory: float | None = None
    differ: str = ""
    like_ours: Callable[[Tensor], Tensor] = torch.Tensor.detach


@attrs.frozen
class Batch:
    """Samples of 1 to `longest` tokens in groups of 8, every token valid; ragged and padded."""

    tokens: Tokens
    rewards: Tensor
    values: Tensor
    old: Tensor
    new: Tensor
    groups: Tensor
    components: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, samples: int, longest: int) -> "Batch":
        torch.manual_seed(0)
        tokens = Tokens.full(torch.randint(1, longest + 1, (samples,)))
        rewards, values, old, noise = torch.randn(4, tokens.num_tokens).unbind()
        return cls(
            tokens,
            rewards,
            values,
            -old.abs(),
            -old.abs() + 0.1 * noise,
            torch.arange(samples) // GROUP,
            torch.rand(samples, 2),
            tokens.to_padded(torch.ones(tokens.num_tokens, dtype=torch.long)),
        )

    def ragged(self, padded: Tensor) -> Tensor:
        return self.tokens.from_padded(padded)


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Forward and backward."""
    leaf = at.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def own_loss(name: str, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The mean over tokens, metrics included, as verl's functions return them; dual clip where verl has it."""
    algorithm = get_algorithm("grpo" if name == "ppo_clip" else name)
    options = {"eps_clip_c": 3.0} if name == "ppo_clip" else {}
    run = pipeline(algorithm, algorithm.hyperparameters(**options))

    weights = reducers.token_mean(batch.tokens)  # made once a step, as verl's number of tokens is

    def loss(new: Tensor) -> Tensor:
        return run.loss(new, batch.old, batch.rewards, batch.tokens, weights)[0]

    return loss


def own_value_loss(batch: Batch) -> Callable[[Tensor], Tensor]:
    weights = reducers.token_mean(batch.tokens)

    def loss(new: Tensor) -> Tensor:
        result = value_loss(new, batch.old, batch.rewards, batch.tokens, value_clip=0.2)
        for metric in result.metrics.values():
            reducers.weighted_sum(metric, weights)
        return reducers.weighted_sum(result.loss, weights)

    return loss


def advantage_cases(batch: Batch, verl: peers.Verl | None) -> Iterator[Case]:
    """From rewards to advantages, and whitening over tokens."""
    theirs, name = (plain, "plain torch") if verl is None else (verl, "verl")
    tokens, mask, components, groups = batch.tokens, batch.mask, batch.components, batch.groups
    rewards, values = tokens.to_padded(batch.rewards), tokens.to_padded(batch.values)
    # verl's functions read groups as NumPy arrays and a scalar reward as one number on a row of tokens.
    ids = groups if verl is None else groups.numpy()
    scalar = components[:, 0].contiguous()
    scores = scalar if verl is None else torch.nn.functional.pad(scalar[:, None], (0, mask.shape[1] - 1))
    gdpo = pipeline("gdpo")

    def own_gae() -> Tensor:
        return gae(batch.rewards, batch.values, tokens, gamma=GAMMA, lambd=LAMBDA).advantages

    def own_returns() -> Tensor:
        return discounted_returns(batch.rewards, tokens, gamma=GAMMA)

    # verl's whiten what they return at no extra charge, so the lines that whiten are the like with like.
    yield Case(
        name="gae",
        peer=name,
        own=own_gae,
        other=lambda: theirs.gae(rewards, values, mask, GAMMA, LAMBDA),
        like_ours=batch.ragged,
        time=10,
    )
    yield Case(
        name="discounted returns",
        peer=name,
        own=own_returns,
        other=lambda: theirs.returns(rewards, mask, GAMMA),
        like_ours=batch.ragged,
        time=10,
    )
    yield Case(
        name="gae, whitened",
        peer=name,
        own=lambda: whiten(own_gae(), tokens),
        other=lambda: theirs.gae_whitened(rewards, values, mask, GAMMA, LAMBDA),
        like_ours=batch.ragged,
    )
    yield Case(
        name="discounted returns, whitened",
        peer=name,
        own=lambda: whiten(own_returns(), tokens),
        other=lambda: theirs.returns_whitened(rewards, mask, GAMMA),
        like_ours=batch.ragged,
    )
    yield Case(
        name="whitening over tokens",
        peer=name,
        own=lambda: whiten(batch.rewards, tokens),
        other=lambda: theirs.whiten(rewards, mask),
        like_ours=batch.ragged,
    )
    yield Case(
        name="gdpo, rewards to advantages",
        peer=name,
        own=lambda: gdpo.advantages(gdpo.scores(components, groups), tokens).advantages,
        other=lambda: theirs.gdpo(components, ids, mask),
        like_ours=batch.ragged,
        time=20,
        differ="whitens over tokens" if verl else "",
    )
    yield Case(
        name="group mean/std, to advantages",
        peer=name,
        own=lambda: broadcast(group_mean_std(scalar, groups), tokens),
        other=lambda: theirs.group_mean_std(scores, ids, mask),
        like_ours=batch.ragged,
        time=1,
    )


def loss_cases(batch: Batch, verl: peers.Verl | None) -> Iterator[Case]:
    """Forward and backward, reduced to the mean over tokens, with metrics."""
    tokens, mask = batch.tokens, batch.mask
    new, old, advantages = (tokens.to_padded(each) for each in (batch.new, batch.old, batch.rewards))

    def case(name: str, own: Callable[[Tensor], Tensor], other: peers.Loss, differ: str = "") -> Case:
        return Case(
            name=f"{name} loss",
            peer="plain torch" if verl is None else "verl",
            own=lambda: gradient(own, batch.new),
            other=lambda: gradient(lambda leaf: other(leaf, old, advantages, mask), new),
            like_ours=batch.ragged,
            time=1 / 0.7,
            memory=1 / 0.7,
            differ=differ,
        )

    differ = {
        "clip_cov": "draws at random among tokens",
        "gmpo": "a mean over samples",
        "cispo": "clips on both sides",
        "sapo": "always a mean over samples",
    }
    for name in peers.LOSSES if verl else ():
        yield case(name, own_loss(name, batch), verl.loss(name, tokens.num_tokens), differ.get(name, ""))
    if verl is None:
        yield case("ppo_clip", own_loss("ppo_clip", batch), plain.ppo_clip)
    yield case("value", own_value_loss(batch), (verl or plain).value_loss)


def vocabulary_cases(tokens: int, words: int, trl: bool) -> Iterator[Case]:
    """Log-probs and entropy from hidden states, forward and backward, the output layer's gradient included."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, WIDTH), (torch.randn(words, WIDTH) / WIDTH**0.5).requires_grad_()
    targets = torch.randint(words, (tokens,))

    def total(function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
        def both() -> Tensor:
            leaf = hidden.detach().requires_grad_()
            result = torch.cat(function(leaf, weight, targets)).sum()
            return torch.autograd.grad(result, (leaf, weight))[0]

        return both

    own = total(from_hidden)
    name = "log-probs + entropy"
    yield Case(name=name, peer="log_softmax", own=own, other=total(plain.vocabulary), time=1, memory=5)
    if trl:
        yield Case(name=name, peer="trl", own=own, other=total(peers.trl_vocabulary))
