"""`report.html`: a run on one page that needs nothing else, for somebody who was not there."""

from importlib.metadata import version
from pathlib import Path
from typing import Final

import attrs

from relax.report.charts import line_chart, number
from relax.report.page import Figure, environment
from relax.report.story import MODEL_PHASES, OUR_PHASES, PAUSES, Record, Seconds, Story, pairs
from relax.runtime.files import write_whole

SAMPLES: Final = 12

# What is drawn beside the rewards, if it was recorded: key, title, and what a reader should make of it.
CURVES: Final = (
    ("response/length", "response length", "tokens in a sampled response"),
    ("response/truncated", "cut responses", "share that reached the length limit unfinished"),
    ("entropy", "entropy", "of the next token; near 0, nothing new is tried"),
    ("grad_norm", "gradient norm", "before clipping; spikes mean unstable steps"),
    ("loss", "loss", "a surrogate: its level says little about progress"),
    ("ppo_kl", "policy change", "mean log-ratio between sampling and trained policy"),
    ("clipfrac", "clip fraction", "share of tokens whose ratio left the clip range"),
    ("advantage/std", "spread of the advantages", "standard deviation over an optimizer batch"),
    ("zero_std/groups", "groups without signal", "all responses to the prompt were worth the same"),
    ("samples/filtered", "filtered samples", "sampled, but not trained on: no signal"),
    ("samples/trained", "trained samples", "in an optimizer step"),
    ("tokens_per_second", "tokens per second", "trained response tokens, over the whole step"),
    ("lr", "learning rate", "of the optimizer"),
)


@attrs.frozen
class Change:
    """A held-out number before and after."""

    name: str
    before: str
    after: str
    share: bool


@attrs.frozen
class Slice:
    """A part of the time: `kind` is model, ours or pause."""

    name: str
    kind: str
    seconds_a_step: str
    share: float


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's directory and return its path; the run may still be going.

    Errors: `RelaxError` where the directory is not that of a run, or a file in it is malformed.
    """
    path = run_dir / "report.html"
    write_whole(path, render(Story.read(run_dir)))
    return path


def render(story: Story) -> str:
    """The page."""
    pages = environment("relax.report")
    pages.filters["duration"] = duration
    seconds = story.seconds()
    figures, constant = curves(story)
    return pages.get_template("report.html").render(
        story=story,
        version=version("relax-rl"),
        summary=summary(story),
        changes=changes(story),
        rewards=[figure for name in story.components if (figure := reward_figure(story, name))],
        curves=figures,
        constant=constant,
        pairs=pairs(story, SAMPLES),
        slices=slices(seconds),
        seconds=seconds,
        config=(story.run_dir / "config.yaml").read_text(encoding="utf-8"),
    )


def summary(story: Story) -> list[str]:
    """What was trained, how and on what, in sentences."""
    get, count = story.setting, story.count
    source = f"the {get('recipe')} recipe" if get("recipe") else get("prompt_data") or get("sft_data")
    size = f"{count('num_layers')} layers of width {count('hidden_size')}"
    start = get("hf_checkpoint")
    model = f"The model in {start}" if start else "A Qwen3-shaped language model, random at first"
    sentences = [f"{model}, {size}, was trained on {source}."]
    if count("warm_start_steps") and get("loss_type") != "sft":
        sentences.append(
            f"It began with a warm start: {count('warm_start_steps')} steps of imitation (SFT) on "
            f"{count('warm_start_batch_size')} demonstrations each."
        )
    if story.algorithm:
        steps = count("num_steps_per_rollout")
        sentences.append(
            f"Then {story.algorithm.name} took over: {count('num_rollout')} rollouts of {count('rollout_batch_size')} "
            f"prompts with {count('n_samples_per_prompt')} responses each, "
            f"{'one optimizer step' if steps == 1 else f'{steps} optimizer steps'} a rollout."
        )
        sentences.append(_reward_sentence(story))
    return [*sentences, f"Seed {get('seed')}."]


def _reward_sentence(story: Story) -> str:
    keys, weights = story.setting("gdpo_reward_keys"), story.setting("gdpo_reward_weights")
    where = f"scored by {story.setting('custom_rm_path')}"
    if not isinstance(keys, list) or not keys:
        return f"It maximizes one number, {story.setting('reward_key')}, {where}."
    factors = weights if isinstance(weights, list) and weights else [1.0] * len(keys)
    terms = ", ".join(f"{key} (weight {number(float(factor))})" for key, factor in zip(keys, factors, strict=False))
    return f"It maximizes {terms}, {where}."


def changes(story: Story) -> list[Change]:
    """Every held-out number before reinforcement and at the latest evaluation."""
    before, latest = story.before, story.latest
    if before is None:
        return []
    names = {f"reward/{name}": name for name in story.components}
    return [
        Change(
            name=name,
            before=_figure(before, key, share := _is_share(story, key)),
            after=_figure(latest, key, share) if latest else "",
            share=share,
        )
        for key, name in names.items()
        if key in before
    ]


def _figure(record: Record, key: str, share: bool) -> str:
    value = record.get(key)
    if not isinstance(value, int | float):
        return "–"
    return f"{value * 100:.1f} %" if share else number(value)


def _is_share(story: Story, key: str) -> bool:
    """Whether a component is 0 or 1 in every recorded sample, so that its mean is a share."""
    values = {
        sample["rewards"].get(key.removeprefix("reward/"))
        for record in story.evaluations
        if isinstance(samples := record.get("samples"), list)
        for sample in samples
    }
    return values == {0, 1}


def reward_figure(story: Story, name: str) -> Figure | None:
    """A reward component: the mean of every rollout's samples, and the held-out evaluations; None while all is one."""
    line, dots = story.curve(f"reward/{name}"), story.held_out(f"reward/{name}")
    if len(line.steps) + len(dots.steps) < 2:
        return None
    return Figure(name, "", number((dots or line).values[-1]), line_chart(name, line, dots))


def curves(story: Story) -> tuple[list[Figure], list[str]]:
    """The metrics that were recorded as charts; those that never changed in words."""
    figures, constant = [], []
    drawn = [(title, note, story.curve(key)) for key, title, note in CURVES]
    if story.phase == "rl":
        note = "cross-entropy of the demonstrations, in nats a token"
        drawn.append(("loss of the warm start", note, story.curve("loss", "sft")))
    for title, note, line in drawn:
        if len(set(line.values)) > 1:
            figures.append(Figure(title, note, number(line.smoothed().values[-1]), line_chart(title, line)))
        elif line:
            constant.append(f"{title} {number(line.values[0])}")
    return figures, constant


def slices(seconds: Seconds) -> list[Slice]:
    """The time by phase: the model's first, then ours, then pauses; each with its share of the steps."""
    kinds = {"model": MODEL_PHASES, "ours": OUR_PHASES, "pause": PAUSES}
    known: dict[str, tuple[str, str]] = {
        key: (name, kind) for kind, phases in kinds.items() for key, name in phases.items()
    }
    order = [*known, *(key for key in seconds.totals if key not in known)]
    found = []
    for key in order:
        total = seconds.totals.get(key, 0.0)
        name, kind = known.get(key, (key, "ours"))
        if total > 0 and seconds.step > 0:
            found.append(Slice(name, kind, duration(total / seconds.steps), total / seconds.step))
    return found


def duration(seconds: float) -> str:
    """For people: `412 ms`, `8.2 s`, `4 min 12 s`, `1 h 05 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
