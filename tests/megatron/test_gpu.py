"""What only a GPU can show. None of it has run yet where there is none: each test says what it lacks."""

import contextlib
import io
import math
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from benchmarks import throughput
from relax.data.samples import Sequences
from relax.megatron import hf, transformer_engine
from relax.megatron.batching import Batching, Format
from relax.megatron.layout import Layout
from relax.megatron.trainer import Trainer
from relax.rollout.megatron_engine import MegatronEngine
from tests.megatron import jobs
from tests.megatron.conftest import MODEL, VOCABULARY
from tests.megatron.test_execution import BF16, ON_A_CPU, OPTIMIZER, build, draw, gradients, negative_log_likelihood
from tests.runtime.launch import lines, relax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
needs_te = pytest.mark.skipif(not transformer_engine.HAVE_TE, reason="Transformer Engine is not installed")
IMPLEMENTATIONS = ["local", pytest.param("transformer_engine", marks=needs_te)]
WIDE = attrs.evolve(BF16, kv_channels=16)  # its kernels want heads whose width 8 divides
FUSED = attrs.evolve(WIDE, transformer_impl="transformer_engine")


def test_the_step_on_a_gpu() -> None:
    sequences = draw(7)
    trainer = build(MODEL)
    assert next(trainer.model.parameters()).is_cuda
    assert trainer.update(sequences, negative_log_likelihood).grad_norm == pytest.approx(ON_A_CPU, rel=1e-3)
    assert build(BF16).update(sequences, negative_log_likelihood).grad_norm == pytest.approx(ON_A_CPU, rel=0.05)


def pair(qkv_format: Format) -> tuple[Trainer, Trainer]:
    """A trainer of local layers and one of Transformer Engine's, of the same weights."""
    batching = Batching(micro_batch_size=3, qkv_format=qkv_format)
    local, fused = (Trainer(model, OPTIMIZER, seed=3, batching=batching) for model in (WIDE, FUSED))
    fused.start_from(hf.export(local.model, WIDE))
    return local, fused


def step(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Log-probs before an optimizer step, and its gradient."""
    sequences = draw(7)
    log_probs = trainer.log_probs(sequences).log_probs
    trainer.update(sequences, negative_log_likelihood)
    return log_probs.cpu(), gradients(trainer).cpu()


def differences(qkv_format: Format) -> tuple[float, float]:
    """Of Transformer Engine's step from the local one: largest log-prob, and gradient relative to its norm."""
    (ours, exact), (theirs, other) = map(step, pair(qkv_format))
    return float((theirs - ours).abs().max()), float((other - exact).norm() / exact.norm())


@needs_te
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_transformer_engine_takes_the_local_step(qkv_format: Format) -> None:
    log_probs, gradient = differences(qkv_format)
    assert log_probs < 0.05
    assert gradient < 0.05


@needs_te
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_its_context_ranks_take_the_local_step(qkv_format: Format) -> None:
    for log_probs, gradient in jobs.run(2, Layout(context=2), differences, qkv_format):
        assert log_probs < 0.05
        assert gradient < 0.05


@needs_te
def test_sampling_reports_the_log_probs_of_its_training() -> None:
    _, trainer = pair("bshd")
    engine, prompt = MegatronEngine([VOCABULARY]), (1, 2, 3)
    engine.update_weights(trainer)
    (answers,) = engine.generate([prompt], n=4, max_new_tokens=6, temperature=1.0, seeds=[0])
    sequences = Sequences((prompt,) * 4, tuple(answer.token_ids for answer in answers))
    reported = torch.tensor([value for answer in answers for value in answer.log_probs])
    assert (trainer.log_probs(sequences).log_probs.cpu() - reported).abs().max() < 0.1


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ten_steps_of_arithmetic(impl: str, tmp_path: Path) -> None:
    brief = ("--warm-start-steps", 10, "--num-rollout", 10)
    finished = relax(tmp_path, "train", "--bf16", "--transformer-impl", impl, *brief, "--output", "run")
    assert finished.status == 0, finished
    steps = [record for record in lines(tmp_path / "run" / "metrics.jsonl") if record["phase"] == "rl"]
    assert len(steps) == 10
    assert all(math.isfinite(float(str(record["grad_norm"]))) for record in steps)


def throughput_of(impl: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        throughput.main(["--transformer-impl", impl])
    return told.getvalue()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_throughput_of_a_real_size_is_told(impl: str) -> None:
    """In a process of its own, since a process is part of one job; `pytest -s` shows the figures."""
    (told,) = jobs.start(1, throughput_of, impl)
    print(told)
    assert 0.01 < float(told.split("TFLOP/s: ")[1].split("%")[0]) / 100 < 1
