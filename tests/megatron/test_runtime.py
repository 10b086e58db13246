import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from relax.megatron.runtime import megatron_process

SCRIPT = """
import warnings, torch
from torch import distributed
from pathlib import Path
from relax.data.samples import Sequences
from relax.megatron.batching import Batching
from relax.megatron import checkpoint, hf
from relax.megatron.model import ModelConfig
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.runtime import megatron_process
from relax.megatron.trainer import Trainer
from relax.rollout.megatron_engine import MegatronEngine
from relax.rollout.transformers_engine import TransformersEngine

current_device = torch.cuda.current_device
root = Path({root!r})
for turn in range(2):
    with megatron_process(0):
        config = ModelConfig(vocab_size=20, num_layers=1, hidden_size=16, ffn_hidden_size=16, kv_channels=4)
        trainer = Trainer(config, OptimizerConfig(total_steps=3), seed=0, batching=Batching(micro_batch_size=2))
        for engine in (MegatronEngine([1]), TransformersEngine([1])):
            engine.update_weights(trainer)
            engine.generate([[3, 4], [5]], n=2, max_new_tokens=3, temperature=1.0, seeds=[0, 1])
        sequences = Sequences(((3,), (4, 5)), ((6, 7), (8,)))
        trainer.log_probs(sequences)
        trainer.update(sequences, lambda batch: (batch.log_probs.sum(), {{}}))
        checkpoint.load(checkpoint.save(root, trainer, {{}}, step=turn, keep=1), trainer)
        hf.save_pretrained(trainer.model, config, root / "export")
    assert not distributed.is_initialized()
    assert torch.cuda.is_available() or torch.cuda.current_device is current_device
"""


def test_a_whole_life_leaves_nothing_behind_and_says_nothing(tmp_path: Path) -> None:
    """Two jobs one after the other in one process: set-up, sampling, training, checkpoint, export."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


AFTERWARDS = """
import contextlib, sys
from relax.megatron.runtime import megatron_process

def subnormal():
    return sys.float_info.min / 2

assert subnormal() > 0
for fails in (False, True):
    with contextlib.suppress(ZeroDivisionError), megatron_process(0):
        print("inside", subnormal())
        if fails:
            raise ZeroDivisionError
    print("outside", subnormal() > 0)
"""


def test_subnormal_numbers_survive_a_job() -> None:
    """Inside they are rounded to zero for speed; arithmetic that comes after it must not notice."""
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=120, check=True)
    inside = str(sys.float_info.min / 2) if torch.cuda.is_available() else "0.0"
    assert done.stdout.splitlines() == [f"inside {inside}", "outside True"] * 2


def test_a_process_is_part_of_one_job_only() -> None:
    assert distributed.is_initialized()
    with pytest.raises(RuntimeError, match="already initialized"), megatron_process(0):
        pass


VOCABULARY_PARALLEL = """
import sys, torch
from megatron.core import parallel_state
from relax.megatron import shim
from relax.megatron.token_statistics import projected_statistics, token_statistics
from torch import distributed

torch.set_num_threads(1)
rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with shim.cuda_queries_answered(), shim.cpu_for_cuda():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
generator = torch.Generator().manual_seed(0)
whole = (3 * torch.randn(7, 10, generator=generator, dtype=torch.float64)).requires_grad_()
weights = torch.randn(2, 7, generator=generator, dtype=torch.float64)
targets = torch.tensor([0, 4, 5, 9, 3, 6, 4])
plain = whole.log_softmax(-1)
log_probs, entropy = plain[range(7), targets], -(plain.exp() * plain).sum(-1)
(weights[0] * log_probs + weights[1] * entropy).sum().backward()

shard = whole.detach()[:, 5 * rank : 5 * rank + 5].clone().requires_grad_()
ours = token_statistics(shard, targets, start=5 * rank)
(weights[0] * ours[0] + weights[1] * ours[1]).sum().backward()
torch.testing.assert_close(ours, (log_probs.detach(), entropy.detach()), atol=1e-12, rtol=0)
torch.testing.assert_close(shard.grad, whole.grad[:, 5 * rank : 5 * rank + 5], atol=1e-12, rtol=0)

hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64).requires_grad_() for n in (7, 10))
for words in (10, 9):  # rank 1 has a row of padding then; 4 tokens of rank 0 are 20 logits, 5 of rank 1
    hidden.grad = weight.grad = None
    targets = targets.clamp(max=words - 1)
    plain = (hidden @ weight[:words].T / 0.7).log_softmax(-1)
    log_probs, entropy = plain[range(7), targets], -(plain.exp() * plain).sum(-1)
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    for chunk in (1, 10, 20, 10_000):
        states, rows = (part.detach().clone().requires_grad_() for part in (hidden, weight[5 * rank : 5 * rank + 5]))
        ours = projected_statistics(states, rows, targets, vocab_size=words, temperature=0.7, chunk=chunk)
        (weights[0] * ours[0] + weights[1] * ours[1]).sum().backward()
        torch.testing.assert_close(ours, (log_probs.detach(), entropy.detach()), atol=1e-12, rtol=0)
        torch.testing.assert_close(states.grad, hidden.grad, atol=1e-12, rtol=0)
        torch.testing.assert_close(rows.grad, weight.grad[5 * rank : 5 * rank + 5], atol=1e-12, rtol=0)
"""


def test_token_statistics_of_a_vocabulary_on_two_ranks(tmp_path: Path) -> None:
    """Values and gradients equal those of plain log_softmax over the whole vocabulary, to 1e-12."""
    command = [sys.executable, "-c", VOCABULARY_PARALLEL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors


STEPS_OF_ONE_SIZE = """
import resource, torch
from relax.megatron import memory

def step():
    activations = [torch.ones(7_500_000) for _ in range(4)]  # 30 MB each

memory.keep_freed()
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_memory_that_a_step_freed_is_the_next_steps() -> None:
    faults = int(subprocess.check_output([sys.executable, "-c", STEPS_OF_ONE_SIZE]))
    assert faults < 4 * 30_000_000 // resource.getpagesize() + 1_000  # a step's pages, not those of ten
