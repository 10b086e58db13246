"""Random states derived from one seed, so that a resumed run needs a position and nothing else."""

import random

import numpy as np
import torch


def derived_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for one use of randomness, named by `path`: ("rollout", 3) is independent of ("rollout", 4).

    Nothing depends on what was drawn before, which is why a checkpoint holds positions instead of generator states.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32]
    for part in path:
        # A name enters as its bytes, behind its length, so that no two paths spell the same words.
        words.extend([len(part), *part.encode()] if isinstance(part, str) else [part & 0xFFFFFFFF, part >> 32])
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def seed_global(seed: int, *path: str | int) -> None:
    """Sets the generators of the whole process: Python's, NumPy's and torch's.

    Nothing here draws from them, but the functions of a user may, and a resumed run is to repeat what those drew.
    """
    derived = derived_seed(seed, *path)
    random.seed(derived)
    np.random.seed(derived & 0xFFFFFFFF)
    torch.manual_seed(derived)
