"""One call from rewards and log-probs to the loss: an algorithm's stages bound together."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import attrs
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from relax_core import reducers, signal
from relax_core.advantages import normalized
from relax_core.algorithm import Advantages, Algorithm, Reducer, TokenLoss
from relax_core.batch import Tokens
from relax_core.collectives import Reduce, Segment, local, whole_batch
from relax_core.registry import get_algorithm

H = TypeVar("H")


@attrs.frozen(eq=False)
class Outcome:
    """What a batch came to: the scalar loss to differentiate, the values on the way, and what they tell.

    Attributes:
        loss: the weighted sum over all tokens.
        scores: of stage 1.
        advantages: of stage 2, normalized where that is wanted.
        returns: of stage 2.
        metrics: each of the loss's metrics, weighed like the loss.
        carries_signal: of each group, in ascending order of ids, whether the algorithm learns anything from it.
    """

    loss: Float[Tensor, ""]
    scores: Float[Tensor, " samples"]
    advantages: Float[Tensor, " tokens"]
    returns: Float[Tensor, " tokens"]
    metrics: Mapping[str, Float[Tensor, ""]]
    carries_signal: Bool[Tensor, " groups"]


@attrs.frozen
class Pipeline(Generic[H]):
    """An algorithm with everything it needs but the data. Stages may be called one by one, or all at once.

    Attributes:
        algorithm: the record.
        hyperparameters: an instance of the record's `hyperparameters`.
        segment: which samples belong to which optimizer batch.
        reduce: how tensors add up over ranks.
        normalize_advantages: whether stage 2 ends with a normalization over all tokens.
        reducer: what weighs the tokens; None: the record's own.
    """

    algorithm: Algorithm[H]
    hyperparameters: H
    segment: Segment = whole_batch
    reduce: Reduce = local
    normalize_advantages: bool = False
    reducer: Reducer[H] | None = None

    def scores(
        self, rewards: Float[Tensor, "samples components"], groups: Int[Tensor, " samples"]
    ) -> Float[Tensor, " samples"]:
        """Stage 1."""
        return self.algorithm.normalize_rewards(self.hyperparameters, rewards, groups)

    def advantages(
        self,
        scores: Float[Tensor, " samples"],
        tokens: Tokens,
        *,
        kl: Float[Tensor, " tokens"] | None = None,
        values: Float[Tensor, " tokens"] | None = None,
    ) -> Advantages:
        """Stage 2, over optimizer batches and ranks, and the normalization of advantages, where it is wanted."""

        def estimate() -> Advantages:
            return self.algorithm.estimate_advantages(
                self.hyperparameters, scores, tokens, kl=kl, values=values, segment=self.segment, reduce=self.reduce
            )

        if not self.normalize_advantages:
            return estimate()
        return normalized(estimate, tokens, self.algorithm.traits.advantage_normalization, reduce=self.reduce)

    def weights(self, tokens: Tokens) -> Float64[Tensor, " tokens"]:
        """The weight of each token of one optimizer batch, by the algorithm's own reducer unless another was chosen."""
        return (self.reducer or self.algorithm.reducer)(self.hyperparameters, tokens, reduce=self.reduce)

    def loss(
        self,
        log_probs: Float[Tensor, " tokens"],
        old_log_probs: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        tokens: Tokens,
        weights: Float[Tensor, " tokens"],
        wrap: Callable[[TokenLoss], TokenLoss] | None = None,
        share: float = 1.0,
        tangent: "Tangent | None" = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Stage 3 of all tokens or of a micro-batch's, weighted and summed; metrics likewise.

        Args:
            wrap: corrections and terms, from `relax_core.corrections`, applied before the sum.
            share: a micro-batch's share of the samples, by which metrics that have no token to be weighed by count.
            tangent: that of these tokens, in place of stage 3.
        """
        if tangent is None:
            per_token = self.token_loss(log_probs, old_log_probs, advantages, tokens)
        else:
            per_token = tangent.along(log_probs)
        return summed(per_token if wrap is None else wrap(per_token), tokens, weights, share)

    def token_loss(
        self,
        log_probs: Float[Tensor, " tokens"],
        old_log_probs: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        tokens: Tokens,
    ) -> TokenLoss:
        """Stage 3 as the record has it: neither weighed nor summed."""
        return self.algorithm.policy_loss(
            self.hyperparameters, log_probs, old_log_probs, advantages.to(log_probs.dtype), tokens
        )

    def tangent(
        self,
        log_probs: Float[Tensor, " tokens"],
        old_log_probs: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        tokens: Tokens,
    ) -> "Tangent":
        """Stage 3 of a whole optimizer batch at `log_probs`, to be cut into parts that choose as the whole does."""
        at = log_probs.detach().requires_grad_()
        with torch.enable_grad():
            found = self.token_loss(at, old_log_probs, advantages, tokens)
            (slope,) = torch.autograd.grad(found.loss.sum(), at)
        return Tangent(TokenLoss(found.loss.detach(), found.metrics), slope)

    def value_loss(
        self,
        values: Float[Tensor, " tokens"],
        old_values: Float[Tensor, " tokens"],
        returns: Float[Tensor, " tokens"],
        tokens: Tokens,
        weights: Float[Tensor, " tokens"],
        share: float = 1.0,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """The critic's loss, as `loss` is the policy's.

        Raises:
            ValueError: an algorithm without a critic.
        """
        if self.algorithm.value_loss is None:
            raise ValueError(f"{self.algorithm.name} has no value_loss: it trains no critic")
        per_token = self.algorithm.value_loss(self.hyperparameters, values, old_values, returns, tokens)
        return summed(per_token, tokens, weights, share)

    def __call__(
        self,
        rewards: Float[Tensor, "samples components"],
        groups: Int[Tensor, " samples"],
        tokens: Tokens,
        log_probs: Float[Tensor, " tokens"],
        old_log_probs: Float[Tensor, " tokens"] | None = None,
        *,
        kl: Float[Tensor, " tokens"] | None = None,
        values: Float[Tensor, " tokens"] | None = None,
        wrap: Callable[[TokenLoss], TokenLoss] | None = None,
    ) -> Outcome:
        """From rewards to the loss. Without `old_log_probs` the policy that sampled is the one that is updated."""
        scores = self.scores(rewards, groups)
        found = self.advantages(scores, tokens, kl=kl, values=values)
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        loss, metrics = self.loss(log_probs, old, found.advantages, tokens, self.weights(tokens), wrap)
        carries = signal.scores_differ(scores, groups)
        return Outcome(loss, scores, found.advantages, found.returns, metrics, carries)


@attrs.frozen(eq=False)
class Tangent:
    """Token losses of an optimizer batch and their slopes, each in its own token's log-prob.

    An algorithm with trait `whole_batch_loss` chooses among tokens, and a micro-batch that chose among its own would
    choose others. What is chosen is a constant of the step, so that a token's loss, once the choice is made, depends on
    its own log-prob alone: its value and its slope say all that the step needs, and they can be cut anywhere.

    Attributes:
        loss: and metrics, at the log-probs before the step.
        slope: of each token's loss.
    """

    loss: TokenLoss
    slope: Float[Tensor, " tokens"]

    def cut(self, span: slice) -> "Tangent":
        """That of the tokens in `span`. Metrics of no token stay the whole batch's."""
        metrics = {name: metric[span] if metric.ndim else metric for name, metric in self.loss.metrics.items()}
        return Tangent(TokenLoss(self.loss.loss[span], metrics), self.slope[span])

    def along(self, log_probs: Float[Tensor, " tokens"]) -> TokenLoss:
        """The losses as they are, with their slopes as gradients in `log_probs`."""
        return TokenLoss(self.loss.loss + self.slope * (log_probs - log_probs.detach()), self.loss.metrics)


def summed(
    loss: TokenLoss, tokens: Tokens, weights: Float[Tensor, " tokens"], share: float = 1.0
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Token losses weighed and summed, and their metrics; those of no token count by `share`.

    What a loss holds where the weight is 0 is only looked for where tokens are masked: it costs more than the sum.
    """

    def product(values: Tensor) -> Tensor:
        wide = torch.promote_types(values.dtype, weights.dtype)
        return torch.dot(values.to(wide), weights.to(wide)).to(values.dtype)

    # Metrics hold 0 under the mask, and have no gradient: a plain product will do.
    metrics = {name: product(metric) if metric.ndim else metric * share for name, metric in loss.metrics.items()}
    plain = tokens.known_all_valid
    return product(loss.loss) if plain else reducers.weighted_sum(loss.loss, weights), metrics


def pipeline(
    algorithm: str | Algorithm[H],
    hyperparameters: H | None = None,
    *,
    segment: Segment = whole_batch,
    reduce: Reduce = local,
    normalize_advantages: bool | None = None,
    reducer: Reducer[H] | None = None,
) -> Pipeline[H]:
    """Bind an algorithm (or its name) to hyperparameters (its defaults, where not given), `segment` and `reduce`.

    Args:
        normalize_advantages: over the tokens of all ranks; None does what the algorithm requires, and no more.
        reducer: weighs token losses instead of the algorithm's own.

    Raises:
        ValueError: an unknown name; a normalization of advantages against what the algorithm requires or forbids.
        TypeError: hyperparameters of another algorithm.
    """
    record: Algorithm[H] = get_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    chosen = record.hyperparameters() if hyperparameters is None else hyperparameters
    if not isinstance(chosen, record.hyperparameters):
        raise TypeError(f"{record.name} takes {record.hyperparameters.__name__}, got {chosen!r}")
    need = record.traits.normalize_advantages
    normal = need == "required" if normalize_advantages is None else normalize_advantages
    if (need == "required" and not normal) or (need == "forbidden" and normal):
        raise ValueError(f"normalize_advantages is {normal}, but {need} by {record.name}")
    return Pipeline(record, chosen, segment, reduce, normal, reducer)
