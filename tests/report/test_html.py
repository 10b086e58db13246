"""The report needs nothing but itself, whatever state its run is in, and says what the records say."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from relax.errors import RelaxError
from relax.report.html import write_report
from relax.report.story import Story
from tests.report.conftest import WriteRun, evaluation, rl_step, sft_step

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Collects text and whatever would be loaded from elsewhere; complains about tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def test_a_page_that_needs_nothing_else(write_run: WriteRun) -> None:
    page = Page(write_report(write_run()))
    assert page.loads == []
    assert "link" not in page.tags
    assert "img" not in page.tags
    assert re.findall(r"https?://|@import|url\(|fetch\(|XMLHttp", page.source) == []


def test_what_a_finished_run_tells(write_run: WriteRun) -> None:
    run = write_run()
    page = Page(write_report(run))
    assert "one finished" in page.text
    assert "45.0 % → 87.5 %" in page.text  # all recorded samples are right or wrong
    assert "format 0.5 → 0.5" in page.text  # 0.5 occurs, so this is no share
    assert "32 prompts with 8 responses each" in page.text
    assert "gradient norm" not in page.text  # not recorded
    assert "Constant throughout: filtered samples 8, learning rate 5e−4." in page.text
    assert "<answer>before & 2</answer>" in page.text
    assert "<answer>after & 2</answer>" in page.text
    assert f"relax train --config {run}/config.yaml" in page.text
    assert "--resume" not in page.text
    assert page.tags.count("svg") == 3 + 3  # components; response length, loss, warm start


def test_the_time_outside_the_model_is_told(write_run: WriteRun) -> None:
    run = write_run()
    seconds = Story.read(run).seconds()
    assert seconds.steps == 3
    assert seconds.overhead == pytest.approx(0.2)  # of 1.0: reward, advantages, other
    assert "A step took 1.0 s on average. 20.0 % of it was spent outside" in Page(write_report(run)).text


def test_pauses_count_neither_as_step_nor_as_overhead(write_run: WriteRun) -> None:
    step = {**rl_step(1, 1), "seconds/evaluation": 7.0, "seconds/checkpoint": 2.0, "seconds/step": 10.0}
    seconds = Story.read(write_run(metrics=[step])).seconds()
    assert (seconds.step, seconds.overhead) == (pytest.approx(1.0), pytest.approx(0.2))


def test_texts_of_the_model_stay_text(write_run: WriteRun) -> None:
    bad = evaluation("before", "rl", 0, 0.0)
    sample = {"prompt": "<script>alert(1)</script>", "response": "</td>", "rewards": {"<b>": 1.0}}
    page = Page(
        write_report(
            write_run(evaluations=[{**bad, "samples": [sample]}, {**bad, "when": "after", "samples": [sample]}])
        )
    )
    assert "<script>alert(1)</script>" in page.text
    assert page.tags.count("script") == 1
    assert "b" in page.tags  # ours
    assert "<b> 1" in page.text


@pytest.mark.parametrize("cut", range(6))
def test_a_run_that_is_still_going_or_was_stopped(write_run: WriteRun, cut: int) -> None:
    metrics = [*map(sft_step, (1, 2)), *(rl_step(2 + rollout, rollout) for rollout in (1, 2))][: max(cut - 1, 0)]
    evaluations = [evaluation("before", "sft", 0, 0.0), evaluation("before", "rl", 2, 0.45)][:cut]
    run = write_run(metrics=metrics, evaluations=evaluations)
    page = Page(write_report(run))
    assert "not finished" in page.text
    assert f"relax train --resume {run}" in page.text
    assert "→" not in page.text.split("Rewards")[0].replace("before reinforcement →", "")


def test_a_run_without_any_record(write_run: WriteRun) -> None:
    run = write_run()
    (run / "metrics.jsonl").unlink()
    (run / "eval.jsonl").unlink()
    assert "No step is recorded yet" in Page(write_report(run)).text


def test_sft_alone(write_run: WriteRun) -> None:
    run = write_run(
        loss_type="sft",
        metrics=[sft_step(1), sft_step(2)],
        evaluations=[evaluation("before", "sft", 0, 0.0), evaluation("after", "sft", 2, 0.5)],
    )
    page = Page(write_report(run))
    assert "0.0 % → 50.0 %" in page.text
    assert "gdpo" not in page.text.split("How to go on")[0].lower()


def test_a_run_on_data_that_is_gone(write_run: WriteRun) -> None:
    run = write_run()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("prompt_data: null", "prompt_data: /gone.jsonl"))
    assert "finished" in Page(write_report(run)).text


def test_settings_of_another_version_do_not_matter(write_run: WriteRun) -> None:
    run = write_run()
    (run / "config.yaml").write_text("advantage_estimator: unheard_of\nnew_setting: 3\n")
    assert "finished" in Page(write_report(run)).text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match="not the directory of a run"):
        write_report(tmp_path)
