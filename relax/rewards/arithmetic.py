"""The reward of the `arithmetic` recipe: an ordinary reward function, named by `--custom-rm-path` like a user's own."""

import re

from relax.data.samples import Sample

ANSWER = re.compile(r"<answer>(\d+)</answer>")
BUDGET = 20  # tokens
WELL_FORMED = re.compile(r"(<think>[\d ]+</think>)?<answer>\d+</answer>")
INTEGER = re.compile(r"\d+")


def score(sample: Sample) -> dict[str, float]:
    """Correctness in {0, 1}, format in {0, 0.5, 1} and the tokens saved, 0 to 20: three directions, three scales.

    Short answers count only where they are right (the conditioned reward of arXiv 2601.05242, Eq. 8): tags and working
    cost tokens. `score` is the plain sum, which an algorithm that reads one number trains on.
    """
    correctness = float(answer_of(sample.response) == sample.prompt["answer"])
    form = format_of(sample.response)
    saved = correctness * max(0, BUDGET - len(sample.completion.token_ids))
    return {"correctness": correctness, "format": form, "length": saved, "score": correctness + form + saved}


def answer_of(response: str) -> str | None:
    """The number between the answer tags, else the last number of the response, else nothing."""
    found: list[str] = ANSWER.findall(response) or INTEGER.findall(response)
    return found[-1] if found else None


def format_of(response: str) -> float:
    """1 for an optional working and one tagged answer, 0.5 where the tagged answer has something else around it."""
    if WELL_FORMED.fullmatch(response):
        return 1.0
    return 0.5 if len(ANSWER.findall(response)) == 1 else 0.0
