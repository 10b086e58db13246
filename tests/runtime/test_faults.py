"""Bad input: one clear line that names what is wrong, and never a half-made run."""

import errno
import json
from functools import partial
from pathlib import Path

import pytest

from tests.runtime.conftest import GDPO, SHAPE
from tests.runtime.launch import Finished, lines, relax

OWN = (*SHAPE, "--num-rollout", 2, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--eval-interval", 0)
SCORED = ("--custom-rm-path", "lively.score", "--reward-key", "digit", "--rollout-max-response-len", 4)


def assert_one_line(finished: Finished, status: int, *parts: str) -> None:
    """One line of error that holds all of `parts`."""
    assert finished.status == status, finished
    errors = [line for line in finished.err.splitlines() if ": error: " in line]
    assert len(errors) == 1, finished.err
    assert "Traceback" not in finished.err
    for part in parts:
        assert part in errors[0]


PROMPTS = {
    "empty": ("", "holds no records"),
    "blank lines": ("\n \n", "holds no records"),
    "not JSON": ('{"prompt": "1+1="}\n{"prompt": \n', "line 2: not JSON"),
    "no object": ('["1+1="]\n', "line 1: expected a JSON object"),
    "another key": (
        '{"prompt": "1+1="}\n\n{"question": "1"}\n',
        "line 3: has no key 'prompt'; its keys are ['question']",
    ),
    "a number": ('{"prompt": 3}\n', "line 1: 'prompt' must be a non-empty text, got 3"),
    "an empty prompt": ('{"prompt": ""}\n', "line 1: 'prompt' must be a non-empty text"),
    "too long": (json.dumps({"prompt": 100 * "1"}), "has 100 tokens"),
    "not in the vocabulary": ('{"prompt": "größer"}\n', "cannot represent 'größer'"),
    "half a surrogate": ('{"prompt": "\\ud800"}\n', "cannot represent"),
}


@pytest.mark.parametrize(("text", "part"), PROMPTS.values(), ids=PROMPTS)
def test_broken_prompts_leave_no_run(desk: Path, text: str, part: str) -> None:
    (desk / "broken.jsonl").write_text(text, encoding="utf-8")
    finished = relax(desk, "train", "--prompt-data", "broken.jsonl", *OWN, *SCORED, "--output", "never")
    assert_one_line(finished, 1, part)
    assert not (desk / "never").exists()


def test_prompts_that_are_not_utf_8(desk: Path) -> None:
    (desk / "latin.jsonl").write_bytes(b'{"prompt": "gr\xf6sser"}\n')
    finished = relax(desk, "train", "--prompt-data", "latin.jsonl", *OWN, *SCORED, "--output", "never")
    assert_one_line(finished, 1, "latin.jsonl: cannot be read as UTF-8 text")
    assert not (desk / "never").exists()


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (("--prompt-data", "missing.jsonl", *SCORED), 2, "--prompt-data missing.jsonl: no such file"),
        (("--custom-rm-path", "missing.score"), 1, "--custom-rm-path missing.score"),
        (("--custom-rm-path", "lively.scores"), 1, "has no 'scores'"),
        (("--output", "own.jsonl/x"), 1, "own.jsonl/x: cannot be made: Not a directory"),
        (("--seed", 2**63), 2, "--seed: must be below"),
        (("--lr-warmup-fraction", 1), 2, "--lr-warmup-fraction: must be below 1, got 1.0"),
        (("--rollout-batch-size", 4, "--num-steps-per-rollout", 8), 2, "more than the 4 groups"),
        (("--rollout-batch-sise", 3), 2, "did you mean --rollout-batch-size?"),
        (("--advantage-estimator", "gdop"), 2, "did you mean gdpo?"),
    ],
)
def test_wrong_words_start_nothing(desk: Path, words: tuple[object, ...], status: int, part: str) -> None:
    (desk / "own.jsonl").write_text('{"prompt": "1+1="}\n')
    finished = relax(desk, "train", "--output", "never", *words)
    assert_one_line(finished, status, part)
    assert not (desk / "never").exists()


