"""One Megatron process for all tests of this directory, and small models to try things on."""

import random
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch

from relax.data.samples import Sequences
from relax.megatron.batching import Batching
from relax.megatron.model import ModelConfig
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.rope import Llama3Scaling
from relax.megatron.runtime import megatron_process
from relax.megatron.trainer import Trainer

VOCABULARY = 40
MODEL = ModelConfig(
    vocab_size=VOCABULARY,
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    kv_channels=12,
    max_position_embeddings=64,
)
# Every architecture, with what differs between checkpoints: the head's width (not hidden_size / heads), ties, RoPE. A
# small base turns every pair: one that hardly turns has a key bias whose gradient is nothing but rounding.
MODELS = {
    "qwen3": MODEL,
    "qwen2": attrs.evolve(MODEL, architecture="qwen2", rotary_base=100.0),
    "llama": attrs.evolve(
        MODEL, architecture="llama", tie_embeddings=False, kv_channels=8, rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 16)
    ),
}
ARCHITECTURES = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


@pytest.fixture(scope="package", autouse=True)
def process() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small to share
    with megatron_process(0):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_trainer() -> Callable[..., Trainer]:
    def make(
        model: ModelConfig = MODEL,
        optimizer: OptimizerConfig | None = None,
        *,
        seed: int = 0,
        micro_batch_size: int = 4,
        temperature: float = 1.0,
        reference: bool = False,
    ) -> Trainer:
        trainer = Trainer(
            model,
            optimizer or OptimizerConfig(total_steps=10, lr=1e-2),
            seed=seed,
            batching=Batching(micro_batch_size=micro_batch_size),
            temperature=temperature,
            reference=reference,
        )
        with torch.no_grad():  # a fresh model is nearly uniform, which hides faults
            for parameter in trainer.model.parameters():
                parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        return trainer

    torch.manual_seed(7)
    return make


@pytest.fixture
def sequences() -> Sequences:
    """Nine samples of uneven lengths; one of them has no response."""
    generator = random.Random(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(VOCABULARY) for _ in range(count))

    return Sequences(
        tuple(tokens(count) for count in (3, 3, 7, 1, 12, 5, 2, 4, 6)),
        tuple(tokens(count) for count in (5, 8, 1, 20, 3, 0, 9, 2, 6)),
    )
