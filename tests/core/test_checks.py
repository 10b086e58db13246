"""Every public function checks the shapes that its annotations promise."""

import inspect
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import relax_core as rc
from relax_core import advantages, corrections, describe, kl, losses, reducers, rewards, signal, vocabulary
from relax_core.checks import checked
from tests.core.ranks import f64

# Looked at where ranks agree, so that one rank's fault raises on every rank.
AGREED = {"whiten_samples", "scale_by_signal", "normalize", "normalized", "whiten", "token_global"}
# Of use to those above only, which have checked by then; and of Python values, whose faults have words of their own.
INNER = {"select", "ratio_of", "nothing", "token_loss", "clip_by_sign", "clipped_surrogate"}
INNER |= {"covariance", "largest", "single_reward", "named_components", "expect_finite"}
VALUES = {"weight_vector", "weights_fault", "group_ids"}


def public() -> Iterator[object]:
    for module in (advantages, corrections, describe, kl, losses, reducers, rewards, signal, vocabulary):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            here = function.__module__ == module.__name__ and not name.startswith("_")
            if here and name not in AGREED | INNER | VALUES:
                yield pytest.param(function, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("function", list(public()))
def test_annotations_are_checked(function: object) -> None:
    parameters = inspect.signature(function).parameters
    with pytest.raises(TypeError, match="Type-check error"):
        function(
            *[object()] * sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()),
            **{name: 1 for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty},
        )


def test_axes_of_one_name_must_agree() -> None:
    with pytest.raises(TypeError):
        rewards.group_mean_std(f64([1, 2, 3]), torch.tensor([0, 0]))
    with pytest.raises(TypeError):
        rc.Advantages(f64([1, 2]), f64([1]))
    with pytest.raises(TypeError):
        rc.TokenLoss(f64([[1.0]]), {})


def test_a_function_runs_once_whatever_its_checks_find() -> None:
    """To explain a fault, only the parameters are looked at again: the function may have met other ranks by then."""
    calls: list[int] = []

    @checked
    def inner(values: Float[Tensor, " n"]) -> None:
        """Called with two axes."""

    @checked
    def outer(values: Float[Tensor, " n"], scale: float = 1.0) -> Float[Tensor, " n"]:
        calls.append(len(values))
        if scale == 2:
            inner(values[None])
        if scale == 3:
            raise ValueError("of its own")
        return values[1:] if scale == 4 else values * scale

    assert outer(f64([1, 2]), 1).tolist() == [1, 2]  # an int is a float
    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameters of .*inner(.|\n)*'values'(.|\n)*f64\[1,2\]"):
        outer(f64([1, 2]), 2)
    with pytest.raises(ValueError, match=r"^of its own$"):
        outer(f64([1, 2]), 3)
    with pytest.raises(jaxtyping.TypeCheckError, match="n is 1 which does not equal the existing value of 2"):
        outer(f64([1, 2]), 4)
    assert len(calls) == 4
    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameters of .*outer(.|\n)*'scale'"):
        outer(f64([1, 2]), "1")
    assert len(calls) == 4
