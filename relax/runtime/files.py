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

    def rewind(self, step: int) -> None:
        """Drop what was recorded after `step`: a run that was killed may have written on after its last checkpoint."""
        for path in (self.metrics, self.evaluations):
            if path.exists():
                kept = [line for line in path.read_text(encoding="utf-8").splitlines(True) if _step(line) <= step]
                write_whole(path, "".join(kept))


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either its old content or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
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
