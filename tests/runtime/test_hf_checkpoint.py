"""`relax train --hf-checkpoint`: from a model that transformers saved, to one that transformers loads."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import transformers
import yaml

from tests.megatron.checkpoints import edit_config, tokenizer
from tests.runtime.launch import lines, relax, signal_at_step, timeless
from tests.runtime.pretrained import BRIEF, QUESTIONS, greedy, outfit
from tests.runtime.test_ranks import job
from tests.runtime.test_resume import assert_same

DATA = ("--prompt-data", "questions.jsonl", "--eval-prompt-data", "questions.jsonl")
OWN = (*DATA, *BRIEF)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints and an undisturbed run from each."""
    directory = tmp_path_factory.mktemp("table")
    for name in ("qwen3", "llama"):
        outfit(directory, name)
        finished = relax(directory, "train", "--hf-checkpoint", name, *OWN, "--output", f"from-{name}")
        assert (finished.status, finished.err) == (0, ""), finished
    return directory


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_run_starts_from_the_checkpoints_weights(table: Path, name: str) -> None:
    """Its first greedy answers are those of transformers, whatever else the run then does."""
    run = table / f"from-{name}"
    before, after = lines(run / "eval.jsonl")
    assert [shown["prompt"] for shown in before["samples"]] == QUESTIONS[:6]
    assert [shown["response"] for shown in before["samples"]] == greedy(table / name, QUESTIONS[:6], 6)
    assert [shown["response"] for shown in after["samples"]] == greedy(run / "export", QUESTIONS[:6], 6)
    records = lines(run / "metrics.jsonl")
    assert [record["phase"] for record in records] == ["rl", "rl"]  # no warm start
    assert all(record["grad_norm"] > 0 for record in records)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_an_export_is_the_next_runs_checkpoint(table: Path, name: str) -> None:
    """Described as the first was, tokenizer and template included; and the next run starts where this one ended."""
    source, export = table / name, table / f"from-{name}" / "export"
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (export / file).read_bytes() == (source / file).read_bytes()
    ours, theirs = (transformers.AutoConfig.from_pretrained(where).to_dict() for where in (export, source))
    assert {**ours, "_name_or_path": ""} == {**theirs, "_name_or_path": ""}
    words = ("train", "--hf-checkpoint", export, *OWN, "--num-rollout", 1, "--output", f"again-{name}")
    finished = relax(table, *words)
    assert (finished.status, finished.err) == (0, "")
    last, first = lines(table / f"from-{name}" / "eval.jsonl")[-1], lines(table / f"again-{name}" / "eval.jsonl")[0]
    assert first["samples"] == last["samples"]


def test_the_configuration_says_what_came_of_it_and_runs_again(table: Path) -> None:
    settings = yaml.safe_load((table / "from-qwen3" / "config.yaml").read_text())
    expected = {"hf_checkpoint": "qwen3", "hidden_size": 32, "kv_channels": 12, "max_position_embeddings": 64}
    assert {name: settings[name] for name in expected} == expected
    assert (settings["warm_start_steps"], settings["recipe"]) == (0, None)
    finished = relax(table, "train", "--config", "from-qwen3/config.yaml", "--output", "from-file")
    assert (finished.status, finished.err) == (0, "")
    assert_same(table / "from-file", table / "from-qwen3")


def test_a_resumed_run_needs_no_weights_but_its_own(table: Path) -> None:
    shutil.copytree(table / "llama", table / "moved")
    words = ("train", "--hf-checkpoint", "moved", *OWN, "--output", "stopped")
    assert relax(table, *words, prepare=partial(signal_at_step, 1)).status == 130
    (table / "moved" / "model.safetensors").unlink()
    resumed = relax(table, "train", "--resume", "stopped")
    assert (resumed.status, resumed.err) == (0, "")
    assert_same(table / "stopped", table / "from-llama")
    assert relax(table, "eval", "stopped").status == 0


def test_ranks_that_share_the_model_start_from_the_same_weights(table: Path) -> None:
    words = ("--hf-checkpoint", "llama", *OWN, "--tensor-model-parallel-size", 2, "--output", "shared")
    ranks = job(table, 2, words)
    assert [rank.status for rank in ranks] == [0, 0], ranks
    ours, theirs = (timeless(lines(table / run / "metrics.jsonl")) for run in ("shared", "from-llama"))
    for record, expected in zip(ours, theirs, strict=True):
        assert record.pop("phase") == expected.pop("phase")
        assert record == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_critic_and_reference_start_from_it_too(table: Path) -> None:
    words = ("--advantage-estimator", "ppo", "--kl-coef", 0.1, "--bf16", "--num-steps-per-rollout", 2)
    finished = relax(table, "train", "--hf-checkpoint", "qwen3", *OWN, *words, "--output", "ppo")
    assert (finished.status, finished.err) == (0, "")
    assert all(record["value_grad_norm"] > 0 for record in lines(table / "ppo" / "metrics.jsonl"))


