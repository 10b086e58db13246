"""The commands of docs/train-your-own-model.md, on a small checkpoint, in a directory with the page's own files."""

import re
import shlex
from pathlib import Path

from tests.docs.copied import FENCED, ROOT
from tests.megatron.checkpoints import edit_config, make, tokenizer
from tests.runtime.launch import lines, relax

PAGE = (ROOT / "docs" / "train-your-own-model.md").read_text(encoding="utf-8")
# Flags that come last win: the page's settings in a few steps.
SMALL = ("--rollout-max-response-len", 6, "--rollout-batch-size", 2, "--num-rollout", 2)


def blocks(language: str) -> list[str]:
    return [code for found, code in FENCED.findall(PAGE) if found == language]


def test_its_commands_do_what_it_says(tmp_path: Path) -> None:
    make(tmp_path / "Qwen3-0.6B", "qwen3")
    edit_config(tmp_path / "Qwen3-0.6B", max_position_embeddings=2048)
    tokenizer().save_pretrained(tmp_path / "Qwen3-0.6B")
    (data,) = blocks("json")
    (reward,) = blocks("python")
    (tmp_path / "questions.jsonl").write_text(data)
    (tmp_path / "my_rewards.py").write_text(reward)
    for command in re.sub(r"\\\n", " ", "".join(blocks("console"))).splitlines():
        program, *words = shlex.split(command)
        assert program == "relax"
        finished = relax(tmp_path, *words, *(SMALL if words[0] == "train" else ()))
        assert (finished.status, finished.err) == (0, ""), command
        if words[0] == "sample":
            assert finished.out.startswith("What is 5 + 6?\n")
    for run in ("mine", "further"):
        records = lines(tmp_path / "runs" / run / "metrics.jsonl")
        assert [(record["phase"], record["samples/trained"]) for record in records] == 2 * [("rl", 16)]
        assert (tmp_path / "runs" / run / "export" / "chat_template.jinja").is_file()
