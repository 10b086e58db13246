"""Tokenizers: a character-level one that needs no download, or any that `transformers` can load from a directory."""

import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from relax.data.samples import TokenIds
from relax.errors import RelaxError

END = "<eos>"
PAD = "<pad>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class TextCodec:
    """Text to token ids and back. Encoding refuses text that would not survive the way back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, origin: str) -> None:
        if tokenizer.eos_token_id is None:
            raise RelaxError(f"the tokenizer of {origin} has no end-of-sequence token, so no response could end")
        self.tokenizer = tokenizer
        self.origin = origin
        self.end: int = tokenizer.eos_token_id

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> TokenIds:
        """Token ids of `text`, without special tokens around it.

        Errors: `RelaxError` naming the text when the tokenizer cannot represent it.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> tuple[TokenIds, ...]:
        """Token ids of every text: many at once take a fraction of the time. Errors: as `encode`."""
        for text in texts:
            if text.encode(errors="ignore").decode() != text:  # JSON can spell half a surrogate pair: that is no text
                raise self._unrepresentable(text)
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        unknown = self.tokenizer.unk_token_id
        for text, ids in zip(texts, rows, strict=True):
            if not ids or (unknown is not None and unknown in ids):
                raise self._unrepresentable(text)
        return tuple(map(tuple, rows))

    def _unrepresentable(self, text: str) -> RelaxError:
        return RelaxError(f"the tokenizer of {self.origin} cannot represent {text[:80]!r}")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response; a final end-of-sequence token is not text."""
        body = ids[:-1] if ids and ids[-1] == self.end else ids
        return str(self.tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def save(self, directory: Path) -> None:
        """Write the files that `transformers` loads a tokenizer from, its chat template among them."""
        self.tokenizer.save_pretrained(directory)


def character_codec() -> TextCodec:
    """One token for each printable ASCII character, and one for each of the usual tags."""
    vocabulary = [PAD, END, "<unk>", *TAGS, *string.printable]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in TAGS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token="<unk>")
    return TextCodec(fast, "printable ASCII characters")


def load_codec(directory: Path) -> TextCodec:
    """The tokenizer saved in `directory` (Hugging Face format), its chat template included.

    A tokenizer.json is taken at its word: `AutoTokenizer` would give some models, Qwen2 for one, a tokenizer of their
    family's, whatever the file says.
    """
    if not directory.is_dir():
        raise RelaxError(f"{directory}: no such directory")
    try:
        kind = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
        tokenizer = kind.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RelaxError(f"{directory}: transformers cannot load its tokenizer: {error}") from error
    return TextCodec(tokenizer, str(directory))
