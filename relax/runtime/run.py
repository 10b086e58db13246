"""One run from its current position to its end: the warm start, then rollouts, with evaluations and checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import attrs

from relax.agreement import gathering
from relax.config import Config
from relax.data.samples import Sequences
from relax.data.seeds import seed_global
from relax.errors import PeerLost, RelaxError
from relax.megatron import checkpoint
from relax.roles.rollout import Rollout
from relax.rollout.metrics import sample_metrics, zero_signal_metrics
from relax.runtime.clock import Clock
from relax.runtime.files import RunFiles
from relax.runtime.parts import Parts, imitation_steps, optimizer_config
from relax.runtime.recorder import Recorder
from relax.runtime.stop import StopRequest

PATIENCE = 10


@attrs.frozen
class Position:
    """How far a run has come: lines recorded, SFT steps, rollouts, prompts drawn, and the step last evaluated at.

    All of a run's randomness follows from its seed and its position.
    """

    step: int = 0
    imitated: int = 0
    rollouts: int = 0
    drawn: int = 0
    evaluated: int = -1


class Run:
    """Calls the roles in order, in this process."""

    def __init__(
        self, config: Config, files: RunFiles, parts: Parts, recorder: Recorder, stop: StopRequest, position: Position
    ) -> None:
        self.config = config
        self.files = files
        self.parts = parts
        self.recorder = recorder
        self.stop = stop
        self.stops = gathering("requests to stop")
        self.position = position
        self.clock = Clock()
        self.saved: Position | None = None
        self.writing: checkpoint.Writing | None = None
        self.barren = 0
        self.training = False  # inside a rollout's optimizer steps, where no position says how far they came

    def finish(self) -> bool:
        """Train until the end (True) or until somebody asks to stop (False); either way a checkpoint is left."""
        try:
            done = self._finish()
        except PeerLost:
            raise
        except Exception:
            self._settle()
            raise
        self._settle()
        return done

    def _finish(self) -> bool:
        wanted = imitation_steps(self.config)
        if self.position.imitated < wanted:
            self._imitate(wanted)
        if self.parts.rollout is not None and not self._asked_to_stop():
            with self._kept_on_error():
                self._reinforce()
        done = self.position.imitated >= wanted and self._reinforced()
        if done:
            self._evaluate("after", "sft" if self.parts.rollout is None else "rl")
        self._save()
        return done

    @contextmanager
    def _kept_on_error(self) -> Iterator[None]:
        """A fault in what the user supplied, a reward function say, costs no training that was done before it."""
        try:
            yield
        except (checkpoint.CheckpointError, PeerLost):
            raise
        except RelaxError:
            if not self.training:
                with suppress(PeerLost):  # what is told is what came first
                    self._save()
            raise

    def _asked_to_stop(self) -> bool:
        """Whether any rank was: all stop at the same step."""
        return bool(self.stops("asked to stop" if self.stop.requested else None))

    def _reinforced(self) -> bool:
        return self.parts.rollout is None or self.position.rollouts >= self.config.num_rollout

    def _imitate(self, wanted: int) -> None:
        demonstrations = self.parts.demonstrations
        assert demonstrations is not None, "the configuration's checks ask for sft_data where there is SFT"
        if self.position.imitated == 0:
            self._evaluate("before", "sft")
        # Demonstrations are taken as they are: the sampling temperature has no part in them.
        self.parts.trainer.temperature = 1.0
        self.clock.lap()
        while self.position.imitated < wanted and not self._asked_to_stop():
            batch = demonstrations.batch(self.position.imitated)
            metrics = self.parts.actor.imitate(batch, self.clock)
            self._advance(imitated=self.position.imitated + 1)
            self._record("sft", batch, metrics)
            if self._due(self.config.save_interval, self.position.imitated) and self.position.imitated < wanted:
                self._save()
        if self.position.imitated == wanted and self.parts.rollout is not None:
            self.parts.trainer.reset_optimizer(optimizer_config(self.config, imitating=False))

    def _reinforce(self) -> None:
        if self.position.rollouts == 0:
            self.parts.trainer.keep_reference()
            if self.parts.critic is not None:
                self.parts.critic.start_from(self.parts.trainer.model)
            self._evaluate("before", "rl")
            self._save()
        self.parts.trainer.temperature = self.config.rollout_temperature
        self.clock.lap()
        while not self._reinforced() and not self._asked_to_stop():
            self._rollout()
            if self._reinforced():
                break
            if self._due(self.config.eval_interval, self.position.rollouts):
                self._evaluate("during", "rl")
            if self._due(self.config.save_interval, self.position.rollouts):
                self._save()

    def _rollout(self) -> None:
        """Sample with the current weights, train on what is worth it, and record a line for each optimizer step."""
        role = self.parts.rollout
        assert role is not None
        self._refresh_engine()
        rollout = role.collect(self.position.drawn, self.clock)
        self._check_patience(rollout)
        with self.clock.phase("metrics"):
            metrics = sample_metrics(rollout.generated) | zero_signal_metrics(
                (*rollout.kept, *rollout.dropped), rollout.silent, self.config.reward_keys
            )
            metrics |= {f"filtered/{reason}": float(count) for reason, count in rollout.reasons.items()}
        filtered = float(sum(map(len, rollout.dropped)) + len(rollout.aborted))
        self.training = True
        for trained, update in self.parts.actor.train(rollout, self.clock):
            self._advance()
            counts = {"samples/filtered": filtered, "samples/generated": filtered + update["samples/trained"]}
            self._record("rl", trained, {**update, **metrics, **counts})
            filtered = 0.0  # what was filtered out is told once
        if not rollout.kept:
            self._advance()
            counts = {"samples/trained": 0.0, "samples/filtered": filtered, "samples/generated": filtered}
            self._record("rl", Sequences((), ()), {**metrics, **counts})
        self._advance(0, rollouts=self.position.rollouts + 1, drawn=rollout.position)
        self.training = False

    def _check_patience(self, rollout: Rollout) -> None:
        self.barren = 0 if rollout.kept else self.barren + 1
        if self.barren == PATIENCE:
            raise RelaxError(
                f"every group of {PATIENCE} rollouts in a row was dropped (in the last: {_counted(rollout.reasons)}): "
                "there is nothing left to learn from these rewards, or the filter is too strict "
                "(--dynamic-sampling-filter-path)"
            )

    def _record(self, phase: str, trained: Sequences, metrics: Mapping[str, float]) -> None:
        seconds = self.clock.lap()
        working = (
            seconds["seconds/step"] - seconds.get("seconds/evaluation", 0.0) - seconds.get("seconds/checkpoint", 0.0)
        )
        rate = trained.num_tokens / working
        head = {"step": self.position.step, "phase": phase, "rollout": self.position.rollouts}
        self.recorder.step({**head, **metrics, **seconds, "tokens_per_second": rate})

    def _evaluate(self, when: str, phase: str) -> None:
        if self.parts.evaluator is None or self.position.evaluated == self.position.step:
            return
        seed_global(self.config.seed, "evaluation", self.position.step)
        self._refresh_engine()
        with self.clock.phase("evaluation"):
            result = self.parts.evaluator.evaluate()
        self.recorder.evaluation({"when": when, "phase": phase, "step": self.position.step, **result})
        self._advance(0, evaluated=self.position.step)

    def _refresh_engine(self) -> None:
        with self.clock.phase("weights"):
            self.parts.engine.update_weights(self.parts.trainer)

    def _save(self) -> None:
        if self.saved == self.position:
            return
        with self.clock.phase("checkpoint"):
            self._settle()
            self.writing = checkpoint.begin(
                self.files.checkpoints,
                self.parts.trainer,
                {"position": attrs.asdict(self.position), "config": self.files.config.read_text(encoding="utf-8")},
                step=self.position.step,
                keep=self.config.keep_checkpoints,
                critic=self.parts.critic,
                behind=self.config.async_save,
            )
            if not self.config.async_save:
                self._settle()
        self.saved = self.position

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if any. Raises CheckpointError when it could not be."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.finish()

    def _advance(self, steps: int = 1, **changes: int) -> None:
        self.position = attrs.evolve(self.position, step=self.position.step + steps, **changes)

    @staticmethod
    def _due(interval: int, count: int) -> bool:
        return interval > 0 and count % interval == 0


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())
