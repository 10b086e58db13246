"""What laws draw from: numbers of every magnitude with ties, groups, ragged batches, and spreads over ranks."""

import torch
from hypothesis import strategies as st
from torch import Tensor

import relax_core as rc

magnitudes = st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 7.0, 1e6, 1e13, 1e30])


def seeds() -> st.SearchStrategy[int]:
    """Of a torch.Generator."""
    return st.integers(0, 2**32 - 1)


@st.composite
def numbers(draw: st.DrawFn, count: int) -> Tensor:
    """float64 values, exact in float32: a few levels with ties, or a spread on an offset, or everything mixed."""
    seed, magnitude = draw(seeds()), draw(magnitudes)
    generator = torch.Generator().manual_seed(seed)
    kind = draw(st.sampled_from(["levels", "spread", "offset", "mixed", "constant"]))
    values = torch.randn(count, generator=generator)
    if kind == "levels":
        values = torch.randint(0, 3, (count,), generator=generator) * 0.1
    elif kind == "offset":
        values = 1 + values * 1e-5
    elif kind == "mixed":
        values = values * 10.0 ** torch.randint(-20, 5, (count,), generator=generator)
    elif kind == "constant":
        values = torch.full((count,), draw(st.sampled_from([0.1, 0.3, -0.7, 0.0])))
    return (values * magnitude).double()


@st.composite
def grouped(draw: st.DrawFn, components: int = 1, least: int = 2) -> tuple[Tensor, Tensor]:
    """Reward matrix and group ids, groups of unlike sizes, interleaved."""
    sizes = draw(st.lists(st.integers(least, 9), min_size=1, max_size=5))
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * 3 - 4
    groups = groups[draw(permutations(len(groups)))]
    return torch.stack([draw(numbers(len(groups))) for _ in range(components)], 1), groups


def permutations(count: int) -> st.SearchStrategy[Tensor]:
    return seeds().map(lambda seed: torch.randperm(count, generator=torch.Generator().manual_seed(seed)))


@st.composite
def tokens(draw: st.DrawFn, samples: int | None = None) -> rc.Tokens:
    """Responses of 0 to 6 tokens, any of them masked."""
    count = draw(st.integers(1, 6)) if samples is None else samples
    lengths = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return rc.Tokens(torch.tensor(lengths, dtype=torch.long), torch.tensor(mask, dtype=torch.bool))


@st.composite
def spreads(draw: st.DrawFn, count: int, ranks: int) -> Tensor:
    """The rank that each of `count` samples goes to; ranks may stay empty."""
    return torch.tensor(draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count)), dtype=torch.long)