def test_the_recipe_trains_a_checkpoint_without_its_warm_start(table: Path) -> None:
    words = ("--eval-samples", 2, "--rollout-batch-size", 2, "--n-samples-per-prompt", 4, "--num-rollout", 1)
    finished = relax(table, "train", "--hf-checkpoint", "qwen3", *words, "--max-resampling", 0, "--output", "recipe")
    assert (finished.status, finished.err) == (0, "")
    assert {record["phase"] for record in lines(table / "recipe" / "metrics.jsonl")} == {"rl"}
    asked = ("--warm-start-steps", 2, "--warm-start-batch-size", 2, "--output", "warm")
    finished = relax(table, "train", "--hf-checkpoint", "qwen3", *words, *asked, "--max-resampling", 0)
    assert (finished.status, finished.err) == (0, "")
    assert [record["phase"] for record in lines(table / "warm" / "metrics.jsonl")] == ["sft", "sft", "rl"]


def test_shorter_sequences_than_the_model_can_read(table: Path) -> None:
    words = ("--max-position-embeddings", 30, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 64)
    finished = relax(table, "train", "--hf-checkpoint", "qwen3", *OWN, *words, "--num-rollout", 1, "--output", "short")
    assert (finished.status, finished.err) == (0, "")
    assert json.loads((table / "short" / "export" / "config.json").read_text())["max_position_embeddings"] == 64


def test_another_tokenizer_brings_its_own_end(table: Path) -> None:
    tokenizer(eos_token="<|assistant|>").save_pretrained(table / "other")
    words = ("--hf-checkpoint", "qwen3", "--tokenizer", "other", *OWN, "--num-rollout", 1, "--output", "renamed")
    finished = relax(table, "train", *words)
    assert (finished.status, finished.err) == (0, "")
    export = table / "renamed" / "export"
    assert transformers.GenerationConfig.from_pretrained(export).eos_token_id == 3
    assert transformers.AutoConfig.from_pretrained(export).eos_token_id == 3
    assert (export / "tokenizer.json").is_file()


def broken(directory: Path, fault: str) -> None:
    """Breaks a checkpoint."""
    if fault == "no config":
        (directory / "config.json").unlink()
    elif fault == "no tokenizer":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (directory / file).unlink()
    elif fault == "architecture":
        edit_config(directory, model_type="mistral")
    elif fault == "sizes":
        edit_config(directory, intermediate_size=50)
    elif fault == "vocabulary":
        larger = tokenizer()
        larger.add_tokens([f"<word {index}>" for index in range(40)])
        larger.save_pretrained(directory)
    elif fault == "no weights":
        (directory / "model.safetensors").unlink()


FAULTS = {
    "nowhere": (2, ["--hf-checkpoint: broken: no such directory"]),
    "no config": (2, ["--hf-checkpoint: broken: holds no config.json"]),
    "architecture": (2, ["broken/config.json: model_type 'mistral' is not supported; there are qwen3, qwen2, llama"]),
    "no tokenizer": (1, ["broken: holds no tokenizer", "--tokenizer"]),
    "vocabulary": (1, ["broken: the tokenizer has", "but the model only 301"]),
    "no weights": (1, ["broken: holds neither model.safetensors nor"]),
    "sizes": (
        1,
        [
            "broken: these weights do not fit config.json:",
            "model.layers.0.mlp.gate_proj.weight has shape (48, 32), expected (50, 32)",
            "model.layers.1.mlp.down_proj.weight has shape (32, 48), expected (32, 50)",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checkpoints_that_cannot_be_trained_start_nothing(table: Path, fault: str) -> None:
    shutil.rmtree(table / "broken", ignore_errors=True)
    if fault != "nowhere":
        shutil.copytree(table / "qwen3", table / "broken")
        broken(table / "broken", fault)
    finished = relax(table, "train", "--hf-checkpoint", "broken", *OWN, "--output", "never")
    status, parts = FAULTS[fault]
    assert finished.status == status, finished
    assert finished.err.count(": error: ") == 1
    assert "Traceback" not in finished.err
    for part in parts:
        assert part in finished.err
    assert not (table / "never").exists()
