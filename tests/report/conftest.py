"""A run's files, as small as they can be and still tell everything."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from relax.config import configure

SECONDS = {"rollout": 0.4, "forward_backward": 0.3, "optimizer": 0.1, "reward": 0.05, "advantages": 0.05, "other": 0.1}
WriteRun = Callable[..., Path]


def sft_step(step: int) -> dict[str, object]:
    return {"step": step, "phase": "sft", "rollout": 0, "loss": 3 / step, "lr": 2e-3, "seconds/step": 1.0}


def rl_step(step: int, rollout: int) -> dict[str, object]:
    seconds = {f"seconds/{name}": value for name, value in SECONDS.items()}
    return {
        "step": step,
        "phase": "rl",
        "rollout": rollout,
        "loss": 0.01 * rollout,
        "lr": 5e-4,
        "reward/correctness": 0.4 + 0.1 * rollout,
        "reward/format": 0.5,
        "reward/length": -12.0 + rollout,
        "response/length": 12.0 - rollout,
        "samples/filtered": 8.0,
        "seconds/step": 1.0,
        **seconds,
    }


def evaluation(when: str, phase: str, step: int, correctness: float) -> dict[str, object]:
    rewards = {"correctness": 1.0, "format": 0.5, "length": -7.0}
    return {
        "when": when,
        "phase": phase,
        "step": step,
        "problems": 2,
        "greedy": True,
        "reward/correctness": correctness,
        "reward/format": 0.5,
        "reward/length": -7.0,
        "samples": [
            {"prompt": "1+1=", "response": f"<answer>{when} & 2</answer>", "rewards": rewards},
            {"prompt": "2+2=", "response": "5", "rewards": {**rewards, "correctness": 0.0}},
        ],
    }


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run with some of its records; the defaults are those of a finished one."""

    def write(
        name: str = "one",
        metrics: list[Mapping[str, object]] | None = None,
        evaluations: list[Mapping[str, object]] | None = None,
        **settings: object,
    ) -> Path:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(configure(**{"num_rollout": 3, **settings}).to_yaml())
        if metrics is None:
            metrics = [*map(sft_step, (1, 2)), *(rl_step(2 + rollout, rollout) for rollout in (1, 2, 3))]
        if evaluations is None:
            evaluations = [
                evaluation("before", "sft", 0, 0.0),
                evaluation("before", "rl", 2, 0.45),
                evaluation("during", "rl", 4, 0.6),
                evaluation("after", "rl", 5, 0.875),
            ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
        (run / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evaluations))
        return run

    return write
