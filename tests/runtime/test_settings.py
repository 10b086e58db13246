"""Other ways to run: engines, several steps a rollout, other algorithms, SFT alone, data of one's own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from relax_core import ALGORITHMS
from tests.runtime.conftest import GDPO, SHAPE, SMALL
from tests.runtime.launch import lines, relax, timeless

WEIGHTED = {
    name for name, algorithm in ALGORITHMS.items() if hasattr(algorithm.hyperparameters(), "gdpo_reward_weights")
}
BRIEF = ("--warm-start-steps", 0, "--num-rollout", 1, "--eval-interval", 0)


def test_two_steps_on_each_rollout_with_transformers(desk: Path) -> None:
    words = (*GDPO, "--num-steps-per-rollout", 2, "--rollout-engine", "transformers", "--rollout-temperature", 0.7)
    finished = relax(desk, "train", *words, "--lr", 1e-2, "--lr-warmup-fraction", 0, "--output", "two-steps")
    assert (finished.status, finished.err) == (0, "")
    records = [r for r in lines(desk / "two-steps" / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["rollout"] for r in records] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r["step"] for r in records] == list(range(4, 12))
    for record in records:
        assert record["samples/generated"] == record["samples/filtered"] + record["samples/trained"]
        assert record["samples/trained"] == 8
    # The first step improves the policy that sampled, the second one that has moved since.
    assert all(abs(r["ppo_kl"]) < 1e-6 for r in records[::2])
    assert all(abs(r["ppo_kl"]) > 1e-6 for r in records[1::2])


def test_both_engines_sample_the_same_responses(desk: Path, base: Path) -> None:
    """One random number a token and the same probabilities: the runs agree but for rounding."""
    finished = relax(desk, "train", *GDPO, "--num-rollout", 1, "--rollout-engine", "transformers", "--output", "engine")
    assert (finished.status, finished.err) == (0, "")
    ours, theirs = (lines(run / "metrics.jsonl")[3] for run in (desk / "engine", base))
    for key in ("response/length", "reward/digit", "reward/letter", "samples/generated", "zero_std/groups"):
        assert ours[key] == theirs[key]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def test_responses_of_one_token_in_uneven_micro_batches(desk: Path) -> None:
    words = ("--rollout-max-response-len", 1, "--micro-batch-size", 3, "--rollout-temperature", 1.7)
    finished = relax(desk, "train", *GDPO, *BRIEF, *words, "--output", "one-token")
    assert (finished.status, finished.err) == (0, "")
    (record,) = lines(desk / "one-token" / "metrics.jsonl")
    assert (record["response/length"], record["samples/trained"]) == (1, 16)


def test_packed_sequences_in_micro_batches_by_tokens(desk: Path, base: Path) -> None:
    """The undisturbed run's first steps, computed otherwise."""
    words = ("--qkv-format", "thd", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 48, "--num-rollout", 1)
    finished = relax(desk, "train", *GDPO, *words, "--output", "packed")
    assert (finished.status, finished.err) == (0, "")
    ours, theirs = (lines(run / "metrics.jsonl")[:4] for run in (desk / "packed", base))
    for key in ("loss", "entropy", "grad_norm"):
        assert [r[key] for r in ours] == pytest.approx([r[key] for r in theirs], rel=1e-3, abs=1e-5)


