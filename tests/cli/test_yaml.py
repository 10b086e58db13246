"""Settings from a file: the same names, types and checks as flags, and none can be slipped past them."""

from pathlib import Path

import pytest

from relax.config import ConfigError, configure, resolve
from relax.config.options import Given
from relax.config.yaml_text import dump, read


def faults(path: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        configure(path)
    return caught.value.faults


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_scalars_mean_what_they_look_like(file: Path) -> None:
    file.write_text("a: 1e-6\nb: no\nc: 010\nd: 1:30\ne: 2026-01-01\nf: ~\ng: true\nh: .5\ni: -3\nj: 1.\nk: [1, x]\n")
    values = {given.name: given.value for given in read(file)}
    assert values == {
        "a": 1e-6,
        "b": "no",
        "c": "010",
        "d": "1:30",
        "e": "2026-01-01",
        "f": None,
        "g": True,
        "h": 0.5,
        "i": -3,
        "j": 1.0,
        "k": [1, "x"],
    }


@pytest.mark.parametrize(
    "text", ["no", "1e-6", "0x10", "1_000", "null", "a: b", "# c", " x ", "é\n", "'", "2026-01-01", ""]
)
def test_texts_come_back_as_texts(file: Path, text: str) -> None:
    file.write_text(dump({"name": text, "several": (text, text)}))
    assert [given.value for given in read(file)] == [text, [text, text]]


def test_hyphens_and_underscores_are_one_name(file: Path) -> None:
    file.write_text("n-samples-per-prompt: 4\nlr: 1e-3\n")
    config = configure(file)
    assert (config.n_samples_per_prompt, config.lr) == (4, 1e-3)
    file.write_text("lr: 1\neps-clip: 0.1\neps_clip: 0.2\n")
    (fault,) = faults(file)
    assert "line 3" in fault
    assert "line 2" in fault


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "expected 'name: value' lines"),
        ("lr: [1\n", "not YAML"),
        ("lr: !!python/object:os.system x\n", "could not determine a constructor"),
        ("seed: 1.5\n", "expects a whole number, got 1.5"),
        ("seed: '1'\n", "expects a whole number, got '1'"),
        ("use_tis: 1\n", "expects true or false, got 1"),
        ("gdpo_reward_keys: correctness\n", "expects a list"),
        ("lr: .nan\n", "finite"),
        ("global_batch_size: 7\n", "--global-batch-size 7"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    assert any(said in fault for fault in faults(file))


def test_a_file_that_is_not_there_does_not_hide_other_errors(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(file, lr=-1.0)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [f"--config {file}", "--lr"]


BAD: list[dict[str, object]] = [
    {"n_samples_per_prompt": 1},
    {"normalize_advantages": True},
    {"advantage_estimator": "grpo", "gdpo_reward_keys": ["a", "b"]},
    {"gdpo_reward_weights": [1.0]},
    {"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True},
    {"fully_async": True, "colocate": True},
    {"tis_clip": 3.0},
    {"disable_rewards_normalization": True},
    {"num_query_groups": 3},
]


@pytest.mark.parametrize("values", BAD)
def test_a_file_passes_the_same_checks_as_flags(file: Path, values: dict[str, object]) -> None:
    file.write_text(dump(values))
    from_file = faults(file)
    with pytest.raises(ConfigError) as caught:
        resolve([Given(name, value, name) for name, value in values.items()])
    assert caught.value.faults == from_file


def test_a_run_can_be_configured_again_and_changed(file: Path) -> None:
    first = configure(seed=3, output=file.parent / "run")
    file.write_text(first.to_yaml())
    assert configure(file, output=file.parent / "run") == first
    assert configure(file, rollout_batch_size=4).global_batch_size == 32
