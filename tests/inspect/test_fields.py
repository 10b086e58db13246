"""Fields are told from names and first rows, or chosen; what cannot be told is an error that says so."""

import pytest

from relax.errors import ConfigError
from relax.inspect.fields import Choice, Fields, find

NOTHING = Choice()


def test_a_mapping_of_rewards() -> None:
    rows = [{"group_id": 1, "rewards": None}, {"group_id": 1, "rewards": {"right": 1, "why": "text"}, "log_probs": []}]
    found = find(rows, NOTHING)
    assert found == Fields("", (("group_id",),), {"right": ("rewards", "right")}, log_probs=("log_probs",))


def test_columns_of_rewards() -> None:
    found = find([{"prompt": "p", "reward_a": 1, "b_reward": 0.5, "reward_note": "x", "response_length": 3}], NOTHING)
    assert found.group == (("prompt",),)
    assert found.components == {"reward_a": ("reward_a",), "b_reward": ("b_reward",)}
    assert found.length == ("response_length",)


def test_trl() -> None:
    row = {"step": "10", "prompt": "p", "completion": "c", "len_reward": 0.5, "fmt": 1.0, "advantage": 0.1, "note": "n"}
    found = find([row], NOTHING)
    assert (found.source, found.group) == ("TRL", (("step",), ("prompt",)))
    assert list(found.components) == ["len_reward", "fmt"]
    assert found.scalar is None


def test_verl() -> None:
    row = {"input": "i", "output": "o", "gts": 3, "score": 1.0, "step": 2, "acc": True, "fmt": 0.5, "brief": 1}
    found = find([row], NOTHING)
    assert (found.source, found.group) == ("verl", (("step",), ("input",)))
    assert list(found.components) == ["fmt", "brief"]
    assert found.scalar == ("score",)
    assert found.left_out == ("acc (true or false, not a number)",)
    assert list(found.numbers) == ["fmt", "brief", "score"]


def test_verl_with_a_score_only() -> None:
    found = find([{"input": "i", "output": "o", "score": 1.0, "step": 2}], NOTHING)
    assert found.components == {"score": ("score",)}
    assert found.scalar is None


def test_what_the_user_says() -> None:
    rows = [{"q": 1, "n": 2, "m": {"a": 1.0, "b": 2.0, "c": 3}, "a.b": 1, "total": 4, "tokens": 9}]
    choice = Choice(("q", "n"), ("m.a", "a.b"), reward_key="total", length="tokens")
    assert find(rows, choice) == Fields(
        "", (("q",), ("n",)), {"a": ("m", "a"), "a.b": ("a.b",)}, ("total",), ("tokens",)
    )
    assert list(find(rows, Choice(("q",), ("m",))).components) == ["a", "b", "c"]


def test_equal_keys_of_two_mappings_keep_their_whole_names() -> None:
    found = find([{"group": 1, "x": {"a": 1}, "y": {"a": 1, "b": 1}}], Choice(rewards=("x", "y")))
    assert list(found.components) == ["x.a", "y.a", "b"]


@pytest.mark.parametrize(
    ("choice", "messages"),
    [
        (
            Choice(("gruop",), ("m.aa",)),
            ["--group gruop: no such field among group, m; did you mean group?",
             "--rewards m.aa: no such field among group, m, m.a; did you mean m.a?"],
        ),
        (Choice(rewards=("m",), length="x"), ["--length x: no such field among group, m"]),
        (NOTHING, ["no field holds rewards among group, m; choose them with --rewards"]),
    ],
)  # fmt: skip
def test_what_cannot_be_told(choice: Choice, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find([{"group": 1, "m": {"a": 1}}] if choice != NOTHING else [{"group": 1, "m": 2}], choice)
    assert list(caught.value.faults) == messages


def test_no_group() -> None:
    with pytest.raises(ConfigError, match="no field names the group of a row among reward; choose it with --group"):
        find([{"reward": 1}], NOTHING)
