"""The policy: a Megatron-core GPTModel of one of the architectures Qwen3, Qwen2 and Llama."""

from collections.abc import Callable
from functools import partial
from typing import Final, Literal, TypeVar, get_args

import attrs
import torch
from attrs import validators
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from relax.megatron import shim, stages, transformer_engine, vocabulary
from relax.megatron.kernels import Rotation
from relax.megatron.layers import LOCAL, layer_spec
from relax.megatron.layout import Layout
from relax.megatron.rope import RopeScaling
from relax.megatron.token_statistics import projected_statistics

Architecture = Literal["qwen3", "qwen2", "llama"]
TransformerImpl = Literal["local", "transformer_engine"]

M = TypeVar("M", bound="PolicyModel")
_INIT_STD: Final = 0.02  # Megatron's default
_positive = validators.gt(0)
_positive_float = validators.gt(0.0)


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Architecture and size of a dense model: RMSNorm, SwiGLU, grouped-query attention, RoPE.

    `qwen3` (arXiv:2505.09388) norms queries and keys, `qwen2` (arXiv:2412.15115, Qwen2.5 included) has a bias on query,
    key and value, `llama` (arXiv:2407.21783) neither.
    """

    vocab_size: int = attrs.field(validator=_positive, metadata={"help": "number of token ids"})
    num_layers: int = attrs.field(default=4, validator=_positive, metadata={"help": "transformer layers"})
    hidden_size: int = attrs.field(default=128, validator=_positive, metadata={"help": "width of the residual stream"})
    num_attention_heads: int = attrs.field(default=4, validator=_positive, metadata={"help": "query heads"})
    num_query_groups: int = attrs.field(default=2, validator=_positive, metadata={"help": "key and value heads"})
    ffn_hidden_size: int = attrs.field(default=384, validator=_positive, metadata={"help": "width inside the MLP"})
    kv_channels: int = attrs.field(default=32, validator=_positive, metadata={"help": "width of one head"})
    max_position_embeddings: int = attrs.field(
        default=256, validator=_positive, metadata={"help": "longest sequence, prompt and response, in tokens"}
    )
    rotary_base: float = attrs.field(
        default=10000.0, validator=_positive_float, metadata={"help": "base period of RoPE"}
    )
    norm_epsilon: float = attrs.field(default=1e-6, validator=_positive_float, metadata={"help": "epsilon of RMSNorm"})
    tie_embeddings: bool = attrs.field(default=True, metadata={"help": "share input and output embeddings"})
    architecture: Architecture = attrs.field(
        default="qwen3",
        validator=validators.in_(get_args(Architecture)),
        metadata={"help": "name, as transformers calls it"},
    )
    rope_scaling: RopeScaling | None = attrs.field(default=None, metadata={"help": "how RoPE is stretched, if it is"})
    bf16: bool = attrs.field(
        default=False, metadata={"help": "compute in bfloat16; gradients and the optimizer's weights are float32"}
    )
    recompute_activations: bool = attrs.field(
        default=False, metadata={"help": "keep each layer's input only and compute it again for the gradient"}
    )
    transformer_impl: TransformerImpl = attrs.field(
        default="local",
        validator=validators.in_(get_args(TransformerImpl)),
        metadata={"help": "modules of a layer: ours, or Transformer Engine's (on GPUs, in bfloat16)"},
    )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key pass an RMSNorm."""
        return self.architecture == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value have a bias."""
        return self.architecture == "qwen2"

    def __attrs_post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_query_groups ({self.num_query_groups})"
            )
        if self.kv_channels % 2:
            raise ValueError(f"kv_channels must be even for RoPE, got {self.kv_channels}")
        if self.transformer_impl == transformer_engine.NAME and not self.bf16:
            raise ValueError(f"transformer_impl {self.transformer_impl}: its attention needs bf16")


def transformer_config(config: ModelConfig, layout: Layout) -> TransformerConfig:
    """Megatron's own configuration record for `config`.

    Raises ValueError where `layout` cannot split such a model, or this process not compute it.
    """
    layout.check_model(config)
    if faults := list(transformer_engine.faults(config)):
        raise ValueError("; ".join(faults))
    return TransformerConfig(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        pipeline_dtype=config.dtype,
        variable_seq_lengths=True,  # micro-batches are as long as their longest sample
        moe_token_dispatcher_type="alltoall",  # the default refuses them, even where there are no experts
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        ffn_hidden_size=config.ffn_hidden_size,
        kv_channels=config.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        use_te_activation_func=True,  # Megatron's name for "the layer spec brings the activation": kernels.SwiGLU
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        init_method=partial(vocabulary.draw, vocab_size=config.vocab_size, std=_INIT_STD),
        init_method_std=_INIT_STD,
        # Losses arrive weighted: Megatron must add up micro-batches and ranks, not average them.
        calculate_per_token_loss=True,
        bf16=config.bf16,
        params_dtype=config.dtype,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],  # the default is deprecated, and warns
    )


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel that takes positions and the places where logits are wanted as data.

    `position_ids` [batch or 1, time] are rotated by as they stand. `loss_mask`, which Megatron passes on untouched, is
    an index here: the places [selected] in the flattened [time, batch] whose logits are wanted. Only those are
    computed, as [1, selected, vocabulary]; None asks for all, as [batch, time, vocabulary]. With `labels`, the tokens
    [selected] that follow those places, what comes is not the logits but what `read` makes of them.

    With several pipeline stages this is the one that `parallel_state` says, unless `layout` has the stages in one:
    ids are read by the first stage only, and other stages than the last return hidden states.
    """

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        whole = layout.pipeline == 1
        super().__init__(
            config=transformer_config(config, layout),
            transformer_layer_spec=layer_spec(
                qk_norm=config.qk_norm,
                recompute=config.recompute_activations,
                modules=LOCAL if config.transformer_impl == "local" else transformer_engine.modules(),
            ),
            vocab_size=layout.tensor * vocabulary.rows(config.vocab_size, layout.tensor),
            max_sequence_length=config.max_position_embeddings,
            pre_process=whole or parallel_state.is_pipeline_first_stage(),
            post_process=whole or parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=config.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
        )
        self.vocab_size = config.vocab_size  # from here on without the padding
        self.temperature = 1.0
        if config.rope_scaling is not None:
            self.rotary_pos_emb.inv_freq = config.rope_scaling.apply(self.rotary_pos_emb.inv_freq)
        self.rotary_pos_emb.cp_group = None  # positions are data here: what Megatron derives from the rank is not used
        cos, sin = self.rotary_pos_emb.get_cos_sin(config.max_position_embeddings)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def _rotation(self, position_ids: Tensor) -> Rotation:
        where = position_ids.t()
        return self.rotary_cos[where].unsqueeze(2), self.rotary_sin[where].unsqueeze(2)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **kwargs: object) -> tuple[object, ...]:
        prepared = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        return prepared[0], self._rotation(position_ids), *prepared[2:]

    def _postprocess(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if loss_mask is not None and self.post_process:
            hidden_states = hidden_states.flatten(0, 1).index_select(0, loss_mask).unsqueeze(1)
            if labels is not None:
                return self.read(hidden_states, labels)
        result: Tensor = super()._postprocess(hidden_states=hidden_states, labels=None, **kwargs)
        return result[..., : self.vocab_size] if self.post_process else result

    def read(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Log-prob of each label, and the entropy there, of softmax(logits / `temperature`): [2, selected], in nats."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        found = projected_statistics(
            hidden.squeeze(1), weight, labels, vocab_size=self.vocab_size, temperature=self.temperature
        )
        return torch.stack(found)

    def sharded_state_dict(self, prefix: str = "", *args: object, **kwargs: object) -> dict[str, object]:
        """Megatron's, with the rows of the vocabulary as they are without padding."""
        state: dict[str, object] = super().sharded_state_dict(prefix, *args, **kwargs)
        for name in (f"{prefix}{stages.EMBEDDING}", f"{prefix}{stages.OUTPUT}"):
            if name in state:
                state[name] = vocabulary.without_padding(state[name], self.vocab_size)
        return state


def build_model(config: ModelConfig, seed: int, *, whole: bool = False) -> PolicyModel:
    """A policy with freshly drawn weights; see `drawn`."""
    return drawn(PolicyModel, config, seed, whole=whole)


def drawn(kind: Callable[[ModelConfig, Layout], M], config: ModelConfig, seed: int, *, whole: bool = False) -> M:
    """A model with freshly drawn weights, the same for a seed on every device, layout and call.

    Leaves the global random state as it was. Must run inside `megatron_process`. With several pipeline stages each
    draws the weights of all and keeps its own, or, for a `whole` model, all of them.
    """
    layout = Layout.current()
    with torch.random.fork_rng(devices=[]), shim.cpu_for_cuda():
        torch.manual_seed(seed)
        model = kind(config, attrs.evolve(layout, pipeline=1))
        if layout.pipeline > 1 and not whole:
            stage = kind(config, layout)
            stages.take_share(stage, model)
            model = stage
        model = model.to(shim.device())
    for parameter in model.parameters():  # and not the tables of RoPE, which stay as exact as they are
        parameter.data = parameter.data.to(config.dtype)
    return model
