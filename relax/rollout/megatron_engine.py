"""Sampling with the training model itself, through Megatron's inference context: no second copy of the weights.

Only a model that is cut into pipeline stages has one: its tokens would pass all stages one at a time.
"""

from collections.abc import Sequence

import torch
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from torch import Tensor

from relax.data.samples import Completion
from relax.megatron import stages
from relax.megatron.model import PolicyModel, build_model
from relax.megatron.trainer import Trainer
from relax.rollout.engine import sample


class MegatronEngine:
    """Reads the trainer's weights where they are: `update_weights` only remembers the model.

    With several pipeline stages it fills a model with all layers instead, on every rank, and the ranks of a replica
    sample the same.
    """

    def __init__(self, end_ids: Sequence[int]) -> None:
        self.end_ids = end_ids
        self._model: PolicyModel | None = None

    def update_weights(self, trainer: Trainer) -> None:
        if trainer.model.pre_process and trainer.model.post_process:
            self._model = trainer.model
            return
        if self._model is None:
            self._model = build_model(trainer.model_config, 0, whole=True).requires_grad_(False)
        stages.gather(trainer.model, self._model)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        if self._model is None:
            raise RuntimeError("the engine has no weights yet: call update_weights first")
        self._model.eval()
        return sample(
            _CachedModel(self._model),
            prompts,
            n=n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=seeds,
            end_ids=self.end_ids,
            max_positions=self._model.max_position_embeddings,
            device=self._model.rotary_cos.device,
        )


class _CachedModel:
    """A PolicyModel and its StaticInferenceContext as a `Decoder`.

    Prompts are padded on the right to a common width, and every row's new tokens go to the slots behind that width. The
    gap in shorter rows is hidden by a mask, and each row rotates by positions of its own, so a row computes what it
    would compute alone.
    """

    def __init__(self, model: PolicyModel) -> None:
        self._model = model

    def prefill(self, prompts: Tensor, lengths: Tensor, n: int, max_new_tokens: int) -> Tensor:
        count, width = prompts.shape
        self._context = StaticInferenceContext(count, width)
        self._context.materialize_only_last_token_logits = False
        last = (lengths - 1) * count + torch.arange(count, device=prompts.device)
        places = torch.arange(width, device=prompts.device).unsqueeze(0)
        logits = self._forward(prompts, places, None, last).squeeze(0)

        self._context.max_batch_size, self._context.max_sequence_length = count * n, width + max_new_tokens
        self._context.sequence_len_offset = width
        self._context.enable_decode_mode()
        self._cache = {
            layer: (_grow(key, n, max_new_tokens), _grow(value, n, max_new_tokens))
            for layer, (key, value) in self._cache.items()
        }
        self._positions = lengths.repeat_interleave(n).unsqueeze(1)
        self._mask = None
        if bool((lengths < width).any()):
            hidden = (places >= lengths.unsqueeze(1)).repeat_interleave(n, 0)
            mask = torch.zeros(count * n, 1, 1, width + max_new_tokens, device=prompts.device)
            mask[..., :width].masked_fill_(hidden[:, None, None], -torch.inf)
            self._mask = mask
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        end = self._context.sequence_len_offset + 1
        mask = None if self._mask is None else self._mask[..., :end]
        logits = self._forward(tokens.unsqueeze(1), self._positions, mask, None).squeeze(1)
        self._context.sequence_len_offset = end
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        self._cache = {layer: (_keep(key, rows), _keep(value, rows)) for layer, (key, value) in self._cache.items()}
        self._positions = self._positions[rows]
        self._mask = None if self._mask is None else self._mask[rows]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, wanted: Tensor | None) -> Tensor:
        logits: Tensor = self._model(
            tokens,
            positions,
            mask,
            inference_context=self._context,
            runtime_gather_output=True,
            loss_mask=wanted,
        )
        return logits

    @property
    def _cache(self) -> dict[int, tuple[Tensor, Tensor]]:
        cache: dict[int, tuple[Tensor, Tensor]] = self._context.key_value_memory_dict
        return cache

    @_cache.setter
    def _cache(self, cache: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._context.key_value_memory_dict = cache


# Megatron's caches are [time, rows, groups, width]. Ours are laid out as [rows, groups, time, width] and seen through a
# permutation: a decoding step reads each row's keys in one piece.


def _grow(states: Tensor, n: int, slots: int) -> Tensor:
    """Repeats each row `n` times and adds `slots` empty places: [time, rows, ...] -> [time + slots, rows * n, ...]."""
    time, rows, groups, width = states.shape
    grown = states.new_empty(rows * n, groups, time + slots, width)
    grown[:, :, :time] = states.permute(1, 2, 0, 3).repeat_interleave(n, 0)
    return grown.permute(2, 0, 1, 3)


def _keep(states: Tensor, rows: Tensor) -> Tensor:
    return states.permute(1, 2, 0, 3)[rows].permute(2, 0, 1, 3)
