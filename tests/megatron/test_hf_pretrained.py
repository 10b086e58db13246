"""Checkpoints that transformers made: loaded, computed with, written again, loaded by transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from relax.data.samples import Sequences
from relax.data.tokenizer import character_codec
from relax.errors import RelaxError
from relax.megatron import hf
from relax.megatron.trainer import Trainer
from tests.megatron.checkpoints import CHECKPOINTS, VOCABULARY, edit_config, make, tokenizer, trainer_of
from tests.megatron.test_hf import logits_of

MakeTrainer = Callable[..., Trainer]
TOKENS = torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
EVERY = pytest.mark.parametrize("name", CHECKPOINTS)


def contents(directory: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Precision and bytes of every tensor."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor = opened.get_tensor(name)
                found[name] = tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


@EVERY
@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"])
def test_logits_equal_those_of_transformers(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, max_shard_size: str
) -> None:
    model = make(tmp_path, name, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "30KB")
    trainer = trainer_of(hf.read_pretrained(tmp_path), make_trainer)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(trainer, TOKENS), expected, atol=1e-4, rtol=0)
    sequences = Sequences(((4, 5),), ((6, 7, 8),))
    log_probs = trainer.log_probs(sequences).log_probs
    assert torch.equal(trainer.reference_log_probs(sequences).log_probs, log_probs)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_export_has_the_same_bytes_and_transformers_generates_from_it(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, name, max_shard_size="50KB", dtype=dtype)
    pretrained = hf.read_pretrained(source)
    trainer = trainer_of(pretrained, make_trainer)
    hf.save_pretrained(trainer.model, pretrained.config, target, pretrained.companions, max_shard_size=20_000)
    assert contents(target) == contents(source)
    assert {found for found, _ in contents(target).values()} == {dtype}

    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(contents(source))
    files = sorted(target.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    for path in files:
        held = [name for name, file in index["weight_map"].items() if file == path.name]
        assert len(held) == 1 or path.stat().st_size < 22_000  # the header comes on top
    assert index["metadata"]["total_size"] == sum(len(value) for _, value in contents(source).values())

    before, after = (transformers.AutoModelForCausalLM.from_pretrained(where) for where in (source, target))
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(before.generate(TOKENS, **settings), after.generate(TOKENS, **settings))


@EVERY
def test_an_export_describes_the_same_model(make_trainer: MakeTrainer, tmp_path: Path, name: str) -> None:
    make(tmp_path / "source", name)
    pretrained = hf.read_pretrained(tmp_path / "source")
    trainer = trainer_of(pretrained, make_trainer)
    hf.save_pretrained(trainer.model, pretrained.config, tmp_path / "target", pretrained.companions)
    before, after = (
        transformers.AutoConfig.from_pretrained(tmp_path / where).to_dict() for where in ("source", "target")
    )
    before["head_dim"] = pretrained.config.kv_channels  # Qwen2's configuration need not say it
    del before["_name_or_path"], after["_name_or_path"]
    assert after == before
    kept, written = (tmp_path / where / "generation_config.json" for where in ("source", "target"))
    assert written.read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("name", ["llama", "qwen3-untied", "qwen2"])
def test_configurations_of_older_versions_mean_the_same(tmp_path: Path, name: str) -> None:
    """Before version 5, RoPE's base stood beside its scaling."""
    make(tmp_path, name)
    config = hf.read_pretrained(tmp_path).config
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    base = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    edit_config(
        tmp_path, rope_parameters=None, dtype=None, rope_theta=base, rope_scaling=scaling, torch_dtype="float32"
    )
    assert hf.read_pretrained(tmp_path).config == config


def test_precisions_that_differ_are_written_without_loss(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = make(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "source")
    pretrained = hf.read_pretrained(tmp_path / "source")
    trainer = trainer_of(pretrained, make_trainer)
    hf.save_pretrained(trainer.model, pretrained.config, tmp_path / "target", pretrained.companions)
    read = hf.read_pretrained(tmp_path / "target").weights
    assert read.dtype == torch.float32
    for name, tensor in read.items():
        assert torch.equal(tensor, model.state_dict()[name].float()), name


def test_tokenizer_chat_template_and_generation_settings_survive(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make(source, "qwen2")
    mine = tokenizer()
    mine.save_pretrained(source)
    settings = {"eos_token_id": [1, 2], "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (source / "generation_config.json").write_text(json.dumps(settings))
    pretrained = hf.read_pretrained(source)
    codec = pretrained.codec
    assert codec is not None
    assert codec.end == 1
    trainer = trainer_of(pretrained, make_trainer)
    hf.save_pretrained(trainer.model, pretrained.config, target, pretrained.companions)

    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    loaded = transformers.AutoTokenizer.from_pretrained(target)
    chat = [{"role": "user", "content": " where is the theory? \n"}]
    shown = loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert shown == "<|user|>where is the theory?<|end|>\n<|assistant|>"
    ids = loaded.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids == mine.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert (ids[0], ids[-1]) == (2, 3)
    assert codec.encode(shown) == tuple(ids)
    assert codec.decode(ids) == shown
    generation = transformers.GenerationConfig.from_pretrained(target)
    assert generation.eos_token_id == [1, 2]
    assert generation.temperature == 0.6


def test_an_export_of_a_new_model_is_complete(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Tokenizer, end of sequence and padding are there without a checkpoint that the model came from."""
    codec = character_codec()
    trainer = make_trainer(hf.read_pretrained(_made(tmp_path / "size", "llama")).config)
    hf.save_pretrained(trainer.model, trainer.model_config, tmp_path / "export", hf.Companions.of(codec))
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (codec.end, codec.end)
    assert (model.config.bos_token_id, model.generation_config.pad_token_id) == (None, 0)
    found = hf.read_pretrained(tmp_path / "export")
    assert found.config == trainer.model_config
    assert found.codec is not None
    assert found.codec.encode("12+34=<think>") == codec.encode("12+34=<think>")


def test_an_export_that_cannot_be_written_says_where(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer()
    with pytest.raises(RelaxError, match=rf"{tmp_path}/file/export: cannot be written: .*File exists"):
        hf.save_pretrained(trainer.model, trainer.model_config, tmp_path / "file" / "export")


def test_training_leaves_the_checkpoint_and_the_reference_alone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    pretrained = hf.read_pretrained(tmp_path)
    trainer = trainer_of(pretrained, make_trainer)
    sequences = Sequences(((4, 5), (9,)), ((6, 7, 1), (8, 2)))
    before = trainer.reference_log_probs(sequences).log_probs
    update = trainer.update(sequences, lambda batch: (-batch.log_probs.sum(), {}))
    assert update.grad_norm > 0
    assert (trainer.log_probs(sequences).log_probs.sum() > before.sum()).item()
    assert torch.equal(trainer.reference_log_probs(sequences).log_probs, before)
    trained = hf.export(trainer.model, pretrained.config)
    assert not [name for name, tensor in pretrained.weights.items() if torch.equal(trained[name], tensor)]


def _made(directory: Path, name: str) -> Path:
    make(directory, name)
    return directory


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    larger = tokenizer()
    larger.add_tokens([f"<word {index}>" for index in range(40)])
    larger.save_pretrained(tmp_path)
    with pytest.raises(RelaxError, match=rf"the tokenizer has {len(larger)} tokens, but the model only {VOCABULARY}"):
        hf.read_pretrained(tmp_path)
