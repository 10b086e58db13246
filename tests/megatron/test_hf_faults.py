"""What is wrong with a checkpoint is said at once: all of it, by name, with its file."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.errors import RelaxError
from relax.megatron import hf
from relax.megatron.rope import Llama3Scaling
from relax.megatron.trainer import Trainer
from tests.megatron.checkpoints import LLAMA3, VOCABULARY, edit_config, make


def message_of(directory: Path) -> str:
    with pytest.raises(RelaxError) as caught:
        hf.read_pretrained(directory)
    assert str(caught.value).startswith(str(directory))
    return str(caught.value).removeprefix(str(directory))


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrites a file of weights."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def index_of(directory: Path) -> dict[str, str]:
    return dict(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"])


@pytest.mark.parametrize(
    ("name", "changes", "faults"),
    [
        (
            "qwen3",
            {"model_type": "qwen3_moe"},
            ["model_type 'qwen3_moe' is not supported; there are qwen3, qwen2, llama"],
        ),
        ("qwen3", {"model_type": "mistral"}, ["model_type 'mistral' is not supported"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts 8 (only None)"]),
        (
            "llama",
            {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1},
            ["hidden_act 'gelu' (only 'silu')", "attention_bias True", "mlp_bias True", "attention_dropout 0.1"],
        ),
        ("qwen3", {"attention_bias": True}, ["attention_bias True (only False)"]),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
            ["layer_types 'sliding_attention' (only 'full_attention'; sliding_window is 16)"],
        ),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types 'chunked_attention'"]),
        ("llama", {"sliding_window": 16}, ["sliding_window 16 (only None)"]),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config {'quant_method': 'fp8'}"]),
        *(
            (name, {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}, [f"rope_type {kind!r}"])
            for name, kind in (("qwen3", "yarn"), ("qwen2", "dynamic"), ("llama", "mine"))
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor 0.5 (only 1.0)"],
        ),
        ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor (1.0) must be greater"]),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads (4) must be a multiple of num_query_groups (3)"]),
        ("llama", {"hidden_size": "wide"}, ["'hidden_size' expected int, got str"]),
        ("llama", {"num_attention_heads": 0}, ["transformers cannot read it"]),
    ],
)
def test_configurations_that_we_cannot_compute_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, object], faults: list[str]
) -> None:
    make(tmp_path, name)
    edit_config(tmp_path, **changes)
    message = message_of(tmp_path)
    assert message.startswith("/config.json: ")
    for fault in faults:
        assert fault in message


def test_a_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    edit_config(tmp_path, use_sliding_window=False, sliding_window=16, max_window_layers=1, layer_types=None)
    assert hf.read_pretrained(tmp_path).config.architecture == "qwen2"


def test_all_tensors_that_do_not_fit_are_listed_with_their_files(tmp_path: Path) -> None:
    make(tmp_path, "qwen2-untied", max_shard_size="30KB")
    index = index_of(tmp_path)
    up, norm, bias = (
        f"model.layers.1.{name}" for name in ("mlp.up_proj.weight", "input_layernorm.weight", "self_attn.k_proj.bias")
    )
    edit(tmp_path / index[up], lambda tensors: tensors.update({up: torch.zeros(3, 3)}))
    edit(tmp_path / index[norm], lambda tensors: tensors.pop(norm))
    edit(tmp_path / index[bias], lambda tensors: tensors.update({"score.weight": torch.zeros(1)}))
    edit(
        tmp_path / index["lm_head.weight"],
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(VOCABULARY, 32).to(torch.int8)}),
    )
    head, *faults = message_of(tmp_path).splitlines()
    assert head == ": these weights do not fit config.json:"
    assert sorted(faults) == sorted(
        [
            f"{index[bias]}: unexpected score.weight, which model.safetensors.index.json does not name here",
            f"{index['lm_head.weight']}: lm_head.weight has dtype I8, not one of F32, BF16, F16",
            f"{index[norm]}: missing {norm}",
            f"{index[up]}: {up} has shape (3, 3), expected (48, 32)",
        ]
    )


def test_a_configuration_of_another_size_lists_every_tensor(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    edit_config(tmp_path, num_hidden_layers=3, head_dim=10, tie_word_embeddings=False, layer_types=None)
    lines = message_of(tmp_path).splitlines()[1:]
    assert sum(line.startswith("model.safetensors: missing model.layers.2.") for line in lines) == 11
    assert "model.safetensors: missing lm_head.weight" in lines
    assert "model.safetensors: model.layers.0.self_attn.q_norm.weight has shape (12,), expected (10,)" in lines
    assert len(lines) == 11 + 1 + 2 * 6  # q, k, v, o and two norms of each layer


def test_files_that_are_missing_or_cut_short_are_named(tmp_path: Path) -> None:
    make(tmp_path, "llama", max_shard_size="30KB")
    first, second = sorted(set(index_of(tmp_path).values()))[:2]
    (tmp_path / first).unlink()
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-10])
    lines = message_of(tmp_path).splitlines()[1:]
    assert lines[0].startswith(f"{first}: cannot be read")
    assert lines[1].startswith(f"{second}: cannot be read")
    lost = [name for name, file in index_of(tmp_path).items() if file in (first, second)]
    assert sorted(lines[2:]) == sorted(f"{index_of(tmp_path)[name]}: missing {name}" for name in lost)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no index of safetensors files"),
        ('{"weight_map": []}', "is no index of safetensors files"),
        ('{"weight_map": {}}', "names no file"),
        ('{"weight_map": {"model.norm.weight": "../other.safetensors"}}', "'../other.safetensors', which is no name"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, content: str, said: str) -> None:
    make(tmp_path, "llama", max_shard_size="30KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    message = message_of(tmp_path)
    assert message.startswith("/model.safetensors.index.json: ")
    assert said in message


def test_directories_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    assert message_of(tmp_path / "none") == ": no such directory"
    assert message_of(tmp_path).startswith(": holds no config.json")
    make(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert message_of(tmp_path) == (
        ": holds neither model.safetensors nor model.safetensors.index.json; save pytorch_model.bin as safetensors"
    )


def test_frequencies_that_old_versions_saved_are_no_weights(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for layer in range(2)}
    edit(tmp_path / "model.safetensors", lambda tensors: tensors.update(extra))
    assert not extra.keys() & hf.read_pretrained(tmp_path).weights.keys()


def test_a_tied_output_layer_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    path = tmp_path / "model.safetensors"
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    hf.read_pretrained(tmp_path)
    edit(path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(RelaxError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        hf.read_pretrained(tmp_path)


def test_a_trainer_of_another_size_takes_nothing(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    make(tmp_path, "llama")
    pretrained = hf.read_pretrained(tmp_path)
    trainer = make_trainer(attrs.evolve(pretrained.config, num_layers=1))
    before = trainer.model.decoder.final_layernorm.weight.clone()
    with pytest.raises(RelaxError, match=r"model\.safetensors: unexpected model\.layers\.1\.mlp\.down_proj\.weight"):
        trainer.start_from(pretrained.weights)
    assert torch.equal(trainer.model.decoder.final_layernorm.weight, before)


def test_scalings_are_checked() -> None:
    with pytest.raises(ValueError, match="'factor' must be >= 1"):
        Llama3Scaling(0.5, 1.0, 4.0, 16)
