"""What a rollout engine is, and the sampling loop that engines which run in this process share."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from relax.data.samples import Completion
from relax.megatron.trainer import Trainer


@runtime_checkable
class Engine(Protocol):
    """Samples from the current policy."""

    def update_weights(self, trainer: Trainer) -> None:
        """Takes over the trainer's current weights."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """`n` responses to each prompt, each of 1 to `max_new_tokens` tokens.

        A prompt's responses follow from the weights, the prompt and its one of `seeds`; which others are answered with
        it does not matter, but for rounding. Temperature 0 takes the likeliest token (the reported log-probs are then
        those at temperature 1).
        """
        ...


class Decoder(Protocol):
    """A model with a key-value cache, one row a response."""

    def prefill(self, prompts: Tensor, lengths: Tensor, n: int, max_new_tokens: int) -> Tensor:
        """Reads prompts [prompts, time], padded on the right; next-token logits [prompts, vocabulary].

        From here on the cache has `n` rows for each prompt, one after the other.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each row [rows]; next-token logits [rows, vocabulary]."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these."""
        ...


def choose(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Next tokens and their log-probs: logits [rows, vocabulary], uniforms [rows] in [0, 1) -> 2 x [rows].

    Inverts the cumulative distribution, in float64: one random number a token, so what a row draws depends neither on
    the size of the vocabulary nor on the other rows.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        log_probs = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        log_probs = (logits / temperature).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def sample(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    max_new_tokens: int,
    temperature: float,
    seeds: Sequence[int],
    end_ids: Sequence[int],
    max_positions: int,
    device: torch.device,
) -> list[list[Completion]]:
    """The loop behind `Engine.generate`. Any of `end_ids` ends a response. Random numbers are drawn before.

    Finished rows leave the batch when they are a quarter of it, since making room copies the cache; what a row says
    after its end is cut.
    """
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts")
    if not prompts:
        return []
    if not all(prompts):
        raise ValueError(f"prompt {[bool(prompt) for prompt in prompts].index(False)} is empty: it needs a token")
    if max(map(len, prompts)) + max_new_tokens > max_positions:
        raise ValueError(
            f"a prompt of {max(map(len, prompts))} tokens and {max_new_tokens} new ones need more than the model's "
            f"{max_positions} positions"
        )
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    rows = len(prompts) * n
    uniforms = torch.cat([_uniforms(seed, max_new_tokens, n) for seed in seeds], dim=1).to(device)

    ends = torch.tensor(end_ids, device=device)
    tokens = torch.full((max_new_tokens, rows), end_ids[0], device=device)
    log_probs = torch.zeros(max_new_tokens, rows, device=device)
    alive = torch.arange(rows, device=device)
    unfinished = torch.ones(rows, dtype=torch.bool, device=device)
    logits = decoder.prefill(padded.to(device), lengths.to(device), n, max_new_tokens).repeat_interleave(n, 0)
    for position in range(max_new_tokens):
        chosen, chosen_log_probs = choose(logits, uniforms[position, alive], temperature)
        tokens[position, alive] = chosen
        log_probs[position, alive] = chosen_log_probs
        unfinished &= ~torch.isin(chosen, ends)
        going_on = unfinished.nonzero().squeeze(-1)
        if len(going_on) == 0 or position + 1 == max_new_tokens:
            break
        if 4 * len(going_on) <= 3 * len(alive):
            alive, chosen, unfinished = alive[going_on], chosen[going_on], unfinished[going_on]
            decoder.keep(going_on)
        logits = decoder.step(chosen)
    return _completions(tokens.t(), log_probs.t(), n, torch.isin(tokens.t(), ends))


def _uniforms(seed: int, *shape: int) -> Tensor:
    """Random numbers in [0, 1) for the responses to one prompt."""
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _completions(tokens: Tensor, log_probs: Tensor, n: int, ends: Tensor) -> list[list[Completion]]:
    finished = ends.any(-1).tolist()
    first_end = ends.int().argmax(-1).tolist()
    flat = [
        Completion(tuple(row[: end + 1]), tuple(row_log_probs[: end + 1]), True)
        if done
        else Completion(tuple(row), tuple(row_log_probs), False)
        for row, row_log_probs, done, end in zip(tokens.tolist(), log_probs.tolist(), finished, first_end, strict=True)
    ]
    return [flat[start : start + n] for start in range(0, len(flat), n)]
