"""The benchmarks of training run, and count what they say they count. Their figures are for quiet machines."""

import sys
from collections.abc import Sequence
from subprocess import run

import attrs
import pytest

from benchmarks import throughput
from relax.data.samples import Sequences


def told(module: str, *words: str) -> str:
    command: Sequence[str] = (sys.executable, "-m", f"benchmarks.{module}", *words)
    finished = run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_throughput_runs_without_a_gpu() -> None:
    text = told("throughput", "--tiny", "--prompts", "1", "--prompt", "4", "--response", "8", "--steps", "1")
    assert "CPU, local, thd: 8 samples" in text
    assert "tokens/s" in text
    assert "no known peak" in text


def test_operations_of_a_step() -> None:
    """For Qwen3-0.6B, 6 for each token and weight, the weights being the 440 million without the embedding ..."""
    model = throughput.QWEN3_0_6B
    body = 28 * (1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072)
    short = Sequences(((1,),), ((2,),))  # one token is fed
    layers = throughput.flops(model, short) - 6 * 1024 * 151_936 - 6 * 28 * 2048
    assert layers == pytest.approx(6 * body)
    # ... and 4 for each pair of a token and one before it, in every head's width and layer, three times.
    twice = Sequences(((1,) * 2000,), ((2,),)), Sequences(((1,) * 1000,) * 2, ((2,),) * 2)
    pairs = throughput.flops(model, twice[0]) - throughput.flops(model, twice[1])
    assert pairs + 6 * 1024 * 151_936 == pytest.approx(3 * 4 * 28 * 2048 * (2000**2 - 2 * 1000**2) / 2)
    tied = attrs.evolve(model, tie_embeddings=False)
    assert throughput.flops(tied, short) == throughput.flops(model, short)
