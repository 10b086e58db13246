"""TensorBoard shows the same numbers under the same names."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax.report.tensorboard import TensorBoard
from tests.report.conftest import evaluation, rl_step, sft_step


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_records_become_scalars(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        board.write(sft_step(1))
        board.write(rl_step(2, 1))
        board.write(evaluation("after", "rl", 2, 0.5))
    scalars = read(tmp_path)
    assert scalars["sft/loss"] == [(1, 3.0)]
    assert scalars["reward/correctness"] == [(2, pytest.approx(0.5))]
    assert scalars["eval/reward/correctness"] == [(2, 0.5)]
    assert scalars["train/lr"] == [(2, pytest.approx(5e-4))]
    assert not {"train/step", "train/rollout", "eval/problems", "eval/greedy"} & scalars.keys()


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        for step in (1, 2, 3):
            board.write({"phase": "rl", "step": step, "loss": float(step)})
    with TensorBoard(tmp_path, resumed_at=1) as board:
        board.write({"phase": "rl", "step": 2, "loss": 20.0})
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 20.0)]
