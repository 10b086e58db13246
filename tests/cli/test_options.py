"""What settings accept, as text and as values."""

from pathlib import Path
from typing import Literal

import pytest

from relax.config.options import Kind


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "-3", -3),
        (float, "1e-6", 1e-6),
        (float, "2", 2.0),
        (str, "none", "none"),
        (str | None, "none", None),
        (float | None, "none", None),
        (Path | None, "a/b", Path("a/b")),
        (tuple[float, ...], ["1", "-2e-1"], (1.0, -0.2)),
        (tuple[str, ...], ["a"], ("a",)),
        (Literal["a", "b"], "b", "b"),
    ],
)
def test_text_is_read_by_type(annotation: object, text: str | list[str], value: object) -> None:
    read = Kind.of(annotation).read(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [(int, "1.0"), (int, "1e3"), (int, ""), (float, "x"), (float, "nan"), (float, "inf"), (Literal["a", "b"], "c")],
)
def test_text_that_does_not_fit_is_refused_by_name(annotation: object, text: str) -> None:
    with pytest.raises(ValueError, match="expects") as caught:
        Kind.of(annotation).read(text)
    assert repr(text) in str(caught.value) or text in ("nan", "inf")


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, "1"),
        (float, True),
        (float, "1.0"),
        (float, float("nan")),
        (bool, 1),
        (bool, "true"),
        (str, 1),
        (str, None),
        (Path, ""),
        (tuple[str, ...], "abc"),
        (tuple[str, ...], ["a", 1]),
    ],
)
def test_a_value_of_another_type_is_refused(annotation: object, value: object) -> None:
    with pytest.raises(ValueError, match="expects"):
        Kind.of(annotation).conform(value)


def test_a_whole_number_is_a_number() -> None:
    conformed = Kind.of(float).conform(3)
    assert conformed == 3.0
    assert type(conformed) is float


def test_a_type_that_no_setting_can_have() -> None:
    with pytest.raises(TypeError, match="dict"):
        Kind.of(dict[str, int])
