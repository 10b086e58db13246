"""A checkpoint decides the sizes; what is given beside it must agree."""

from collections.abc import Callable
from pathlib import Path

import pytest

from relax.config import Config, ConfigError, checkpoint, configure
from tests.megatron.checkpoints import make

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "kv_channels": 12,
    "max_position_embeddings": 64,
    "rotary_base": 10000.0,
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    make(directory, "qwen3")
    return directory


@pytest.fixture
def chosen(own_data: dict[str, object], qwen3: Path) -> Callable[..., Config]:
    def call(**values: object) -> Config:
        return configure(**{**own_data, "hf_checkpoint": qwen3, "rollout_max_response_len": 8, **values})

    return call


def test_sizes_are_the_checkpoints(chosen: Callable[..., Config]) -> None:
    config = chosen()
    assert {name: getattr(config, name) for name in checkpoint.SIZES} == SIZES
    assert chosen(**SIZES) == config


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_contradicts_is_refused_with_both_values(
    chosen: Callable[..., Config], qwen3: Path, name: str
) -> None:
    given = 2 * SIZES[name]
    with pytest.raises(ConfigError) as caught:
        chosen(**{name: given})
    (fault,) = caught.value.faults
    flag = f"--{name.replace('_', '-')}"
    assert fault == f"{flag} {given}: contradicts --hf-checkpoint {qwen3}, which has {SIZES[name]:g}; leave it out"


def test_a_file_may_not_contradict_it_either(chosen: Callable[..., Config], tmp_path: Path, qwen3: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"hf_checkpoint: {qwen3}\nrollout_max_response_len: 8\nhidden_size: 64\n")
    with pytest.raises(ConfigError, match=r"c\.yaml, line 3\) 64: contradicts .*, which has 32"):
        configure(file)


def test_sequences_may_be_shorter_than_the_model_can_read(chosen: Callable[..., Config]) -> None:
    assert chosen(max_position_embeddings=20).max_position_embeddings == 20
    with pytest.raises(ConfigError, match="--rollout-max-response-len 8: leaves no room"):
        chosen(max_position_embeddings=8)


def test_no_warm_start_unless_it_is_asked_for(qwen3: Path) -> None:
    assert configure().warm_start_steps == 500
    assert configure(hf_checkpoint=qwen3).warm_start_steps == 0
    assert configure(hf_checkpoint=qwen3, warm_start_steps=9).warm_start_steps == 9


def test_a_checkpoint_that_is_none_is_one_fault_among_all(chosen: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(hf_checkpoint=tmp_path / "nowhere", max_position_embeddings=4, lr=-1.0)
    assert sorted(caught.value.faults) == [
        f"--hf-checkpoint: {tmp_path}/nowhere: no such directory",
        "--lr: must be at least 0, got -1.0",
    ]
