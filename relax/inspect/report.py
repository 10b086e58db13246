"""All that is told about files, in a form that text, JSON and HTML share."""

from collections.abc import Sequence
from pathlib import Path as File

import attrs

from relax.inspect.asked import asked, weights_of
from relax.inspect.faults import Faults
from relax.inspect.fields import Choice, Fields, find
from relax.inspect.findings import Findings, examine
from relax.inspect.read import batches, files_of, head
from relax.inspect.table import Reader, Table, file_and_line


@attrs.frozen
class Report:
    """Of these files: where their values stand, what is broken in them, and what the rest comes to.

    `left_out` counts rows that have no vote, since their group or a reward is broken; lines that are no rows are not
    counted there, but are among the faults.
    """

    files: tuple[str, ...]
    fields: Fields
    faults: Faults
    left_out: int
    findings: Findings

    def where(self, place: int) -> str:
        """`line 17`, with the file where there are several."""
        file, line = file_and_line(place)
        return f"line {line}" if len(self.files) == 1 else f"{self.files[file]}:{line}"


def inspect(paths: Sequence[File], choice: Choice, weights: Sequence[float], names: Sequence[str]) -> Report:
    """Read files and directories, and hold what they say against the algorithms of those names.

    The fields are told from the first file. Errors: `ConfigError` for a choice that does not fit it; `RelaxError` for
    what cannot be read.
    """
    files = files_of(paths)
    fields = find(head(files[0]), choice)
    vector = weights_of(weights, fields)
    algorithms = asked(names, fields, vector)
    faults = Faults()
    reader = Reader(fields, faults)
    parts = [
        reader.rows(batch, str(file), number)
        for number, file in enumerate(files)
        for batch in batches(file, fields.paths, faults)
    ]
    order = {str(file): number for number, file in enumerate(files)}
    faults.kept.sort(key=lambda fault: (order[fault.file], fault.line))
    table = Table.gathered(reader.columns, parts)
    findings = examine(table, algorithms, list(fields.components), vector)
    return Report(tuple(map(str, files)), fields, faults, reader.left_out, findings)
