"""The policy that a run trains: its size and tokenizer, the weights it starts from, and what its export has."""

from pathlib import Path

import attrs

from relax.config import Config
from relax.data.tokenizer import TextCodec, character_codec, load_codec
from relax.megatron import hf
from relax.megatron.hf import Companions, SafetensorsFiles
from relax.megatron.model import ModelConfig
from relax.megatron.trainer import Trainer


@attrs.frozen
class Policy:
    """As configured. `checkpoint` is the directory whose weights it starts from; None: random ones.

    `max_position_embeddings` is the export's: a run may train on shorter sequences than its model can read.
    """

    size: ModelConfig
    codec: TextCodec
    companions: Companions
    max_position_embeddings: int
    checkpoint: Path | None = None

    @classmethod
    def of(cls, config: Config) -> "Policy":
        """Reads tokenizer and checkpoint, but for its weights. Errors: `RelaxError`."""
        own = {field.name for field in attrs.fields(ModelConfig)} & {field.name for field in attrs.fields(Config)}
        given = {name: getattr(config, name) for name in own}
        directory = config.hf_checkpoint
        if directory is None:
            codec = character_codec() if config.tokenizer is None else load_codec(config.tokenizer)
            size = ModelConfig(vocab_size=codec.vocab_size, **given)
            return cls(size, codec, Companions.of(codec), size.max_position_embeddings)
        described = hf.read_config(directory)
        model = described.model
        codec = load_codec(config.tokenizer or directory)
        hf.check_vocabulary(model, codec)
        companions = Companions.read(directory, described, codec)
        if config.tokenizer is not None:
            companions = attrs.evolve(Companions.of(codec), dtype=companions.dtype)
        return cls(attrs.evolve(model, **given), codec, companions, model.max_position_embeddings, directory)

    def weights(self) -> SafetensorsFiles | None:
        """Those to start from, checked, not yet read. Errors: `RelaxError` that lists all in which they do not fit."""
        return None if self.checkpoint is None else hf.read_weights(self.checkpoint, self.size)

    def export(self, trainer: Trainer, directory: Path) -> None:
        """Writes the trained model in Hugging Face's format. Errors: as `hf.save_pretrained`."""
        described = attrs.evolve(trainer.model_config, max_position_embeddings=self.max_position_embeddings)
        hf.save_pretrained(trainer.model, described, directory, self.companions)
