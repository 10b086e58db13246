"""Files of rollouts, written as a user's would be."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (or lines that are texts already) as JSON lines and returns the path."""

    def to(rows: Iterable[object], name: str = "rollouts.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return to
