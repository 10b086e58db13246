"""Training on Megatron-core: model, log-probs, the optimizer step, checkpoints, Hugging Face weights.

The same code runs on GPUs and, through a small shim, on a CPU with gloo.
"""

import warnings

# Megatron-core announces at import that optional GPU packages are missing, and uses torch features that torch is about
# to retire. Neither concerns a user of this package, so exactly these messages are dropped, here and nowhere else.
with warnings.catch_warnings():
    for _message in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "`torch.jit.script",
        "The following imports from `dynamic_context.py`",
    ):
        warnings.filterwarnings("ignore", message=_message)
    import megatron.core.dist_checkpointing
    import megatron.core.inference.contexts.static_context
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
