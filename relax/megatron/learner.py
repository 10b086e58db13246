"""A Megatron model with its optimizer: passes over given responses, and optimizer steps down any gradient of them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import attrs
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from relax.data.samples import Sequences
from relax.errors import RelaxError
from relax.megatron import context, groups, shim
from relax.megatron.batch import PaddedBatch, check_fit, micro_batches
from relax.megatron.batching import Batching, Span
from relax.megatron.model import ModelConfig, PolicyModel
from relax.megatron.optimizer import OptimizerConfig, build_optimizer
from relax_core.collectives import agree

M = TypeVar("M", bound=PolicyModel)
SHARDING: Final = {"distrib_optim_sharding_type": "dp_reshardable"}
"""How a distributed optimizer lies in a checkpoint: of Megatron's ways the one that works without a GPU."""
_EXTRA_STATE: Final = "._extra_state"
"""What Transformer Engine's modules remember of 8-bit formats: nothing here, so checkpoints do without."""
Outputs = tuple[Tensor, ...]


@attrs.frozen
class Update:
    """What one optimizer step did: gradient norm before clipping, learning rate used, metrics summed over the batch."""

    grad_norm: float
    lr: float
    metrics: dict[str, float]


class Learner(Generic[M]):
    """What a policy and a critic have in common. `prefix` keeps their names in a checkpoint apart.

    `batching` says how many samples pass the model at a time, and in which form. Lives inside `megatron_process`. Every
    method is called on all ranks at once, with the samples of the rank's own replica, as many as it has: the same on
    all ranks that share it.
    """

    def __init__(
        self,
        model: M,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        *,
        batching: Batching,
        prefix: str = "",
    ) -> None:
        batching.check(model_config.max_position_embeddings, context.size())
        self.model = model
        self.model_config = model_config
        self.batching = batching
        self.prefix = prefix
        with shim.cpu_for_cuda():
            ddp_config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer_config.distributed
            )
            self._ddp = DistributedDataParallel(self.model.config, ddp_config, self.model)
            self._ddp.broadcast_params()
        self.model.config.finalize_model_grads_func = _finalize
        self._seconds: dict[str, float] = {}
        self.reset_optimizer(optimizer_config)

    def reset_optimizer(self, optimizer_config: OptimizerConfig) -> None:
        """Starts over with an optimizer that remembers nothing; weights stay."""
        self.optimizer_config = optimizer_config
        self._optimizer, self._scheduler = build_optimizer(optimizer_config, self._ddp)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Duration of the parts of the last call."""
        return self._seconds

    def state(self, *, is_loading: bool = False) -> dict[str, object]:
        """Weights, optimizer and schedule in Megatron's sharded form, for `checkpoint`."""
        model = sharded(self.model, self.prefix)
        with shim.cpu_for_cuda():
            optimizer = self._optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=ensure_metadata_has_dp_cp_group(dict(SHARDING))
            )
        if "state" in optimizer:  # not a distributed one's
            optimizer["state"].setdefault("common_step", torch.zeros(()))  # Megatron leaves out a count of zero
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` described and a checkpoint brought back."""
        load_sharded(self.model, self.prefix, state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.num_steps = 0  # Megatron adds the loaded count to what is there
        self._scheduler.load_state_dict(state["scheduler"])
        for moments in self._optimizer.optimizer.state.values():
            # Megatron's distributed optimizer forgets the count, and lets all parameters share it.
            moments["step"] = torch.full_like(moments["step"], self._scheduler.num_steps)

    @torch.no_grad()
    def _forward(
        self, sequences: Sequences, read: Callable[[PaddedBatch, Tensor], Outputs], model: torch.nn.Module, outputs: int
    ) -> list[Tensor]:
        """What `read` makes of all micro-batches, without gradient: `outputs` tensors, [tokens] each, on every rank."""
        started = time.perf_counter()

        def collect(batch: PaddedBatch, output: Tensor, non_loss_data: bool) -> Outputs:
            return read(batch, output)

        parts: list[Outputs] = self._schedule(sequences, collect, model, forward_only=True)
        tokens = sum(map(len, sequences.responses))
        whole: Sequence[Tensor | None] = [torch.cat(part) for part in zip(*parts, strict=True)] or [None] * outputs
        found = [groups.tensor_from_last_stage(part, tokens) for part in whole]
        self._seconds = {"forward": time.perf_counter() - started}
        return found

    def _update(
        self, sequences: Sequences, loss: Callable[[PaddedBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
    ) -> Update:
        """One optimizer step down the gradient of the sum of `loss` over all micro-batches and data-parallel ranks.

        Raises RelaxError, with the weights as they were, when the gradient is not finite.
        """
        started = time.perf_counter()

        def share(batch: PaddedBatch, output: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            value, metrics = loss(batch, output)
            return value, torch.zeros((), dtype=torch.int), metrics

        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = self._schedule(sequences, share, self._ddp, forward_only=False)
        stepped = time.perf_counter()
        update = self._step(_sum_metrics(parts))
        self._seconds = {"forward_backward": stepped - started, "optimizer": time.perf_counter() - stepped}
        return update

    def _step(self, metrics: dict[str, float]) -> Update:
        finite = all(torch.isfinite(buffer.grad_data.sum()) for buffer in self._ddp.buffers)
        if not groups.everywhere(finite):
            raise RelaxError(
                f"the gradient of optimizer step {self._scheduler.num_steps + 1} is not finite; no step was taken. "
                "Look at the losses and rewards of this batch, or lower --lr"
            )
        lr: float = self._optimizer.param_groups[0]["lr"]
        with shim.cpu_for_cuda():
            _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(1)
        return Update(float(grad_norm), lr, metrics)

    def _schedule(
        self, sequences: Sequences, reduce: Callable[..., object], model: torch.nn.Module, *, forward_only: bool
    ) -> list[Any]:
        """Runs Megatron's schedule over the micro-batches: `reduce(batch, output)` of each, on the last stage."""
        spans = self._spans(sequences)

        def on_last_stage(batch: PaddedBatch, output: Tensor, **kwargs: object) -> object:
            with shim.as_torch_is():
                whole = output if batch.gather is None else context.whole_responses(output, batch.gather)
                # A few numbers a token: what is made of them is computed where the batch they belong to is.
                return reduce(batch, whole.cpu(), **kwargs)

        def forward_step(
            batches: Iterator[PaddedBatch], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., object]]:
            with shim.as_torch_is():
                batch = next(batches)
                output = model(
                    batch.input_ids, batch.position_ids, batch.attention, labels=batch.targets, loss_mask=batch.places
                )
            return output, partial(on_last_stage, batch)

        model.train()
        with shim.cpu_for_cuda():
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=micro_batches(sequences, spans, shim.device(), packed=self.batching.packed),
                model=model,
                num_microbatches=len(spans),
                seq_length=self.model_config.max_position_embeddings,
                micro_batch_size=self.batching.micro_batch_size,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return results

    def _spans(self, sequences: Sequences) -> list[Span]:
        """The micro-batches: as many on every replica, some of them empty.

        Raises ValueError on every rank where the samples of any do not fit the model.
        """
        reduce = groups.data_parallel_reduce()

        def cut() -> list[Span]:
            check_fit(sequences, self.model_config)
            return self.batching.spans(sequences, context.size())

        spans = agree(cut, lambda _: 0, reduce, shim.device())
        most = max(1, int(reduce(torch.tensor(len(spans)), "max")))
        return spans + [(len(sequences), len(sequences))] * (most - len(spans))


def sharded(model: PolicyModel, prefix: str) -> dict[str, object]:
    """The weights in Megatron's sharded form, each name in the checkpoint with `prefix`."""
    with shim.cpu_for_cuda():
        state: dict[str, object] = model.sharded_state_dict(
            prefix=prefix, metadata=ensure_metadata_has_dp_cp_group(None)
        )
    return {name: part for name, part in state.items() if not name.endswith(_EXTRA_STATE)}


def load_sharded(model: PolicyModel, prefix: str, state: Mapping[str, Any]) -> None:
    """Takes over what a checkpoint brought back for `sharded`."""
    extra = {name: value for name, value in model.state_dict().items() if name.endswith(_EXTRA_STATE)}
    model.load_state_dict(extra | {name.removeprefix(prefix): value for name, value in state.items()})


def _finalize(model: list[torch.nn.Module], num_tokens: object, **kwargs: object) -> None:
    """Adds up gradients over ranks. Losses carry their weights, so there is no token count to divide by."""
    finalize_model_grads(model, None, **kwargs)


def _sum_metrics(parts: list[Mapping[str, Tensor]]) -> dict[str, float]:
    """Added up over micro-batches and replicas. The last stage has them; every rank learns them."""
    totals: dict[str, float] = {}
    if parts and parts[0]:
        names = list(parts[0])
        sums = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in parts]).sum(0)
        totals = dict(zip(names, groups.data_parallel_reduce()(sums, "sum").tolist(), strict=True))
    return groups.object_from_last_stage(totals)
