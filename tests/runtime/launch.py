"""Commands in processes of their own, forked from one that has imported everything: a run costs what it computes."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import attrs

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    ["relax.cli", "relax.runtime.local", "relax.config.command_line", "tests.runtime.warm", "torch.utils.tensorboard"]
)
TIME_LIMIT = 240  # seconds, for machines that have other things to do

Preparation = Callable[[], None]


@attrs.frozen
class Finished:
    """What a command left: exit status (negative: the signal that ended it) and what it printed."""

    status: int
    out: str
    err: str


@attrs.frozen
class Started:
    """A command that is going on."""

    process: BaseProcess
    streams: Path

    def interrupt(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def finish(self) -> Finished:
        self.process.join(TIME_LIMIT)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still going after {TIME_LIMIT} s:\n{self._text('out')}{self._text('err')}")
        return Finished(self.process.exitcode, self._text("out"), self._text("err"))

    def _text(self, stream: str) -> str:
        return self.streams.with_suffix(f".{stream}").read_text(encoding="utf-8")


def start(directory: Path, words: Sequence[object], prepare: Preparation | None = None) -> Started:
    """Start `relax WORDS` in `directory`; `prepare` (a module-level function or a partial of one) is called before."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small to share
    streams = directory / f".command-{len(list(directory.glob('.command-*.out')))}"
    streams.with_suffix(".out").touch()  # the name is taken, before the process is there
    process = FORKS.Process(target=_command, args=(directory, [str(word) for word in words], streams, prepare))
    process.start()
    return Started(process, streams)


def relax(directory: Path, *words: object, prepare: Preparation | None = None) -> Finished:
    """Run `relax WORDS` in `directory` and wait for its end."""
    return start(directory, words, prepare).finish()


def _command(directory: Path, words: list[str], streams: Path, prepare: Preparation | None) -> None:
    os.chdir(directory)
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(streams.with_suffix(suffix), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    if prepare is not None:
        prepare()
    from relax.cli import main

    sys.exit(main(words))


def lines(path: Path) -> list[dict[str, object]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def timeless(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """Records without what a clock says."""
    return [
        {key: value for key, value in record.items() if not key.startswith("seconds/") and key != "tokens_per_second"}
        for record in records
    ]


def signal_at_step(step: int, number: int = signal.SIGINT, times: int = 1) -> None:
    """Have the process signalled as soon as it has recorded optimizer step `step`."""
    from relax.runtime.recorder import Recorder

    original = Recorder.step

    def record(self: Recorder, entry: dict[str, object]) -> None:
        original(self, entry)
        if entry["step"] == step:
            for _ in range(times):
                os.kill(os.getpid(), number)

    Recorder.step = record
