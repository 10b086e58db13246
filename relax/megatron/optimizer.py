"""Megatron's optimizer and learning-rate schedule."""

from typing import Literal

import attrs
import torch
from attrs import validators
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from relax.megatron import shim

DecayStyle = Literal["constant", "linear", "cosine"]
_not_negative = validators.ge(0.0)
_fraction = validators.and_(validators.ge(0.0), validators.lt(1.0))


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) and how its learning rate moves over `total_steps` optimizer steps."""

    total_steps: int = attrs.field(validator=validators.gt(0), metadata={"help": "optimizer steps of the whole run"})
    lr: float = attrs.field(default=1e-6, validator=_not_negative, metadata={"help": "peak learning rate"})
    min_lr: float = attrs.field(default=0.0, validator=_not_negative, metadata={"help": "learning rate at the end"})
    lr_warmup_steps: int = attrs.field(
        default=0, validator=validators.ge(0), metadata={"help": "steps of linear warm-up"}
    )
    lr_decay_style: DecayStyle = attrs.field(
        default="constant",
        validator=validators.in_(("constant", "linear", "cosine")),
        metadata={"help": "how the learning rate falls after the warm-up"},
    )
    clip_grad: float = attrs.field(
        default=1.0, validator=_not_negative, metadata={"help": "largest global gradient norm; 0: no clipping"}
    )
    weight_decay: float = attrs.field(
        default=0.0, validator=_not_negative, metadata={"help": "decoupled weight decay of matrices"}
    )
    adam_beta1: float = attrs.field(default=0.9, validator=_fraction, metadata={"help": "decay of the first moment"})
    adam_beta2: float = attrs.field(default=0.95, validator=_fraction, metadata={"help": "decay of the second moment"})
    adam_eps: float = attrs.field(default=1e-8, validator=validators.gt(0.0), metadata={"help": "epsilon of Adam"})
    distributed: bool = attrs.field(
        default=False, metadata={"help": "each data-parallel rank keeps and steps its share of the optimizer's state"}
    )

    def __attrs_post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) must not exceed lr ({self.lr})")
        if self.lr_warmup_steps >= self.total_steps:
            raise ValueError(
                f"lr_warmup_steps ({self.lr_warmup_steps}) must be smaller than total_steps ({self.total_steps})"
            )


def build_optimizer(
    config: OptimizerConfig, model: DistributedDataParallel
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron's optimizer over the parameters of `model`, and the schedule that sets its learning rate."""
    with shim.cpu_for_cuda():
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                use_distributed_optimizer=config.distributed,
                bf16=model.config.bf16,
                params_dtype=model.config.params_dtype,
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad,
            ),
            [model],
            use_gloo_process_groups=False,
        )
    for group in optimizer.param_groups:
        group["fused"] = True  # torch's one-pass kernel: the same update in a fraction of the time
    _start_moments(optimizer.optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=config.total_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.total_steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _start_moments(adam: torch.optim.Optimizer) -> None:
    """Gives Adam the state it would make at its first step, so that a checkpoint taken before is complete too."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
