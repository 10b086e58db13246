"""The same things computed with transformers and plain torch."""

import torch
import transformers
from torch import Tensor

from relax.data.samples import Sequences
from relax.megatron import hf
from relax.megatron.trainer import Trainer


def transformers_model(trainer: Trainer) -> transformers.PreTrainedModel:
    """A copy of the policy, its weights moved over by their Hugging Face names."""
    model = transformers.AutoModelForCausalLM.from_config(hf.hf_config(trainer.model_config))
    weights = {name: tensor.clone() for name, tensor in hf.export(trainer.model, trainer.model_config).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def log_probs(model: transformers.PreTrainedModel, sequences: Sequences, temperature: float = 1.0) -> Tensor:
    """Log-probs of all response tokens, [tokens]: one sample at a time, no padding, no batch."""
    parts = []
    for prompt, response in zip(sequences.prompts, sequences.responses, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        parts.append(logits.log_softmax(-1)[range(len(response)), list(response)])
    return torch.cat(parts)
