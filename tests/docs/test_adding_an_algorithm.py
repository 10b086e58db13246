"""What docs/adding-an-algorithm.md says happens, in a copy of the packages that gets its file and its lines."""

import pytest

from relax.report.metrics import read_records
from tests.docs.copied import Copy, blocks

TINY = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--num-query-groups", "1"),
    *("--ffn-hidden-size", "64", "--kv-channels", "16", "--max-position-embeddings", "48"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--micro-batch-size", "8"),
    *("--rollout-max-response-len", "4", "--warm-start-steps", "2", "--warm-start-batch-size", "8"),
    *("--eval-samples", "4", "--num-rollout", "1", "--num-steps-per-rollout", "2"),
)
REWARD = """
def score(sample):
    return {"score": float(sum(map(ord, sample.response)) % 7)}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy.made(tmp_path_factory.mktemp("copy"))


def test_the_commands_print_what_the_page_shows(copy: Copy) -> None:
    shown = [block.removeprefix("$ relax ").partition("\n") for block in blocks("console") if block.startswith("$")]
    assert len(shown) == 2
    for command, _, output in shown:
        done = copy.relax(*command.split())
        assert (done.stdout or done.stderr).strip() == output.strip()


def test_the_snippets_run_and_print_what_the_page_shows(copy: Copy) -> None:
    trial, check = blocks("py")
    (output,) = blocks("text")
    done = copy.python("-c", trial)
    assert (done.stdout, done.stderr) == (output, "")
    assert copy.python("-c", check).returncode == 0
    assert copy.python("-c", check.replace("0.5]", "0.7]")).returncode == 1  # its assertions can fail


def test_it_trains(copy: Copy) -> None:
    (copy.root / "coarse.py").write_text(REWARD)
    train, *_ = (block for block in blocks("console") if block.startswith("relax train"))
    words = train.removeprefix("relax ").split()
    done = copy.relax(*words, *TINY, "--custom-rm-path", "coarse.score", "--dynamic-sampling-filter-path", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [
        record for record in read_records(copy.root / "runs" / "duel" / "metrics.jsonl") if record["phase"] == "rl"
    ]
    assert len(steps) == 2
    assert all(float(str(step["grad_norm"])) > 0 for step in steps)
    assert (copy.root / "runs" / "duel" / "report.html").is_file()
