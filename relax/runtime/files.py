"""What a run leaves behind, and how it is brought back to where a checkpoint was taken."""

import json
import os
from pathlib import Path

import attrs


@attrs.frozen
class RunFiles:
    """The paths inside `runs/NAME/`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "eval.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    def rewind(self, step: int, evaluated: int) -> None:
        """Drop steps recorded after `step` and evaluations of after `evaluated` (-1: all of them).

        A run that was killed may have written on after its last checkpoint.
        """
        for path, last in ((self.metrics, step), (self.evaluations, evaluated)):
            if path.exists():
                lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may hold its other breaks
                write_whole(path, "".join(f"{line}\n" for line in lines if _step(line) <= last))


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either its old content or the new one, never a part.

    Several processes may do so at once.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # the torn last line of a killed run
