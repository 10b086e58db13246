"""Imported once, before runs are forked: what each would do anew the first time it does anything."""

import torch

from relax.data.tokenizer import character_codec
from relax_core import Tokens, pipeline

pipeline("gdpo")(  # the checks of shapes are compiled at the first call
    torch.tensor([[0.0, 1.0], [1.0, 3.0], [1.0, 2.0]]),
    torch.zeros(3, dtype=torch.int64),
    Tokens.full([1, 1, 1]),
    torch.zeros(3),
)
character_codec().encode("1")