def flags_for(name: str) -> tuple[object, ...]:
    """What an algorithm's traits ask for."""
    traits = ALGORITHMS[name].traits
    weights = ("--gdpo-reward-weights", 1, 1) if name in WEIGHTED else ()
    return (
        *(
            ("--gdpo-reward-keys", "letter", "tokens", *weights)
            if traits.reads_components and not traits.component_names
            else ("--reward-key", "score")
        ),
        *(("--normalize-advantages",) if traits.normalize_advantages == "required" else ()),
        *(("--calculate-per-token-loss",) if traits.global_token_loss else ()),
        *(("--kl-coef", 0.1) if traits.reward_kl == "required" else ()),
        *(("--use-kl-loss", "--kl-loss-coef", 0.1) if traits.kl_loss == "required" else ()),
        *(("--kl-loss-type", traits.kl_estimator) if traits.kl_estimator not in ("any", "k1") else ()),
        *("--advantage-estimator", name),
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(desk: Path, name: str) -> None:
    finished = relax(desk, "train", *SMALL, *BRIEF, *flags_for(name), "--output", f"with-{name}")
    assert (finished.status, finished.err) == (0, "")
    (record,) = lines(desk / f"with-{name}" / "metrics.jsonl")
    assert record["samples/trained"] > 0
    assert record["grad_norm"] > 0
    assert record.keys() >= set(ALGORITHMS[name].traits.loss_metrics)


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_critic_and_reference_come_back_with_a_checkpoint(desk: Path, name: str) -> None:
    """Whole at once, and resumed from the middle: the same numbers, of the critic and the KL too."""
    words = (*SMALL, *flags_for(name), "--num-rollout", 3, "--save-interval", 1, "--lr", 1e-2)
    if name == "ppo":
        words = (*words, "--kl-coef", 0.1, "--critic-lr", 3e-2, "--num-steps-per-rollout", 2)
    run = desk / f"again-{name}"
    finished = relax(desk, "train", *words, "--output", run)
    assert (finished.status, finished.err) == (0, "")
    undisturbed = timeless(lines(run / "metrics.jsonl"))
    last = undisturbed[-1]
    if name == "ppo":
        assert last["value_loss"] != undisturbed[3]["value_loss"]
        assert last["value_grad_norm"] > 0
    if name == "reinforce_plus_plus_baseline":
        losses = [line["kl_loss"] for line in undisturbed if line["phase"] == "rl"]
        assert losses[0] == pytest.approx(0, abs=1e-9)
        assert losses[-1] > 1e-9
    for newest in sorted((run / "checkpoints").iterdir())[-2:]:
        shutil.rmtree(newest)
    resumed = relax(desk, "train", "--resume", run)
    assert (resumed.status, resumed.err) == (0, "")
    assert timeless(lines(run / "metrics.jsonl")) == undisturbed


def test_sft_alone(desk: Path) -> None:
    words = ("--loss-type", "sft", "--lr", 1e-2, "--num-rollout", 6, "--rollout-batch-size", 16)
    judged = ("--custom-rm-path", "lively.score", "--gdpo-reward-keys", "digit", "letter", "tokens")
    finished = relax(desk, "train", *SHAPE, *words, *judged, "--eval-samples", 4, "--output", "sft")
    assert (finished.status, finished.err) == (0, "")
    records = lines(desk / "sft" / "metrics.jsonl")
    assert [r["phase"] for r in records] == 6 * ["sft"]
    assert records[-1]["loss"] < records[0]["loss"]
    assert [r["when"] for r in lines(desk / "sft" / "eval.jsonl")] == ["before", "after"]


def test_the_export_answers_like_the_run(desk: Path, base: Path) -> None:
    """Loaded by transformers alone, it gives the same greedy answers to the held-out problems."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "export")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for shown in lines(base / "eval.jsonl")[-1]["samples"][:3]:
        ids = torch.tensor([tokenizer(shown["prompt"], add_special_tokens=False)["input_ids"]])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        text = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=False).removesuffix("<eos>")
        assert text == shown["response"]


def test_eval_and_sample_read_what_a_run_left(desk: Path, base: Path) -> None:
    measured = relax(desk, "eval", "base")
    assert (measured.status, measured.err) == (0, "")
    after = lines(base / "eval.jsonl")[-1]
    assert "8 held-out prompts" in measured.out
    assert f"{after['response/length']:.4f}" in measured.out
    earlier = relax(desk, "eval", "base", "--checkpoint", 3, "--samples", 2)
    assert (earlier.status, earlier.err) == (0, "")
    assert "2 held-out prompts" in earlier.out
    shown = after["samples"][0]
    answered = relax(desk, "sample", "base", shown["prompt"])
    assert (answered.status, answered.err) == (0, "")
    assert answered.out.startswith(shown["prompt"] + shown["response"])
    missing = relax(desk, "eval", "base", "--checkpoint", 4)
    assert missing.status == 1
    assert "no checkpoint of step 4; there are: 2, 3, 5, 7" in missing.err


def test_data_and_reward_of_ones_own_from_the_current_directory(tmp_path: Path) -> None:
    """As the documents tell it: the console command, a file of prompts, a function beside it."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say yes"}\n{"prompt": "say no", "more": [1]}\n')
    (tmp_path / "my_rewards.py").write_text(
        "def score(sample):\n"
        "    words = sample.response.split()\n"
        "    return {'polite': float('e' in sample.response), 'short': -len(words) - len(sample.response) / 9}\n"
    )
    command = [Path(sys.executable).with_name("relax"), "train", "--prompt-data", "prompts.jsonl"]
    words = ("--custom-rm-path", "my_rewards.score", "--reward-key", "polite", "--advantage-estimator", "gdpo")
    more = ("--gdpo-reward-keys", "polite", "short", "--n-samples-per-prompt", 4, "--rollout-batch-size", 3)
    rest = (*SHAPE, "--num-rollout", 2, "--rollout-max-response-len", 6, "--output", "own")
    finished = subprocess.run(
        [*command, *map(str, (*words, *more, *rest))], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    records = lines(tmp_path / "own" / "metrics.jsonl")
    assert [r["samples/trained"] for r in records] == [12, 12]
    assert records[0].keys() >= {"reward/polite", "reward/short"}
    assert "12+34" not in finished.stdout  # not an example of another task
