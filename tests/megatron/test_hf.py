from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
import transformers

from relax.errors import RelaxError
from relax.megatron import hf
from relax.megatron.model import ModelConfig
from relax.megatron.rope import LinearScaling
from relax.megatron.trainer import Trainer
from tests.megatron.conftest import MODEL, MODELS, VOCABULARY
from tests.megatron.reference import transformers_model

MakeTrainer = Callable[..., Trainer]
SHAPES = pytest.mark.parametrize(
    "config",
    [
        MODEL,
        attrs.evolve(MODEL, tie_embeddings=False),
        attrs.evolve(MODEL, num_query_groups=4, rotary_base=1e6),
        attrs.evolve(MODEL, num_query_groups=1, norm_epsilon=1e-2),
        MODELS["qwen2"],
        attrs.evolve(MODELS["qwen2"], tie_embeddings=False, rope_scaling=LinearScaling(3.0)),
        MODELS["llama"],
        attrs.evolve(MODELS["llama"], tie_embeddings=True, kv_channels=20, rope_scaling=None),
    ],
    ids=["tied", "untied", "one query a group", "one group", "qwen2", "untied qwen2", "llama", "tied llama"],
)


def logits_of(trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = trainer.model(tokens, torch.arange(tokens.shape[1])[None], None)
    return logits


@SHAPES
def test_logits_equal_those_of_transformers(make_trainer: MakeTrainer, config: ModelConfig) -> None:
    trainer = make_trainer(config)
    tokens = torch.randint(0, VOCABULARY, (3, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = transformers_model(trainer)(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(trainer, tokens), expected, atol=1e-4, rtol=0)


@SHAPES
def test_weights_of_transformers_load_and_come_back_the_same(make_trainer: MakeTrainer, config: ModelConfig) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(hf.hf_config(config))
    trainer = make_trainer(config)
    hf.load(trainer.model, config, theirs.state_dict())
    exported = hf.export(trainer.model, config)
    assert exported.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(exported[name], parameter), name
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(logits_of(trainer, tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_weights_that_do_not_fit_are_all_listed_and_change_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    state = {name: tensor.clone() for name, tensor in hf.export(trainer.model, MODEL).items()}
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    state["model.layers.7.mlp.up_proj.weight"] = state.pop("model.norm.weight") * 0
    before = trainer.model.decoder.layers[1].mlp.linear_fc1.weight.clone()
    with pytest.raises(RelaxError) as caught:
        hf.load(trainer.model, MODEL, state)
    for part in (
        "missing model.norm.weight",
        "unexpected model.layers.7.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight has shape (3, 3), expected (48, 32)",
    ):
        assert part in str(caught.value)
    assert torch.equal(trainer.model.decoder.layers[1].mlp.linear_fc1.weight, before)


def test_an_output_layer_that_contradicts_tying_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    state = hf.export(trainer.model, MODEL)
    hf.load(trainer.model, MODEL, {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    with pytest.raises(RelaxError, match=r"lm_head\.weight differs"):
        hf.load(trainer.model, MODEL, {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1})


def test_transformers_loads_an_export_and_generates_from_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    target = tmp_path / "export"
    for _ in range(2):  # a second export replaces the first
        hf.save_pretrained(trainer.model, MODEL, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, logits_of(trainer, tokens), atol=1e-4, rtol=0)
    assert model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 7)
