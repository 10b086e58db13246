"""A small run that every test may look at, and what it takes to make another."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.launch import TIME_LIMIT, relax

# One coarse reward on digits and one on capitals: even for a new model some groups are flat, and most are not.
LIVELY = """
def score(sample):
    first = sample.response[:1]
    rewards = {"digit": float(first.isdigit()), "letter": 2.0 * first.isupper()}
    return {**rewards, "tokens": len(sample.completion.token_ids), "score": sum(rewards.values()), "seven": 7}
"""
SHAPE = (
    *("--num-layers", 1, "--hidden-size", 32, "--num-attention-heads", 2, "--num-query-groups", 1),
    *("--ffn-hidden-size", 64, "--kv-channels", 16, "--max-position-embeddings", 48),
)
SMALL = (
    *SHAPE,
    *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--micro-batch-size", 16),
    *("--rollout-max-response-len", 6, "--eval-samples", 8, "--custom-rm-path", "lively.score"),
    *("--warm-start-steps", 3, "--warm-start-batch-size", 8, "--num-rollout", 4),
    *("--eval-interval", 2, "--save-interval", 2, "--keep-checkpoints", 9),
)
GDPO = (*SMALL, "--gdpo-reward-keys", "digit", "letter", "--gdpo-reward-weights", 1, 0.5)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own directory, with a reward function in it."""
    directory = tmp_path_factory.mktemp("desk")
    (directory / "lively.py").write_text(LIVELY)
    return directory


@pytest.fixture(scope="session")
def base(desk: Path) -> Path:
    """An undisturbed run of three SFT steps and four rollouts."""
    finished = relax(desk, "train", *GDPO, "--output", "base")
    assert finished.status == 0, finished
    (desk / "base.out").write_text(finished.out)
    (desk / "base.err").write_text(finished.err)
    return desk / "base"


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something holds."""

    def wait(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + TIME_LIMIT
        while not holds():
            assert time.monotonic() < end, "it never came to that"
            time.sleep(0.005)

    return wait
