"""Functions of the user's own: found by name, called with care, and named when they are at fault."""

import sys
from pathlib import Path

import numpy as np
import pytest

from relax.data.samples import Sample
from relax.errors import RelaxError
from relax.importing import import_function
from relax.rewards.loader import RewardFunction
from tests.runtime.scripted import sample

MODULE = """
anonymous = lambda sample: {}
number = 3
def score(sample):
    return {"a": 1.0}
def make():
    def inner(sample):
        return {}
    return inner
closure = make()
class Judge:
    def score(self, sample):
        return {}
class Bound:
    def __reduce__(self):
        raise TypeError("cannot be copied")
    def __call__(self, sample):
        return {}
bound = Bound()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "their_module.py").write_text(MODULE)
    (tmp_path / "their_broken_module.py").write_text("import nothing_of_this_name")
    yield tmp_path
    for name in ("their_module", "their_broken_module"):
        sys.modules.pop(name, None)


def test_a_function_beside_the_user_is_found(here: Path) -> None:
    assert import_function("their_module.score", "--flag")(None) == {"a": 1.0}


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("score", "expected module.function"),
        ("their_missing_module.score", "importing their_missing_module failed: ModuleNotFoundError"),
        ("their_broken_module.score", "No module named 'nothing_of_this_name'"),
        ("their_module.scores", "has no 'scores'"),
        ("their_module.number", "is a int, not a function"),
        ("their_module.anonymous", "could not import it by name"),
        ("their_module.closure", "could not import it by name"),
        ("their_module.bound", "could not import it by name"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(here: Path, path: str, fault: str) -> None:
    with pytest.raises(RelaxError) as raised:
        import_function(path, "--custom-rm-path")
    assert str(raised.value).startswith(f"--custom-rm-path {path}: ")
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    "value", [True, "1", None, [1.0], float("nan"), float("inf"), 1e300, -1e300, np.bool_(True), 10**400]
)
def test_a_reward_is_a_real_finite_number(value: object) -> None:
    samples = [sample(3, None), sample(4, None)]
    function = RewardFunction(
        "their.score", lambda s: {"good": 1.0, "bad": value if s.group == 4 else 0.0}, ("good", "bad")
    )
    with pytest.raises(RelaxError) as raised:
        function.score(samples)
    for part in ("--custom-rm-path their.score", "group 4", "prompt 'prompt 4'", "response 'xx'", "'bad'"):
        assert part in str(raised.value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(3), -3.4e38])
def test_python_and_numpy_numbers_are_rewards(value: object) -> None:
    (scored,) = RewardFunction("their.score", lambda s: {"a": value, "note": "free"}, ("a",)).score([sample(0)])
    assert scored.rewards == {"a": value, "note": "free"}


def test_each_sample_keeps_its_own_rewards_although_the_mapping_is_one() -> None:
    shared: dict[str, float] = {}

    def score(asked: Sample) -> dict[str, float]:
        shared["a"] = float(asked.group)
        return shared

    scored = RewardFunction("their.score", score, ("a",)).score([sample(1), sample(2)])
    assert [s.rewards for s in scored] == [{"a": 1.0}, {"a": 2.0}]


@pytest.mark.parametrize("value", [None, 1.0, [("a", 1.0)], "a"])
def test_a_reward_is_a_mapping(value: object) -> None:
    function = RewardFunction("their.score", lambda s: value, ("a",))

    def rewarded() -> None:
        function.expect_any(function.of_groups([(sample(0),)]))

    with pytest.raises(RelaxError, match="expected a mapping with the keys"):
        rewarded()


def test_an_exception_is_told_with_its_place() -> None:
    def fails(asked: object) -> dict[str, float]:
        raise KeyError("answer")

    with pytest.raises(
        RelaxError, match=r"their.score, group 9, .*KeyError: 'answer' \(test_user_functions.py, line \d+\)"
    ):
        RewardFunction("their.score", fails, ("a",)).score([sample(9)])
