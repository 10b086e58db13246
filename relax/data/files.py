"""The data files of a run."""

from pathlib import Path

import attrs


@attrs.frozen
class DataFiles:
    """JSON-lines files: prompts to train on, prompts to evaluate on, demonstrations to imitate."""

    prompts: Path
    held_out: Path
    demonstrations: Path
