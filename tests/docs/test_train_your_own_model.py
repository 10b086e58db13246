"""The commands of docs/train-your-own-model.md, on a small checkpoint, in a directory with the page's own files."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.docs.copied import FENCED, ROOT
from tests.megatron.checkpoints import edit_config, make, tokenizer
from tests.runtime.launch import lines, relax

PAGE = (ROOT / "docs" / "train-your-own-model.md").read_text(encoding="utf-8")
# Flags that come last win: the page's settings in a few steps.
SMALL = ("--rollout-max-response-len", 6, "--rollout-batch-size", 2, "--num-rollout", 2)


def blocks(language: str) -> list[str]:
    return [code for found, code in FENCED.findall(PAGE) if found == language]


def commands(program: str) -> list[list[str]]:
    """The page's commands of this program: their words, without its name."""
    found = list(map(shlex.split, re.sub(r"\\\n", " ", "".join(blocks("console"))).splitlines()))
    assert {name for name, *_ in found} == {"relax", "torchrun"}
    return [words for name, *words in found if name == program]


def test_its_commands_do_what_it_says(tmp_path: Path) -> None:
    make(tmp_path / "Qwen3-0.6B", "qwen3")
    edit_config(tmp_path / "Qwen3-0.6B", max_position_embeddings=2048)
    tokenizer().save_pretrained(tmp_path / "Qwen3-0.6B")
    (data,) = blocks("json")
    (reward,) = blocks("python")
    (tmp_path / "questions.jsonl").write_text(data)
    (tmp_path / "my_rewards.py").write_text(reward)
    for words in commands("relax"):
        finished = relax(tmp_path, *words, *(SMALL if words[0] == "train" else ()))
        assert (finished.status, finished.err) == (0, ""), words
        if words[0] == "sample":
            assert finished.out.startswith("What is 5 + 6?\n")
    for run in ("mine", "further"):
        records = lines(tmp_path / "runs" / run / "metrics.jsonl")
        assert [(record["phase"], record["samples/trained"]) for record in records] == 2 * [("rl", 16)]
        assert (tmp_path / "runs" / run / "export" / "chat_template.jinja").is_file()


def test_torchrun_trains_on_the_layout_it_says(tmp_path: Path) -> None:
    (words,) = commands("torchrun")
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    brief = ("--warm-start-steps", "2", "--rollout-batch-size", "2", "--num-rollout", "1", "--eval-samples", "5")
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 240}
    finished = subprocess.run([programs / "torchrun", *words, *brief], **options, check=False)
    assert finished.returncode == 0, finished
    assert finished.stdout.count("Report:") == 1
    steps = lines(tmp_path / "runs" / "four" / "metrics.jsonl")
    assert [record["phase"] for record in steps] == ["sft", "sft", "rl"]
    assert steps[-1]["samples/generated"] == steps[-1]["samples/filtered"] + steps[-1]["samples/trained"] > 0
