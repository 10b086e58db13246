"""What a user has who starts from a model of others: a checkpoint directory, a file of prompts, a reward function."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.megatron.checkpoints import make, tokenizer

REWARD = """
def score(sample):
    return {"score": float(sum(map(ord, sample.response)) % 7)}
"""
QUESTIONS = [f"what is {a} and {b}?" for a in range(3) for b in range(4)]
ENDS = [1, 3]
BRIEF = (
    *("--custom-rm-path", "sums.score", "--reward-key", "score", "--n-samples-per-prompt", 4),
    *("--rollout-batch-size", 4, "--micro-batch-size", 8, "--rollout-max-response-len", 6, "--num-rollout", 2),
    *("--eval-samples", 6, "--eval-interval", 0, "--lr", 1e-3),
)


def outfit(desk: Path, name: str) -> Path:
    """Puts all three into `desk`; the checkpoint is called `name`, also in `tests.megatron.checkpoints`."""
    directory = desk / name
    make(directory, name)
    tokenizer().save_pretrained(directory)
    settings = {"eos_token_id": ENDS, "pad_token_id": 0, "do_sample": True, "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    write_lines(desk / "questions.jsonl", [{"prompt": question} for question in QUESTIONS])
    (desk / "sums.py").write_text(REWARD)
    return directory


def write_lines(path: Path, records: Sequence[object]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def greedy(directory: Path, prompts: Sequence[str], length: int) -> list[str]:
    """What transformers alone has the model in `directory` answer, ends included in neither text nor count."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    codec = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([codec(prompt, add_special_tokens=False)["input_ids"]])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        new = said[0, ids.shape[1] :].tolist()
        answers.append(codec.decode(new[:-1] if new[-1] in ENDS else new))
    return answers
