"""Sampling with Hugging Face transformers, its weights converted in memory from the trainer's at every update."""

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor

from relax.data.samples import Completion
from relax.megatron import hf, shim
from relax.megatron.trainer import Trainer
from relax.rollout.engine import sample


class TransformersEngine:
    """A model of its own, so it keeps sampling from the weights of the last `update_weights`."""

    def __init__(self, end_ids: Sequence[int]) -> None:
        self.end_ids = end_ids
        self._model: transformers.PreTrainedModel | None = None

    @torch.no_grad()
    def update_weights(self, trainer: Trainer) -> None:
        if self._model is None:
            with torch.random.fork_rng(devices=[]):
                fresh = transformers.AutoModelForCausalLM.from_config(hf.hf_config(trainer.model_config))
            self._model = fresh.to(shim.device()).eval()
        weights = dict(self._model.named_parameters())
        for name, tensor in hf.export(trainer.model, trainer.model_config).items():
            weights[name].copy_(tensor)

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
        return sample(
            _CachedModel(self._model),
            prompts,
            n=n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=seeds,
            end_ids=self.end_ids,
            max_positions=self._model.config.max_position_embeddings,
            device=shim.device(),
        )


class _CachedModel:
    """A transformers model and its cache as a `Decoder`, laid out as Megatron's: prompts padded on the right."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        self._cache = transformers.DynamicCache(config=model.config)

    def prefill(self, prompts: Tensor, lengths: Tensor, n: int, max_new_tokens: int) -> Tensor:
        places = torch.arange(prompts.shape[1], device=prompts.device)
        # The cache goes by position: transformers renames that argument between versions.
        hidden = self._model.model(prompts, None, places.unsqueeze(0), self._cache, use_cache=True)
        last = hidden.last_hidden_state[torch.arange(len(prompts), device=prompts.device), lengths - 1]
        logits: Tensor = self._model.lm_head(last)
        self._cache.batch_repeat_interleave(n)
        self._visible = (places < lengths.unsqueeze(1)).repeat_interleave(n, 0)
        self._positions = lengths.repeat_interleave(n).unsqueeze(1)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        self._visible = torch.nn.functional.pad(self._visible, (0, 1), value=True)
        logits: Tensor = self._model(
            tokens.unsqueeze(1), self._visible, self._positions, self._cache, use_cache=True
        ).logits
        self._positions = self._positions + 1
        return logits.squeeze(1)

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._visible = self._visible[rows]
        self._positions = self._positions[rows]
