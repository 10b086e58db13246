"""What Transformer Engine's modules are handed, told by stand-ins that keep to its documentation; and its refusals."""

from contextlib import nullcontext
from pathlib import Path

import attrs
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from relax.config import configure
from relax.data.samples import Sequences
from relax.errors import ConfigError
from relax.megatron import checkpoint, context, hf, transformer_engine
from relax.megatron.batching import Batching, Format
from relax.megatron.layers import Segments
from relax.megatron.layout import Layout
from relax.megatron.model import ModelConfig, build_model
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import MicroBatch, Trainer
from relax.rollout.megatron_engine import MegatronEngine
from relax.runtime import parts
from relax.runtime.policy import Policy
from tests.megatron import jobs, stand_ins
from tests.megatron.conftest import MODEL, VOCABULARY

OPTIMIZER = OptimizerConfig(total_steps=10, lr=1e-2, adam_eps=1e-4)
WANTED = attrs.evolve(MODEL, transformer_impl="transformer_engine", bf16=True)
# Two responses share a prompt; lengths differ, and one response is empty.
SEQUENCES = Sequences(((1, 2, 3), (1, 2, 3), (4,), (5, 6)), ((7, 8, 9, 1), (2, 3), (4, 5, 6, 7, 8), ()))
MODELS = [MODEL, attrs.evolve(MODEL, architecture="qwen2"), attrs.evolve(MODEL, recompute_activations=True)]


def build(model: ModelConfig = MODEL, qkv_format: Format = "bshd") -> Trainer:
    return Trainer(model, OPTIMIZER, seed=3, batching=Batching(micro_batch_size=3, qkv_format=qkv_format))


def loss(batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -batch.log_probs.sum() / 10, {}


def step(model: ModelConfig, qkv_format: Format, *, fused: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs before an optimizer step, and the weights behind it, by name."""
    with stand_ins.instead_of_local() if fused else nullcontext():
        trainer = build(model, qkv_format)
    attention = trainer.model.decoder.layers[0].self_attention.core_attention
    assert isinstance(attention, transformer_engine.FusedAttention) == fused
    log_probs = trainer.log_probs(SEQUENCES).log_probs
    trainer.update(SEQUENCES, loss)
    return log_probs, {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def assert_same(model: ModelConfig, qkv_format: Format) -> None:
    (ours, weights), (theirs, others) = (step(model, qkv_format, fused=fused) for fused in (False, True))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
@pytest.mark.parametrize("model", MODELS, ids=["qwen3", "qwen2", "recomputed"])
def test_the_step_is_the_local_one(model: ModelConfig, qkv_format: Format) -> None:
    assert_same(model, qkv_format)


def _shared() -> None:
    group = parallel_state.get_context_parallel_group()
    whole = torch.arange(24).unsqueeze(0)
    megatrons = get_batch_on_this_cp_rank({"tokens": whole}, group)["tokens"][0]
    assert torch.equal(megatrons, context.zigzag((24,), group.size())[group.rank()])
    for qkv_format in ("bshd", "thd"):
        assert_same(MODEL, qkv_format)


def test_context_ranks_hold_the_shares_that_megatron_gives_it() -> None:
    jobs.run(2, Layout(context=2), _shared)


def _sampled(fused: bool) -> list[tuple[int, ...]]:
    with stand_ins.instead_of_local() if fused else nullcontext():
        trainer = build()
    engine = MegatronEngine([VOCABULARY])  # an id that is never drawn
    engine.update_weights(trainer)
    found = engine.generate([(1, 2, 3), (4,)], n=3, max_new_tokens=6, temperature=1.0, seeds=[0, 1])
    return [completion.token_ids for group in found for completion in group]


def _sampled_by_both() -> bool:
    return _sampled(fused=True) == _sampled(fused=False)


def test_sampling_is_the_local_one() -> None:
    assert _sampled_by_both()


def test_sampling_on_context_ranks_takes_prompts_for_whole() -> None:
    assert jobs.run(2, Layout(context=2), _sampled_by_both) == [True, True]


def test_checkpoints_and_hugging_face_files_fit_either(tmp_path: Path) -> None:
    local = build()
    local.update(SEQUENCES, loss)
    with stand_ins.instead_of_local():
        fused = build()
    for source, target, root in ((local, fused, tmp_path / "local"), (fused, build(), tmp_path / "fused")):
        checkpoint.save(root, source, {}, step=1, keep=1)
        latest = checkpoint.latest(root)
        assert latest is not None
        checkpoint.load(latest, target)
        exported = [hf.export(trainer.model, MODEL) for trainer in (source, target)]
        assert exported[0].keys() == exported[1].keys()
        assert all(torch.equal(weight, exported[1][name]) for name, weight in exported[0].items())


def test_bounds_of_packed_samples() -> None:
    packed = transformer_engine.packed_params(Segments((3, 2, 4)), torch.device("cpu"))
    for bounds in (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
        assert bounds.tolist() == [0, 3, 5, 9]
        assert bounds.dtype == torch.int32
    assert (packed.qkv_format, packed.max_seqlen_q, packed.max_seqlen_kv) == ("thd", 4, 4)


def test_the_flag_chooses_the_modules() -> None:
    with stand_ins.installed():
        layer = build_model(WANTED, 0).decoder.layers[0]
    assert type(layer.self_attention.core_attention.fused) is stand_ins.Attention
    assert isinstance(layer.self_attention.linear_qkv, stand_ins.ColumnLinear)
    assert isinstance(layer.mlp.linear_fc1, stand_ins.ColumnLinear)
    assert type(layer.self_attention.linear_proj) is type(layer.mlp.linear_fc2) is stand_ins.RowLinear
    norms = layer.input_layernorm, layer.pre_mlp_layernorm, layer.self_attention.q_layernorm
    assert {type(norm) for norm in norms} == {stand_ins.Norm}


@pytest.mark.skipif(torch.cuda.is_available() or transformer_engine.HAVE_TE, reason="says what is missing elsewhere")
def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match=r"needs a GPU.*leave it out; .*cannot be imported here; pip install"):
        build_model(WANTED, 0)
    config = configure(recipe="arithmetic", transformer_impl="transformer_engine", bf16=True)
    with pytest.raises(ConfigError, match="needs a GPU") as refused:
        parts.build(config, Policy.of(config), imitating=True)
    assert "cannot be imported" in str(refused.value)


def test_float32_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"--transformer-impl transformer_engine: its attention.*add --bf16"):
        configure(recipe="arithmetic", transformer_impl="transformer_engine")
    with pytest.raises(ValueError, match="needs bf16"):
        attrs.evolve(WANTED, bf16=False)
