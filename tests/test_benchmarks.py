"""The benchmarks of training run, and count what they say they count. Their figures are for quiet machines."""

import sys
import time
from collections.abc import Sequence
from subprocess import run

import attrs
import pytest

from benchmarks import overhead, throughput
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


def test_overhead_is_a_part_of_the_step() -> None:
    text = told("overhead", "--prompts", "1", "--response", "8", "--micro-batch-sizes", "4", "--rounds", "1")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [row[:4] for row in rows] == [["bshd", "of", "4", "2"], ["thd", "of", "4", "2"]]
    for row in rows:
        step, ours = float(row[4]), float(row[5])
        assert 0 < ours < step
        assert float(row[6].rstrip("%")) == pytest.approx(100 * ours / step, abs=0.1 + 10 / step)


def test_memory_of_an_update_does_not_grow_with_the_logits() -> None:
    rows = [
        [*map(int, line.split())] for line in told("peak", "--words", "50000", "--prompts", "4", "32").splitlines()[1:]
    ]
    (few, small, logits), (many, large, more_logits) = rows
    assert many > 5 * few
    assert (large - small) < (more_logits - logits) / 10


def test_turns_add_up_and_only_one_runs_at_a_time() -> None:
    turns = overhead.Turns()
    inner = turns.of("inner", lambda: time.sleep(0.03))
    start = time.perf_counter()
    turns.of("outer", lambda: (time.sleep(0.01), inner(), inner()))()
    assert sum(turns.seconds.values()) == pytest.approx(time.perf_counter() - start, rel=0.05)
    assert turns.seconds["inner"] >= 0.06
    assert turns.seconds["outer"] >= 0.01
