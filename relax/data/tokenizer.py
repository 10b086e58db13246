"""Tokenizers: a character-level one that needs no download, or any that `transformers` can load from a directory."""

import json
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
    """Text to token ids and back. Encoding refuses text that would not survive the way back.

    Each of `ends` ends a response; `end` is the one to write. Without `ends`, both are the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, origin: str, ends: Sequence[int] = ()) -> None:
        own: int | None = tokenizer.eos_token_id
        if own is None and not ends:
            raise RelaxError(f"the tokenizer of {origin} has no end-of-sequence token, so no response could end")
        self.tokenizer = tokenizer
        self.origin = origin
        self.ends: TokenIds = tuple(ends) if own is None or ends else (own,)
        self.end: int = own if own is not None and own in self.ends else self.ends[0]

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
        """Text of a response. A final end-of-sequence token is not text, nor are ids that the tokenizer does not know:
        a model may have more than its tokenizer."""
        body = ids[:-1] if ids and ids[-1] in self.ends else ids
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
    family's, whatever the file says. Where a model is saved beside it, what ends a response is what that model says.
    """
    if not directory.is_dir():
        raise RelaxError(f"{directory}: no such directory")
    try:
        kind = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
        tokenizer = kind.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RelaxError(f"{directory}: transformers cannot load its tokenizer: {error}") from error
    files = tokenizer.vocab_files_names.values()  # without any of them, transformers makes up an empty tokenizer
    if not any((directory / file).is_file() for file in files):
        raise RelaxError(f"{directory}: holds no tokenizer ({', '.join(files)}); --tokenizer names another directory")
    return TextCodec(tokenizer, str(directory), _ends(directory))


def _ends(directory: Path) -> TokenIds:
    """The end-of-sequence ids of the model saved in `directory`; none where it names none, or there is no model.

    Errors: `RelaxError` for a file that says something else than ids.
    """
    for path in (directory / "generation_config.json", directory / "config.json"):
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise RelaxError(f"{path}: cannot be read: {error!r}") from error
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise RelaxError(f"{path}: eos_token_id must be a token id or several, got {found!r}")
        if ids:
            return tuple(ids)
    return ()
