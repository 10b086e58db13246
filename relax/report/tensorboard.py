"""The numbers of a run as TensorBoard events."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.utils.tensorboard import SummaryWriter

COORDINATES = frozenset({"step", "rollout", "phase", "when", "problems", "greedy"})


class TensorBoard:
    """Writes the numbers of metric and evaluation records, tagged `<prefix>/<key>` or as they are if they have a group.

    `resumed_at` hides events of later steps, which a killed run may have left behind.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        purge = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge)

    def write(self, record: Mapping[str, object]) -> None:
        """Add a record of metrics.jsonl or eval.jsonl at its step."""
        prefix = "eval/" if "when" in record else "sft/" if record.get("phase") == "sft" else ""
        for key, value in record.items():
            if key not in COORDINATES and isinstance(value, int | float):
                tag = prefix + key if prefix or "/" in key else f"train/{key}"
                self._writer.add_scalar(tag, value, int(str(record["step"])))

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