REWARDS = {
    "raises": ("raise RuntimeError('no judge today')", "RuntimeError: no judge today (odd_raises.py, line 2)"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "nothing": ("return None", "returned None, expected a mapping"),
    "number": ("return 1.0", "returned 1.0, expected a mapping"),
    "key": ("return {'other': 1.0}", "no key 'digit'"),
    "bool": ("return {'digit': True}", "'digit'"),
    "text": ("return {'digit': '1'}", "'digit'"),
    "none": ("return {'digit': None}", "'digit'"),
    "nan": ("return {'digit': float('nan')}", "nan"),
    "huge": ("return {'digit': 1e300}", "1e+300"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_broken_rewards_are_named(desk: Path, name: str) -> None:
    body, part = REWARDS[name]
    (desk / f"odd_{name}.py").write_text(f"def score(sample):\n    {body}\n")
    (desk / "own.jsonl").write_text('{"prompt": "1+1="}\n')
    path = f"odd_{name}.score"
    words = ("--custom-rm-path", path, "--reward-key", "digit", "--rollout-max-response-len", 4)
    finished = relax(desk, "train", "--prompt-data", "own.jsonl", *OWN, *words, "--output", f"odd-{name}")
    assert_one_line(finished, 1, f"--custom-rm-path {path}", "group 0", "'1+1='", part)


def full_disk_at(step: int) -> None:
    """Let the disk be full when the checkpoint of `step` is written."""
    from relax.megatron.checkpoint_part import Part

    original = Part.write

    def write(self: Part) -> None:
        if f"step-{step:08d}" in str(self.directory):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self)

    Part.write = write


def test_a_full_disk_leaves_the_checkpoints_before(desk: Path, base: Path) -> None:
    finished = relax(desk, "train", *GDPO, "--output", "full", prepare=partial(full_disk_at, 5))
    assert_one_line(finished, 1, "step-00000005", "No space left on device")
    kept = sorted(path.name for path in (desk / "full" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]
    resumed = relax(desk, "train", "--resume", "full")
    assert (resumed.status, resumed.err) == (0, "")
    ours, theirs = (lines(run / "eval.jsonl") for run in (desk / "full", base))
    assert ours == theirs


def test_a_full_disk_behind_the_training_is_told_at_the_next_checkpoint(desk: Path, base: Path) -> None:
    words = ("--async-save", "--output", "full-behind")
    finished = relax(desk, "train", *GDPO, *words, prepare=partial(full_disk_at, 5))
    assert_one_line(finished, 1, "step-00000005", "No space left on device")
    assert len(lines(desk / "full-behind" / "metrics.jsonl")) == 7
    kept = sorted(path.name for path in (desk / "full-behind" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]


def test_a_full_disk_behind_the_training_is_told_at_the_end(desk: Path, base: Path) -> None:
    words = ("--async-save", "--output", "full-at-last")
    finished = relax(desk, "train", *GDPO, *words, prepare=partial(full_disk_at, 7))
    assert_one_line(finished, 1, "step-00000007", "No space left on device")
    assert not (desk / "full-at-last" / "export").exists()
    assert relax(desk, "train", "--resume", "full-at-last").status == 0


def test_a_filter_that_drops_everything_ends_the_run(desk: Path) -> None:
    (desk / "strict.py").write_text("def keep(group):\n    return False\n")
    words = ("--dynamic-sampling-filter-path", "strict.keep", "--max-resampling", 0, "--num-rollout", 50)
    finished = relax(desk, "train", *GDPO, *words, "--warm-start-steps", 0, "--eval-interval", 0, "--output", "dropped")
    assert_one_line(finished, 1, "every group of 10 rollouts in a row was dropped (in the last: 4 filter)")


def test_a_filter_must_answer_yes_or_no(desk: Path) -> None:
    (desk / "vague.py").write_text("def keep(group):\n    return 1\n")
    finished = relax(desk, "train", *GDPO, "--dynamic-sampling-filter-path", "vague.keep", "--warm-start-steps", 0)
    assert_one_line(finished, 1, "--dynamic-sampling-filter-path vague.keep, group 0: returned 1, expected True")


def test_no_evaluation_of_nothing(desk: Path, base: Path) -> None:
    assert_one_line(relax(desk, "eval", "base", "--samples", 0), 2, "--samples 0: must be at least 1")


def test_what_is_no_run_cannot_be_resumed(desk: Path) -> None:
    (desk / "empty").mkdir()
    assert_one_line(relax(desk, "train", "--resume", "empty"), 1, "empty: not the directory of a run")


def test_the_last_checkpoint_of_a_run_is_needed_to_sample(desk: Path, base: Path) -> None:
    (desk / "bare").mkdir()
    (desk / "bare" / "config.yaml").write_text((base / "config.yaml").read_text())
    assert_one_line(relax(desk, "sample", "bare", "1+1="), 1, "holds no checkpoint yet")
