"""What a Hugging Face checkpoint decides of a configuration: the sizes that it has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

LONGEST: Final = "max_position_embeddings"
SIZES: Final = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    LONGEST,
    "rotary_base",
)


def sizes_of(directory: Path) -> Mapping[str, float]:
    """The checkpoint's `SIZES`. Errors: `RelaxError` where there is none, or none of a model that we can compute."""
    from relax.megatron.hf.config import read_config  # brings transformers and Megatron: seconds that no help needs

    model = read_config(directory).model
    return {name: getattr(model, name) for name in SIZES}


def contradiction(directory: Path, name: str, size: float, given: object) -> str | None:
    """Why the checkpoint's `size` of that `name` does not go with the `given` one; None if it does.

    A run may be content with shorter sequences than the model can read, not with longer ones.
    """
    if given == size or (name == LONGEST and isinstance(given, int) and given < size):
        return None
    return f"contradicts --hf-checkpoint {directory}, which has {size:g}; leave it out"
