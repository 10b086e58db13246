"""A short example of an algorithm with relax_core alone, written from what its record declares it reads."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, Final

from relax.catalogue import Entry
from relax.errors import RelaxError
from relax_core import Algorithm
from relax_core.hyperparameters import KlInReward

PRINTING: Final = """\

def rounded(values):
    return [float(f"{value:.3g}") + 0.0 for value in values.tolist()]  # + 0.0, so that -0.0 reads 0.0


print("scores    ", rounded(outcome.scores))
print("advantages", rounded(outcome.advantages))  # of each token
print("gradient  ", rounded(log_probs.grad))
"""
LENGTHS: Final = (1, 2)
"""Tokens of the responses, in turn."""


def example(entry: Entry, algorithm: Algorithm[Any]) -> str:
    """Its code: two prompts, rewards, log-probs, and one call from there to the loss.

    Lines of the entry's own example take the place of those that assign to the same name, or come after them.
    """
    size = max(3, algorithm.traits.min_group_size)
    tokens = sum(LENGTHS[sample % 2] for sample in range(2 * size))
    lines = [
        f"rewards = torch.tensor({_rewards(size, algorithm.traits.reads_components)}",
        f"groups = torch.tensor({[0] * size + [1] * size})  # the prompt that each response answers",
        f"tokens = relax_core.Tokens.full({[LENGTHS[sample % 2] for sample in range(2 * size)]})  # response lengths",
        *_log_probs(tokens, algorithm.traits.on_policy),
    ]
    arguments = ["rewards", "groups", "tokens", "log_probs", *([] if algorithm.traits.on_policy else ["old_log_probs"])]
    bound = f'"{entry.name}"'
    if issubclass(algorithm.hyperparameters, KlInReward):
        lines.append(f"kl = torch.linspace(0.0, 0.2, {tokens})  # of each token, from the reference policy")
        lines.append(f'hyperparameters = get_algorithm("{entry.name}").hyperparameters(kl_coef=0.1)')
        bound += ", hyperparameters"
        arguments.append("kl=kl")
    if algorithm.traits.needs_critic:
        lines.append(f"values = torch.linspace(0.4, 0.6, {tokens})  # the critic's, of each token")
        arguments.append("values=values")
    lines = _replaced(lines, entry.example.splitlines())
    return _around(lines, bound, entry.name, arguments)


def printed(code: str, name: str) -> str:
    """What the code prints. Errors: `RelaxError` that says whose example failed, and what to do."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"example of {name}", "exec"), {"__name__": "example"})
    except Exception as fault:
        raise RelaxError(
            f"the example on {name}'s page does not run: {type(fault).__name__}: {fault}; a section 'Example:' at the "
            "end of the docstring of its module can replace lines, such as 'rewards = torch.tensor(...)'"
        ) from fault
    return output.getvalue()


def _rewards(size: int, components: bool) -> str:
    """In the first group the first response is right, in the second all but the last are."""
    right = [float(sample == 0 or size <= sample < 2 * size - 1) for sample in range(2 * size)]
    rows = [[reward, sample * 2 % 3 / 2] for sample, reward in enumerate(right)] if components else [[r] for r in right]
    return f"{rows})  # right, well-formed" if components else f"{rows})  # [samples, components]"


def _log_probs(tokens: int, on_policy: bool) -> list[str]:
    if on_policy:
        return [f"log_probs = torch.full(({tokens},), -1.0, requires_grad=True)  # the policy that sampled is trained"]
    return [
        f"old_log_probs = torch.full(({tokens},), -1.0)  # of the policy that sampled",
        f"log_probs = torch.linspace(-1.4, -0.6, {tokens}, requires_grad=True)  # of the policy that is trained",
    ]


def _replaced(lines: Sequence[str], own: Sequence[str]) -> list[str]:
    """Each line, or the own one that assigns to the same name; own ones that assign to no such name come after."""
    given = {_assigned(line): line for line in own}
    names = set(map(_assigned, lines))
    after = [line for line in own if _assigned(line) not in names]
    return [*(given.get(_assigned(line), line) for line in lines), *after]


def _assigned(line: str) -> str:
    return line.partition(" = ")[0]


def _around(lines: Sequence[str], bound: str, name: str, arguments: Sequence[str]) -> str:
    imports = ["import torch", "import relax_core", *(["from relax_core import get_algorithm"] if "," in bound else [])]
    return "\n".join(
        [
            *imports,
            "",
            *lines,
            "",
            f"{name} = relax_core.pipeline({bound})",
            f"outcome = {name}({', '.join(arguments)})",
            "outcome.loss.backward()",
            "",
            PRINTING,
        ]
    )
