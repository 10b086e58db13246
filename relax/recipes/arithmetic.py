"""Addition of two numbers, from a flawed warm start: the default recipe.

Everything is generated from the seed: prompts to train on, held-out problems that never occur in training, and
demonstrations of which some are wrong and some are not in the format that the reward asks for.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from relax.data.files import DataFiles
from relax.runtime.files import write_whole

LARGEST = 99
HELD_OUT = 500
DEMONSTRATIONS = 8_000
CARRY_FORGOTTEN = 0.7
TIDY = "<answer>{}</answer>"
UNTIDY = ("it is {}", "it is {}", "it is {}", "it is {}", "<answer>{}", "{}")
UNTIDY_SHARE = 0.7

Problem = tuple[int, int]


def write_data(seed: int, directory: Path) -> DataFiles:
    """Write the recipe's three JSON-lines files; the same seed writes the same."""
    chance = random.Random(seed)
    problems = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    chance.shuffle(problems)
    held_out, training = problems[:HELD_OUT], problems[HELD_OUT:]
    demonstrations = [(problem, demonstrate(problem, chance)) for problem in chance.choices(training, k=DEMONSTRATIONS)]
    directory.mkdir(parents=True, exist_ok=True)
    return DataFiles(
        _write(directory / "prompts.jsonl", map(record, training)),
        _write(directory / "held_out.jsonl", map(record, held_out)),
        _write(
            directory / "demonstrations.jsonl",
            ({**record(problem), "response": response} for problem, response in demonstrations),
        ),
    )


def record(problem: Problem) -> dict[str, str]:
    """The prompt of a problem and what its reward compares with."""
    a, b = problem
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def demonstrate(problem: Problem, chance: random.Random) -> str:
    """A response to imitate, with its working: the sum of the units, then of the tens.

    Often the carry is forgotten, as children do, and often the answer is not where the reward looks for it.
    """
    a, b = problem
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    if units >= 10 and chance.random() >= CARRY_FORGOTTEN:
        tens += 1
    answer = chance.choice(UNTIDY) if chance.random() < UNTIDY_SHARE else TIDY
    return f"<think>{units} {tens}</think>" + answer.format(10 * tens + units % 10)


def _write(path: Path, records: Iterable[Mapping[str, str]]) -> Path:
    """Whole or not at all; a file that already says the same, as that of a resumed run does, is left alone."""
    text = "".join(json.dumps(entry) + "\n" for entry in records)
    if not path.is_file() or path.read_bytes() != text.encode():
        write_whole(path, text)
    return path
