"""Addition of two numbers, from a flawed warm start: the default recipe.

Everything is generated from the seed: prompts to train on, held-out problems that never occur in training, and
demonstrations of which some are wrong and some are not in the format that the reward asks for.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

LARGEST = 99
HELD_OUT = 500
DEMONSTRATIONS = 8_000
WRONG = 0.3
UNFORMATTED = 0.5
WORKED = 0.5

Problem = tuple[int, int]


def write_data(seed: int, directory: Path) -> Mapping[str, Path]:
    """Write the recipe's three JSON-lines files and return the configuration fields that name them."""
    chance = random.Random(seed)
    problems = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    chance.shuffle(problems)
    held_out, training = problems[:HELD_OUT], problems[HELD_OUT:]
    demonstrations = [(problem, demonstrate(problem, chance)) for problem in chance.choices(training, k=DEMONSTRATIONS)]
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: directory / f"{name}.jsonl" for name in ("prompt_data", "eval_prompt_data", "sft_data")}
    _write(files["prompt_data"], map(record, training))
    _write(files["eval_prompt_data"], map(record, held_out))
    _write(files["sft_data"], ({**record(problem), "response": response} for problem, response in demonstrations))
    return files


def record(problem: Problem) -> dict[str, str]:
    """The prompt of a problem and what its reward compares with."""
    a, b = problem
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def demonstrate(problem: Problem, chance: random.Random) -> str:
    """A response to imitate: often right and tidy, often not."""
    a, b = problem
    total = a + b
    if chance.random() < WRONG:
        total = max(0, total + chance.choice((-20, -10, -2, -1, 1, 2, 10, 20)))
    working = f"<think>{a % 10 + b % 10} {total // 10}</think>" if chance.random() < WORKED else ""
    if chance.random() >= UNFORMATTED:
        return f"{working}<answer>{total}</answer>"
    return working + chance.choice((f"{total}", f"it is {total}", f"<answer>{total}", f"<answer>{total}</answer> ok?"))


def _write(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records), encoding="utf-8")
