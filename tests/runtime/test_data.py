"""Prompts, draws, seeds and tokens."""

import itertools
import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.data.prompts import DrawOrder, read_records
from relax.data.samples import Sequences
from relax.data.seeds import derived_seed
from relax.data.tokenizer import TextCodec, character_codec, load_codec
from relax.data.wording import as_it_stands
from relax.errors import RelaxError

PROMPT = {"prompt": as_it_stands}


def test_each_line_is_a_record_with_all_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": 2}\r\n\n{"prompt": "a\u2028b\x85c"}', encoding="utf-8")
    records = tuple(found.record for found in read_records(path, PROMPT))
    assert records == ({"prompt": "1+1=", "answer": 2}, {"prompt": "a\u2028b\x85c"})


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match=r"nowhere\.jsonl: no such file"):
        read_records(tmp_path / "nowhere.jsonl", PROMPT)
    with pytest.raises(RelaxError, match="cannot be read"):
        read_records(tmp_path, PROMPT)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "x", "response": 1}', "'response' must be a non-empty text, got 1"),
        ('{"prompt": "x"}', "has no key 'response'; its keys are ['prompt']"),
        ('{"prompt": null, "response": "y"}', "'prompt' must be a non-empty text, got None"),
        ("null", "expected a JSON object with 'prompt' and 'response', got 'null'"),
        ("{'prompt': 1}", "not JSON"),
    ],
)
def test_broken_lines_are_named_with_file_line_and_key(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "demonstrations.jsonl"
    path.write_text('{"prompt": "x", "response": "y"}\n\n' + line)
    with pytest.raises(RelaxError) as raised:
        read_records(path, {**PROMPT, "response": as_it_stands})
    assert str(raised.value).startswith(f"{path}, line 3: ")
    assert fault in str(raised.value)


@given(count=st.integers(1, 20), seed=st.integers(0, 2**63), start=st.integers(0, 100), amount=st.integers(0, 60))
@settings(max_examples=50, deadline=None)
def test_draws_depend_on_the_position_alone(count: int, seed: int, start: int, amount: int) -> None:
    order = DrawOrder(count, seed, "prompts")
    assert order.take(start, amount) == [order.take(at, 1)[0] for at in range(start, start + amount)]
    for epoch in range(3):
        assert sorted(order.take(epoch * count, count)) == list(range(count))


def test_epochs_and_names_have_orders_of_their_own() -> None:
    order = DrawOrder(50, 1, "prompts")
    assert order.take(0, 50) != order.take(50, 50)
    assert order.take(0, 50) != DrawOrder(50, 1, "demonstrations").take(0, 50)
    assert order.take(0, 50) != DrawOrder(50, 2, "prompts").take(0, 50)


def test_derived_seeds_differ_and_stay_what_they_are() -> None:
    paths = [("a",), ("b",), ("a", 0), ("a", 1), ("a", "b"), ("ab",), ("a", 2**32), ("a", 2**40), ("a", 0, 0)]
    seeds = [derived_seed(seed, *path) for seed in (0, 1, 2**32, 2**40) for path in paths]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(7, "rollout", 3) == derived_seed(7, "rollout", 3)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return character_codec()


@given(text=st.text(alphabet=string.printable, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_printable_text_survives(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    assert codec.decode((*ids, codec.end)) == text
    assert all(0 <= token < codec.vocab_size for token in ids)


def test_tags_are_one_token_and_spaces_are_kept(codec: TextCodec) -> None:
    assert len(codec.encode("<answer>12</answer>")) == 4
    for text in (" x ", "a  b", "\n", "<think> 1 </think>", "it 's , ."):
        assert codec.decode(codec.encode(text)) == text


def test_many_texts_are_encoded_like_each_alone(codec: TextCodec) -> None:
    texts = ["1+1=", "<think>2</think>", " a  b ", "1+1="]
    assert codec.encode_all(texts) == tuple(codec.encode(text) for text in texts)
    assert codec.encode_all([]) == ()
    with pytest.raises(RelaxError, match="cannot represent 'größe'"):
        codec.encode_all(["a", "größe", "b"])


@pytest.mark.parametrize("text", ["größe", "1 € a", "\ud800", "🙂", "<unk>", ""])
def test_what_would_not_survive_is_refused(codec: TextCodec, text: str) -> None:
    with pytest.raises(RelaxError, match="cannot represent"):
        codec.encode(text)


def test_a_saved_tokenizer_loads_the_same(codec: TextCodec, tmp_path: Path) -> None:
    codec.save(tmp_path)
    again = load_codec(tmp_path)
    assert (again.vocab_size, again.end) == (codec.vocab_size, codec.end)
    assert again.encode("<think>1 2</think>") == codec.encode("<think>1 2</think>")
    assert again.decode(again.encode(" a  b ")) == " a  b "


@pytest.mark.parametrize(
    ("generation", "config", "ends", "end"),
    [
        ({"eos_token_id": [7, 1]}, {"eos_token_id": 9}, (7, 1), 1),
        ({"eos_token_id": [7, 8]}, None, (7, 8), 7),
        ({"eos_token_id": 8}, None, (8,), 8),
        ({"temperature": 0.6}, {"eos_token_id": 9}, (9,), 9),
        (None, {"eos_token_id": None}, (1,), 1),
    ],
)
def test_a_model_beside_its_tokenizer_says_what_ends_a_response(
    codec: TextCodec, tmp_path: Path, generation: object, config: object, ends: tuple[int, ...], end: int
) -> None:
    codec.save(tmp_path)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    loaded = load_codec(tmp_path)
    assert (loaded.ends, loaded.end) == (ends, end)
    ids = codec.encode("1+1")
    for token in ends:
        assert loaded.decode((*ids, token)) == "1+1"
    for token in {7, 8, 9, 1} - set(ends):
        assert loaded.decode((*ids, token)) != "1+1"


@pytest.mark.parametrize("ids", [-1, "7", [1, None], {"a": 1}])
def test_ends_that_are_no_ids_are_refused(codec: TextCodec, tmp_path: Path, ids: object) -> None:
    codec.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(RelaxError, match=r"generation_config\.json: eos_token_id must be a token id or several"):
        load_codec(tmp_path)


def test_ids_that_the_tokenizer_does_not_know_are_no_text(codec: TextCodec) -> None:
    """A model's vocabulary may be larger: what it says there has no text, and the rest keeps its own."""
    one, two = codec.encode("12")
    assert codec.decode((one, codec.vocab_size, two, codec.vocab_size + 5_000)) == "12"
    assert codec.decode((codec.vocab_size,)) == ""


def test_no_tokenizer_to_load(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match="no such directory"):
        load_codec(tmp_path / "nowhere")
    with pytest.raises(RelaxError, match="transformers cannot load its tokenizer"):
        load_codec(tmp_path)


def test_sequences_refuse_what_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="1 prompts but 0 responses"):
        Sequences(((1,),), ())
    with pytest.raises(ValueError, match="sample 1 has an empty prompt"):
        Sequences(((1,), ()), ((2,), (3,)))
    with pytest.raises(ValueError, match="as long as its response"):
        Sequences(((1,),), ((2, 3),), ((True,),))


def test_sequences_split_into_what_they_hold() -> None:
    sequences = Sequences(tuple((i,) for i in range(5)), tuple((i,) * (i + 1) for i in range(5)))
    parts = sequences.split([2, 0, 3])
    assert [len(part) for part in parts] == [2, 0, 3]
    assert tuple(itertools.chain(*(part.responses for part in parts))) == sequences.responses
    assert sequences.num_tokens == 5 + 15
    assert sequences.tokens.lengths.tolist() == [1, 2, 3, 4, 5]
