"""Prompts as messages, rendered with the tokenizer's chat template: as transformers does it."""

import json
from pathlib import Path

import pytest
import transformers

from relax.data.prompts import read_records
from relax.data.tokenizer import TextCodec, character_codec, load_codec
from relax.data.wording import ChatTemplate, as_it_stands, asked
from relax.errors import RelaxError
from tests.megatron.checkpoints import tokenizer
from tests.runtime.launch import lines, relax
from tests.runtime.pretrained import BRIEF, QUESTIONS, greedy, outfit, write_lines

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = [
    {"role": "user", "content": " where is the theory? \n"},
    {"role": "assistant", "content": "there: <|end|>"},
    {"role": "user", "content": "größer"},
]


def codec_of(directory: Path, **settings: object) -> TextCodec:
    tokenizer(**settings).save_pretrained(directory)
    return load_codec(directory)


@pytest.mark.parametrize("template", [None, STRICT], ids=["plain", "strict"])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[:1]], ids=["three", "one"])
def test_prompts_are_what_transformers_makes_of_the_messages(
    tmp_path: Path, template: str | None, messages: list[dict[str, str]]
) -> None:
    settings = {} if template is None else {"chat_template": template, "bos_token": "<|user|>"}
    codec = codec_of(tmp_path, **settings)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = loaded.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    wording = ChatTemplate.of(codec)
    assert list(codec.encode(wording(messages))) == expected
    if len(messages) == 1:
        assert wording(messages[0]["content"]) == wording(messages)
    assert asked(messages) == messages[-1]["content"] == asked(messages[-1]["content"])


FAULTS = {
    "a number": (3, "must be a non-empty text or list of messages, got 3"),
    "nothing": ([], "must be a non-empty text or list of messages, got []"),
    "an empty text": ("", "must be a non-empty text, got ''"),
    "texts": ([MESSAGES[0], "hello"], "message 2 is 'hello'"),
    "no content": ([{"role": "user"}], "message 1 is {'role': 'user'}"),
    "pictures": ([{"role": "user", "content": [{"type": "image"}]}], "message 1 is"),
    "refused": ([{"role": "system", "content": "x"}], "is refused by the chat template: TemplateError: no system mess"),
}


@pytest.mark.parametrize(("value", "fault"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_rendered_is_named_with_file_line_and_key(tmp_path: Path, value: object, fault: str) -> None:
    wording = ChatTemplate.of(codec_of(tmp_path, chat_template=STRICT))
    path = tmp_path / "prompts.jsonl"
    write_lines(path, [{"chat": MESSAGES}, {"chat": value}])
    with pytest.raises(RelaxError) as raised:
        read_records(path, {"chat": wording})
    assert str(raised.value).startswith(f"{path}, line 2: 'chat' ")
    assert fault in str(raised.value)


def test_messages_without_the_flag_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_lines(path, [{"chat": "text"}, {"chat": MESSAGES}])
    with pytest.raises(RelaxError) as raised:
        read_records(path, {"chat": as_it_stands})
    assert str(raised.value).startswith(f"{path}, line 2: 'chat' must be a non-empty text, got a list; --apply-chat-")


def test_a_tokenizer_without_a_template_is_named(tmp_path: Path) -> None:
    for codec in (character_codec(), codec_of(tmp_path, chat_template=None)):
        with pytest.raises(RelaxError) as raised:
            ChatTemplate.of(codec)
        assert f"the tokenizer of {codec.origin} has no chat template" in str(raised.value)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run on messages, which began with a warm start on messages."""
    directory = tmp_path_factory.mktemp("chat")
    outfit(directory, "qwen2")
    system = {"role": "system", "content": "count"}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    write_lines(directory / "chats.jsonl", [{"messages": messages} for messages in chats])
    shown = [{"messages": messages, "response": f"{number}"} for number, messages in enumerate(chats)]
    write_lines(directory / "shown.jsonl", shown)
    data = ("--prompt-data", "chats.jsonl", "--eval-prompt-data", "chats.jsonl", "--sft-data", "shown.jsonl")
    words = (*data, "--input-key", "messages", "--apply-chat-template", "--warm-start-steps", 1)
    finished = relax(directory, "train", "--hf-checkpoint", "qwen2", *words, *BRIEF, "--output", "run")
    assert (finished.status, finished.err) == (0, ""), finished
    (directory / "run.out").write_text(finished.out)
    return directory


def rendered(directory: Path, messages: list[dict[str, str]]) -> str:
    loaded = transformers.AutoTokenizer.from_pretrained(directory)
    return str(loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize(("at", "model"), [(0, "qwen2"), (-1, "run/export")], ids=["before", "after"])
def test_the_model_reads_the_rendered_chat(chat: Path, at: int, model: str) -> None:
    """The run's greedy answers, before it and after it, are those of transformers to the same chats."""
    chats = [json.loads(line)["messages"] for line in (chat / "chats.jsonl").read_text().splitlines()[:6]]
    expected = greedy(chat / model, [rendered(chat / "qwen2", messages) for messages in chats], 6)
    shown = lines(chat / "run" / "eval.jsonl")[at]["samples"]
    assert [entry["response"] for entry in shown] == expected
    assert [entry["prompt"] for entry in shown] == QUESTIONS[:6]
    assert [record["phase"] for record in lines(chat / "run" / "metrics.jsonl")] == ["sft", "rl", "rl"]


def test_sample_renders_its_prompt_as_the_run_did(chat: Path) -> None:
    answered = relax(chat, "sample", "run", "what now?", "?")
    assert (answered.status, answered.err) == (0, "")
    prompts = [rendered(chat / "qwen2", [{"role": "user", "content": text}]) for text in ("what now?", "?")]
    first, second = greedy(chat / "run" / "export", prompts, 6)
    assert answered.out.startswith(f"what now?\n{first}")
    assert f"\n?\n{second}" in answered.out
    assert relax(chat, "eval", "run").status == 0
    assert f"relax sample run '{QUESTIONS[0]}'" in (chat / "run.out").read_text()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ("--prompt-data", "chats.jsonl", "--input-key", "messages"),
            "chats.jsonl, line 1: 'messages' must be a non-e",
        ),
        (
            ("--prompt-data", "questions.jsonl", "--apply-chat-template", "--tokenizer", "bare"),
            "tokenizer of bare has no",
        ),
    ],
)
def test_what_does_not_go_together_starts_nothing(chat: Path, words: tuple[object, ...], part: str) -> None:
    tokenizer(chat_template=None).save_pretrained(chat / "bare")
    finished = relax(chat, "train", "--hf-checkpoint", "qwen2", *words, *BRIEF, "--output", "never")
    assert finished.status == 1, finished
    assert finished.err.count(": error: ") == 1
    assert part in finished.err
    assert not (chat / "never").exists()
