"""A run that is killed at any moment, and goes on, ends with the weights of the undisturbed one, to the last bit."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from tests.runtime.conftest import GDPO
from tests.runtime.launch import relax, start
from tests.runtime.test_resume import assert_same

OFTEN = (*GDPO, "--save-interval", 1)
WRITTEN = {"in the foreground": (), "behind": ("--async-save",)}


STEPS = 7
PAUSE = 0.3  # seconds: about what a step, its checkpoint and its evaluation take


@attrs.frozen
class Killer:
    desk: Path
    base: Path
    eventually: Callable[[Callable[[], bool]], None]

    def strike(self, name: str, step: int, pause: float, words: tuple[str, ...]) -> bool:
        """Kill a run `pause` seconds after it recorded `step`, resume it and compare; whether it was still going."""
        run = self.desk / name
        going = start(self.desk, ["train", *OFTEN, *words, "--output", name])
        self.eventually(lambda: _recorded(run) >= step or not going.process.is_alive())
        time.sleep(pause)
        going.process.kill()
        status = going.finish().status
        assert status in (0, -signal.SIGKILL)
        resumed = relax(self.desk, "train", "--resume", name)
        assert (resumed.status, resumed.err) == (0, "")
        assert_same(run, self.base)
        shutil.rmtree(run)
        return status != 0


def _recorded(run: Path) -> int:
    """Steps recorded; -1 as long as there is no run that could be resumed."""
    if not (run / "config.yaml").exists():
        return -1
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.fixture
def killer(desk: Path, base: Path, eventually: Callable[[Callable[[], bool]], None]) -> Killer:
    return Killer(desk, base, eventually)


def _strike(killer: Killer, seed: int, times: int, words: tuple[str, ...]) -> None:
    """Kill `times` runs at random moments."""
    moments = random.Random(seed)
    struck = 0
    for number in range(times):
        step, pause = moments.randrange(STEPS), moments.uniform(0, PAUSE)
        struck += killer.strike(f"struck-{number}", step, pause, words)
    print(f"{struck} of {times} runs were killed before their end")
    assert struck > times / 2


@pytest.mark.parametrize("written", WRITTEN)
def test_killed_at_a_few_random_moments(killer: Killer, written: str) -> None:
    _strike(killer, 1, 3, WRITTEN[written])


@pytest.mark.slow
@pytest.mark.parametrize("written", WRITTEN)
def test_killed_at_twenty_random_moments(killer: Killer, written: str) -> None:
    _strike(killer, 2, 20, WRITTEN[written])
