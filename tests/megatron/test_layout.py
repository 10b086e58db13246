"""Which layouts are refused and what they say, and that a process knows its own."""

import attrs
import pytest

from relax.megatron.layout import Layout
from relax.megatron.model import build_model
from relax.megatron.runtime import megatron_process
from tests.megatron import jobs
from tests.megatron.conftest import MODEL


def test_replicas_are_what_the_model_leaves() -> None:
    assert Layout().data(4) == 4
    assert Layout(tensor=2, pipeline=2, context=2).data(24) == 3


def test_every_part_that_cannot_be_split_is_named_at_once() -> None:
    model = attrs.evolve(MODEL, num_layers=3, num_attention_heads=6, num_query_groups=3, vocab_size=6)
    with pytest.raises(ValueError, match="does not fit the model") as refused:
        Layout(tensor=4, pipeline=2).check_model(model)
    message = str(refused.value)
    for fault in (
        "--tensor-model-parallel-size 4: does not divide the 6 query heads (--num-attention-heads)",
        "does not divide the 3 key-value heads (--num-query-groups)",
        "--tensor-model-parallel-size 4: leaves a rank without any of the 6 token ids",
        "--pipeline-model-parallel-size 2: does not divide the 3 layers (--num-layers)",
    ):
        assert fault in message
    assert "ffn" not in message  # 48 columns divide by 4
    Layout(tensor=3, pipeline=3, context=5).check_model(attrs.evolve(model, vocab_size=40))  # 14 + 14 + 12


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--tensor-model-parallel-size 0.*; --context-parallel-size -1: must be"):
        Layout(tensor=0, context=-1).check_job(1)


def _refused_then_accepted() -> tuple[str, Layout, str]:
    with pytest.raises(ValueError, match="do not divide") as refused, megatron_process(0, Layout(tensor=2, pipeline=2)):
        pass
    with megatron_process(0, Layout(tensor=2), timeout_s=jobs.TIMEOUT_S):
        with pytest.raises(ValueError, match="does not divide") as impossible:
            build_model(attrs.evolve(MODEL, num_attention_heads=3, num_query_groups=3), 0)
        return str(refused.value), Layout.current(), str(impossible.value)


def test_a_job_that_does_not_fit_is_refused_on_every_rank_and_one_that_does_is_known() -> None:
    found = jobs.start(2, _refused_then_accepted)
    assert found[0] == found[1]
    refused, current, impossible = found[0]
    assert "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2" in refused
    assert "4 ranks for a model do not divide the job's 2 processes" in refused
    assert current == Layout(tensor=2)
    assert "3 query heads (--num-attention-heads)" in impossible
