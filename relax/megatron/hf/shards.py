"""Weights between a full Hugging Face state and what each rank of any layout holds. Plain tensors, no processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from relax.megatron import vocabulary
from relax.megatron.hf.rules import Rule, Shape, embedding_rule, layer_rules, output_rules
from relax.megatron.model import ModelConfig
from relax.megatron.stages import OUTPUT

Fetch = Callable[[str, Sequence[int]], Sequence[Tensor]]


@attrs.frozen(kw_only=True)
class Shard:
    """What a rank holds: a run of layers, with or without the model's two ends, and its share of each tensor there."""

    layers: range
    has_embedding: bool = True
    has_output: bool = True
    tensor_rank: int = 0
    tensor_size: int = 1


def whole(config: ModelConfig) -> Shard:
    """The shard of a rank that holds the whole model."""
    return Shard(layers=range(config.num_layers))


def rules(config: ModelConfig, shard: Shard) -> Iterator[Rule]:
    """The rules of the tensors that `shard` holds.

    Raises ValueError for a width that its tensor-parallel ranks cannot share evenly.
    """
    _check_even(config, shard.tensor_size)
    if shard.has_embedding:
        yield embedding_rule(config)
    for place, layer in enumerate(shard.layers):
        yield from layer_rules(config, place, layer)
    if shard.has_output:
        for rule in output_rules(config):
            # With both ends on one rank, a tied output layer is the embedding itself.
            if not (config.tie_embeddings and shard.has_embedding and rule.megatron == OUTPUT):
                yield rule


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a Hugging Face checkpoint of this model, a tied output layer left out, and its shape."""
    return {name: shape for rule in rules(config, whole(config)) for name, shape in rule.hugging_face.items()}


def to_megatron(config: ModelConfig, state: Mapping[str, Tensor], shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """`shard`'s share of a full Hugging Face state, tensor by tensor, under Megatron's names."""
    for rule in rules(config, shard):
        joined = rule.join(config, [state[name] for name in rule.hugging_face])
        yield rule.megatron, rule.cut(joined, shard.tensor_rank, shard.tensor_size)


def to_hugging_face(config: ModelConfig, shards: Sequence[Shard], fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
    """The full Hugging Face state of a model that `shards` make up, tensor by tensor, from the first layer to the last.

    `fetch(name, members)` gives what these of the shards, by index, hold under Megatron's `name`. With one shard,
    results are views of it where they can be. Raises ValueError if the shards are not the whole model exactly once.
    """
    stages: dict[Shard, dict[int, int]] = {}
    for index, shard in enumerate(shards):
        stages.setdefault(attrs.evolve(shard, tensor_rank=0), {})[shard.tensor_rank] = index
    _check_complete(config, stages, len(shards))
    for stage in sorted(stages, key=lambda stage: (stage.layers.start, stage.layers.stop)):
        members = [stages[stage][rank] for rank in range(stage.tensor_size)]
        for rule in rules(config, stage):
            if rule.megatron == OUTPUT and config.tie_embeddings:
                continue  # a last stage's copy of the embedding
            assembled = rule.assemble(fetch(rule.megatron, members))
            yield from zip(rule.hugging_face, rule.split(config, assembled), strict=True)


def _check_complete(config: ModelConfig, stages: Mapping[Shard, Mapping[int, int]], count: int) -> None:
    layers = sorted(layer for stage in stages for layer in stage.layers)
    ends = sum(stage.has_embedding for stage in stages), sum(stage.has_output for stage in stages)
    ranks_are_complete = all(sorted(ranks) == list(range(stage.tensor_size)) for stage, ranks in stages.items())
    if (
        layers != list(range(config.num_layers))
        or ends != (1, 1)
        or not ranks_are_complete
        or count != sum(map(len, stages.values()))
    ):
        raise ValueError("these shards do not make up the whole model exactly once: give every rank's")


def _check_even(config: ModelConfig, size: int) -> None:
    if not vocabulary.suffices(config.vocab_size, size):
        raise ValueError(f"vocab_size {config.vocab_size} is too small for {size} tensor-parallel ranks")
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(config, name) % size:
            raise ValueError(f"{name} {getattr(config, name)} cannot be shared evenly by {size} tensor-parallel ranks")
    # Megatron gives a rank whole groups, or several ranks a group.
    if config.num_query_groups % size and size % config.num_query_groups:
        raise ValueError(f"num_query_groups {config.num_query_groups} do not go with {size} tensor-parallel ranks")
