"""What there is to tell about a run, read from its files: also while it goes on, or after it was stopped."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from relax.catalogue import Entry
from relax.errors import RelaxError
from relax.report.charts import Points
from relax.report.metrics import read_records
from relax_core import ALGORITHMS

Record = Mapping[str, object]

MODEL_PHASES: Final = {
    "rollout": "sampling responses",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "log_probs": "old log-probs",
    "reference": "reference log-probs",
    "values": "values",
    "critic": "critic",
}
OUR_PHASES: Final = {
    "reward": "reward function",
    "advantages": "advantages",
    "weights": "weights to the engine",
    "metrics": "metrics",
    "other": "everything else",
}
PAUSES: Final = {"evaluation": "evaluations", "checkpoint": "checkpoints"}


@attrs.frozen
class Story:
    """A run's configuration (name -> value, as its config.yaml has them), metrics and evaluations, oldest first."""

    run_dir: Path
    settings: Mapping[str, object]
    metrics: Sequence[Record]
    evaluations: Sequence[Record]

    @classmethod
    def read(cls, run_dir: Path) -> "Story":
        """Errors: `RelaxError` where the directory is not that of a run, or a file in it is malformed."""
        from relax.config.yaml_text import read  # PyYAML comes with the extras

        config = run_dir / "config.yaml"
        if not config.is_file():
            raise RelaxError(f"{run_dir}: not the directory of a run (it has no config.yaml)")
        settings = {given.name: given.value for given in read(config)}
        return cls(run_dir, settings, read_records(run_dir / "metrics.jsonl"), read_records(run_dir / "eval.jsonl"))

    def setting(self, name: str) -> object:
        """A value of the configuration; None where config.yaml does not have it."""
        return self.settings.get(name)

    def count(self, name: str) -> int:
        """A whole number of the configuration, 0 where it has none."""
        value = self.settings.get(name)
        return value if isinstance(value, int) else 0

    @property
    def algorithm(self) -> Entry | None:
        """The algorithm in words, if this version knows it."""
        algorithm = ALGORITHMS.get(str(self.setting("advantage_estimator")))
        return Entry.of(algorithm) if algorithm and self.setting("loss_type") != "sft" else None

    @property
    def components(self) -> tuple[str, ...]:
        """The reward components, in the order of the configuration and then of the records."""
        keys = self.setting("gdpo_reward_keys")
        first = [f"reward/{key}" for key in keys] if isinstance(keys, list) else []
        seen = dict.fromkeys(key for record in (*self.evaluations, *self.metrics) for key in record if _is_reward(key))
        return tuple(
            key.removeprefix("reward/")
            for key in [*(k for k in first if k in seen), *(k for k in seen if k not in first)]
        )

    @property
    def phase(self) -> str:
        """What the report is about: reinforcement, or SFT as long as there is nothing else."""
        records = (*self.metrics, *self.evaluations)
        return "rl" if any(record.get("phase") == "rl" for record in records) else "sft"

    def curve(self, key: str, phase: str | None = None) -> Points:
        """A metric over the optimizer steps of a phase (of the one that the report is about)."""
        return _points([record for record in self.metrics if record.get("phase") == (phase or self.phase)], key)

    def held_out(self, key: str) -> Points:
        """A number of the evaluations over the optimizer steps of the phase that the report is about."""
        return _points([record for record in self.evaluations if record.get("phase") == self.phase], key)

    def evaluation(self, when: str, phase: str) -> Record | None:
        """The evaluation before or after a phase, if it took place."""
        found = [record for record in self.evaluations if record.get("when") == when and record.get("phase") == phase]
        return found[-1] if found else None

    @property
    def before(self) -> Record | None:
        """The evaluation that the phase started from."""
        return self.evaluation("before", self.phase)

    @property
    def latest(self) -> Record | None:
        """The newest evaluation that is not the first: what came of it, so far."""
        newest = self.evaluations[-1] if self.evaluations else None
        return newest if newest is not self.before else None

    @property
    def finished(self) -> bool:
        """Whether the evaluation that ends a run is there, or without evaluations, its last step."""
        if self.evaluations:
            return any(record.get("when") == "after" for record in self.evaluations)
        return bool(self.metrics) and self.metrics[-1].get("rollout") == self.count("num_rollout")

    def seconds(self) -> "Seconds":
        """How the time of the phase's steps was spent."""
        steps = [record for record in self.metrics if record.get("phase") == self.phase]
        names = dict.fromkeys(key for record in steps for key in record if key.startswith("seconds/"))
        totals = {name.removeprefix("seconds/"): sum(_points(steps, name).values) for name in names}
        totals.pop("step", None)
        return Seconds(len(steps), totals)

    @property
    def elapsed(self) -> float:
        """Seconds of all recorded steps."""
        return sum(_points(self.metrics, "seconds/step").values)


@attrs.frozen
class Seconds:
    """Seconds by phase, over `steps` optimizer steps."""

    steps: int
    totals: Mapping[str, float]

    @property
    def step(self) -> float:
        """Seconds in all, without the pauses for evaluations and checkpoints."""
        return sum(seconds for name, seconds in self.totals.items() if name not in PAUSES)

    @property
    def overhead(self) -> float:
        """The share of the steps that is neither sampling nor the model's forward, backward or optimizer."""
        ours = sum(seconds for name, seconds in self.totals.items() if name not in MODEL_PHASES | PAUSES)
        return ours / self.step if self.step else 0.0


@attrs.frozen
class Pair:
    """Two responses to the same held-out prompt."""

    prompt: str
    before: str
    after: str
    before_rewards: Mapping[str, float]
    after_rewards: Mapping[str, float]


def pairs(story: Story, most: int) -> list[Pair]:
    """The first held-out samples that were recorded both before and after, whatever became of them."""
    if story.before is None or story.latest is None:
        return []
    after = {str(sample["prompt"]): sample for sample in _samples(story.latest)}
    return [
        Pair(
            prompt=str(sample["prompt"]),
            before=str(sample["response"]),
            after=str(after[str(sample["prompt"])]["response"]),
            before_rewards=_rewards(sample),
            after_rewards=_rewards(after[str(sample["prompt"])]),
        )
        for sample in _samples(story.before)
        if str(sample["prompt"]) in after
    ][:most]


def _is_reward(key: str) -> bool:
    return key.startswith("reward/")


def _points(records: Sequence[Record], key: str) -> Points:
    found = [
        (float(step), float(value))
        for record in records
        if isinstance(value := record.get(key), int | float) and isinstance(step := record.get("step"), int | float)
    ]
    return Points(tuple(step for step, _ in found), tuple(value for _, value in found))


def _samples(record: Record) -> list[Record]:
    samples = record.get("samples")
    return [s for s in samples if isinstance(s, dict)] if isinstance(samples, list) else []


def _rewards(sample: Record) -> Mapping[str, float]:
    rewards = sample.get("rewards")
    found = rewards if isinstance(rewards, dict) else {}
    return {str(key): float(value) for key, value in found.items() if isinstance(value, int | float)}
