"""What a run leaves behind, read as its user reads it."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.launch import lines

EXPECTED = {
    *("step", "phase", "rollout", "loss", "grad_norm", "lr", "ppo_kl", "clipfrac", "entropy", "tokens_per_second"),
    *("reward/digit", "reward/letter", "reward/score", "reward/seven"),
    *("advantage/mean", "advantage/std", "advantage/min", "advantage/max"),
    *("zero_std/groups", "zero_std/digit", "zero_std/letter", "response/length", "response/truncated"),
    *("samples/generated", "samples/filtered", "samples/trained"),
    *("seconds/rollout", "seconds/reward", "seconds/advantages", "seconds/forward_backward", "seconds/optimizer"),
    *("seconds/weights", "seconds/other", "seconds/step"),
}


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for entry in value.values():
            yield from numbers(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from numbers(entry)
    elif isinstance(value, int | float):
        yield float(value)


def reinforced(run: Path) -> list[dict[str, object]]:
    return [record for record in lines(run / "metrics.jsonl") if record["phase"] == "rl"]


def test_everything_that_was_promised_is_there(base: Path) -> None:
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "eval.jsonl",
        "report.html",
        "export/model.safetensors",
        "export/tokenizer.json",
    ):
        assert (base / name).stat().st_size > 0
    assert list((base / "tensorboard").glob("events*"))
    assert not list(base.rglob("*.tmp"))


def test_each_optimizer_step_has_one_line_with_every_key(base: Path) -> None:
    records = lines(base / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["phase"] for record in records] == 3 * ["sft"] + 4 * ["rl"]
    for record in reinforced(base):
        assert record.keys() >= EXPECTED


def test_all_numbers_are_finite(base: Path) -> None:
    everything = list(numbers(lines(base / "metrics.jsonl"))) + list(numbers(lines(base / "eval.jsonl")))
    assert len(everything) > 100
    assert all(map(math.isfinite, everything))


def test_what_is_generated_is_filtered_or_trained(base: Path) -> None:
    for record in reinforced(base):
        assert record["samples/generated"] == record["samples/filtered"] + record["samples/trained"]
        assert record["samples/trained"] <= 16


def test_the_counts_of_a_run_agree_with_the_prompts_drawn(base: Path) -> None:
    from relax.megatron.checkpoint import latest, read_extra

    position = read_extra(latest(base / "checkpoints"))["position"]
    assert sum(record["samples/generated"] for record in reinforced(base)) == 4 * position["drawn"]
    assert position["drawn"] > 16  # some groups were flat and drawn anew, or this test would see nothing


def test_advantages_are_whitened_over_the_batch(base: Path) -> None:
    """Over samples, not tokens, so the token mean need not be zero; the largest cannot exceed (n - 1) / sqrt(n)."""
    for record in reinforced(base):
        bound = 15 / math.sqrt(16)
        assert -bound <= record["advantage/min"] < 0 < record["advantage/max"] <= bound
        assert 0.3 < record["advantage/std"] < 2


def test_a_first_step_is_on_policy(base: Path) -> None:
    for record in reinforced(base):
        assert record["ppo_kl"] == 0
        assert record["clipfrac"] == 0


def test_time_adds_up(base: Path) -> None:
    for record in lines(base / "metrics.jsonl"):
        parts = [value for key, value in record.items() if key.startswith("seconds/") and key != "seconds/step"]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(record["seconds/step"])


def test_evaluations_come_before_during_and_after(base: Path) -> None:
    records = lines(base / "eval.jsonl")
    assert [(r["when"], r["phase"], r["step"]) for r in records] == [
        ("before", "sft", 0),
        ("before", "rl", 3),
        ("during", "rl", 5),
        ("after", "rl", 7),
    ]
    for record in records:
        assert record["problems"] == 8
        assert record["greedy"] is True
        assert 0 <= record["reward/digit"] <= 1
        assert len(record["samples"]) == 8
        assert record["samples"][0].keys() == {"prompt", "response", "rewards"}


def test_held_out_problems_never_occur_in_training(base: Path) -> None:
    held_out = {r["prompt"] for r in lines(base / "data" / "held_out.jsonl")}
    training = {r["prompt"] for r in lines(base / "data" / "prompts.jsonl")}
    shown = {r["prompt"] for r in lines(base / "data" / "demonstrations.jsonl")}
    assert len(held_out) == 500
    assert not held_out & (training | shown)


def test_the_terminal_shows_progress_and_no_wall_of_warnings(base: Path) -> None:
    out, err = ((base.parent / f"base.{stream}").read_text() for stream in ("out", "err"))
    assert err == ""
    assert "warn" not in out.lower().replace("warm start", "")
    assert len(out.splitlines()) < 25
    assert f"relax sample {base.name}" in out.replace(str(base.parent) + "/", "")
