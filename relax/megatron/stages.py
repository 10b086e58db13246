"""A model with all its layers, and the pipeline stages that it divides into."""

import re
from typing import Final

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import distributed

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT: Final = "output_layer.weight"
"""Megatron's names of the parameters with a row for each token id."""


@torch.no_grad()
def take_share(stage: GPTModel, whole: GPTModel) -> None:
    """Gives this rank's `stage` its share of the weights of `whole`."""
    weights = dict(whole.named_parameters())
    # A tied output layer has weights of its own where the embedding is on another stage.
    weights.setdefault(OUTPUT, weights[EMBEDDING])
    first = parallel_state.get_pipeline_model_parallel_rank() * len(stage.decoder.layers)
    for name, parameter in stage.named_parameters():
        parameter.copy_(weights[_moved(name, first)])


@torch.no_grad()
def gather(stage: GPTModel, whole: GPTModel) -> None:
    """Gives `whole`, on every rank, the weights of all stages, parameter by parameter: all ranks call it at once."""
    group = parallel_state.get_pipeline_model_parallel_group()
    held = dict(stage.named_parameters())
    layers = len(stage.decoder.layers)
    for name, parameter in whole.named_parameters():
        source = _stage_with(name, layers, group.size())
        if source == group.rank():
            parameter.copy_(held[_moved(name, -source * layers)])
        distributed.broadcast(parameter, distributed.get_global_rank(group, source), group=group)


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


def _moved(name: str, layers: int) -> str:
    """The name of a parameter, its layer counted from that many layers earlier."""
    return _LAYER.sub(lambda number: str(int(number[0]) + layers), name)


def _stage_with(name: str, layers: int, stages: int) -> int:
    """The stage, of `stages` with that many layers each, which holds the parameter `name` of the whole model."""
    if name == EMBEDDING:
        return 0
    layer = _LAYER.search(name)
    return stages - 1 if layer is None else int(layer[0]) // layers
