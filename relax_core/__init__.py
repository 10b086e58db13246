"""Pure, shape-typed functions for reinforcement-learning post-training."""

from relax_core import (
    advantages,
    collectives,
    corrections,
    describe,
    kl,
    losses,
    numerics,
    reducers,
    rewards,
    signal,
    vocabulary,
)
from relax_core.algorithm import Advantages, Algorithm, TokenLoss, Traits
from relax_core.batch import Tokens
from relax_core.collectives import local, split_by, whole_batch
from relax_core.pipeline import pipeline
from relax_core.registry import ALGORITHMS, get_algorithm

__all__ = [
    "ALGORITHMS",
    "Advantages",
    "Algorithm",
    "TokenLoss",
    "Tokens",
    "Traits",
    "advantages",
    "collectives",
    "corrections",
    "describe",
    "get_algorithm",
    "kl",
    "local",
    "losses",
    "numerics",
    "pipeline",
    "reducers",
    "rewards",
    "signal",
    "split_by",
    "vocabulary",
    "whole_batch",
]
