"""The command line from outside: what it prints, how it exits, what it imports, and what it leaves alone."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from relax import cli
from relax.config import Config, configure
from relax.errors import RelaxError
from relax_core import ALGORITHMS
from tests.cli.conftest import Register

HEAVY = ("megatron", "ray", "transformers", "transfer_queue", "tensordict", "matplotlib", "relax.runtime.local")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Runtime(types.ModuleType):
    """Stands in for `relax.runtime.local` and remembers how it was called."""

    def __init__(self) -> None:
        super().__init__("relax.runtime.local")
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    def train(self, config: Config, run_dir: Path, *, resume: bool) -> int:
        self.calls.append((config, run_dir, resume))
        if self.error:
            raise self.error
        return 7

    def evaluate(self, run_dir: Path, *, checkpoint: int | None, samples: int | None) -> int:
        self.calls.append((run_dir, checkpoint, samples))
        return 0

    def sample(self, run_dir: Path, prompts: list[str], *, n: int, temperature: float, checkpoint: int | None) -> int:
        self.calls.append((run_dir, prompts, n, temperature, checkpoint))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    module = Runtime()
    monkeypatch.setitem(sys.modules, "relax.runtime.local", module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "one"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(configure(seed=5).to_yaml())
    return directory


def test_flags_reach_the_runtime_and_its_status_the_shell(runtime: Runtime) -> None:
    arguments = "train --lr 1e-3 --gdpo-reward-weights 1 -2e-1 0.5 --use-tis --no-use-tis --output out/x --seed=3"
    assert cli.main(arguments.split()) == 7
    ((config, directory, resume),) = runtime.calls
    assert isinstance(config, Config)
    assert (config.lr, config.use_tis, config.seed) == (1e-3, False, 3)
    assert config.hyperparameter_values()["gdpo_reward_weights"] == (1.0, -0.2, 0.5)
    assert (directory, resume) == (Path("out/x"), False)


def test_a_run_without_a_name_gets_the_next_free_one(runtime: Runtime) -> None:
    for _ in range(3):
        cli.main(["train"])
        directory = runtime.calls[-1][1]
        assert isinstance(directory, Path)
        directory.mkdir(parents=True)
    names = ["runs/arithmetic-gdpo-1234", "runs/arithmetic-gdpo-1234-2", "runs/arithmetic-gdpo-1234-3"]
    assert [str(call[1]) for call in runtime.calls] == names


def test_wrong_flags_are_told_line_by_line_and_nothing_starts(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    wrong = "--lrr 3 --lr --eps-clip x --gdpo-reward-keys --seed 1.5 --advantage-estimator gpdo --colocate yes"
    assert cli.main(["train", *wrong.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if "error: " in line]
    assert all(line.startswith("relax train: error: ") for line in lines)
    told = {line.removeprefix("relax train: error: ").split(":")[0] for line in lines}
    assert told == {
        "--lrr", "--lr", "--eps-clip", "--gdpo-reward-keys", "--seed", "--advantage-estimator", "unexpected 'yes'",
    }  # fmt: skip
    assert "did you mean --lr?" in err
    assert runtime.calls == []
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["eval"], "the following arguments are required: RUN"),
        (["algorithms", "gpdo"], "did you mean gdpo?"),
        (["algorithms", "gdpo", "x"], "unexpected 'x'"),
        (["sample", "nowhere", "p", "-n", "0"], "-n 0"),
        (["sample", "nowhere", "p", "--temperature", "nan"], "--temperature nan"),
        (["train", "--config", "missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_resuming_takes_the_run_as_it_was_configured(
    runtime: Runtime, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--resume", str(run)]) == 7
    ((config, directory, resume),) = runtime.calls
    assert isinstance(config, Config)
    assert (config.seed, directory, resume) == (5, run, True)
    assert cli.main(["train", "--resume", str(run), "--lr", "1"]) == 2
    assert "leave out --lr" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "sample", "report", "train --resume"])
def test_a_directory_that_is_no_run(command: str, runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["p"] if command == "sample" else []
    assert cli.main([*command.split(), "nowhere", *prompt]) == 1
    assert "nowhere: not the directory of a run" in capsys.readouterr().err
    assert runtime.calls == []


def test_eval_and_sample_reach_the_runtime(runtime: Runtime, run: Path) -> None:
    assert cli.main(["eval", str(run), "--samples", "9"]) == 0
    assert cli.main(["sample", str(run), "1+1=", "2+2=", "-n", "3", "--temperature", "0.5", "--checkpoint", "4"]) == 0
    assert runtime.calls == [(run, None, 9), (run, ["1+1=", "2+2="], 3, 0.5, 4)]


def test_a_known_fault_is_one_line_without_traceback(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    runtime.error = RelaxError("reward function: sample 3 returned nan")
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "relax train: error: reward function: sample 3 returned nan\n"


def test_an_unknown_fault_is_not_hidden(runtime: Runtime) -> None:
    runtime.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if name not in out] == []


def test_algorithms_are_told_from_their_records(capsys: pytest.CaptureFixture[str], register: Register) -> None:
    register(min_group_size=3)
    assert cli.main(["algorithms"]) == 0
    out = capsys.readouterr().out
    assert [name for name in ALGORITHMS if name not in out] == []
    assert cli.main(["algorithms", "made_up"]) == 0
    out = capsys.readouterr().out
    assert "min_group_size = 3" in out
    assert "--made-up-powers" in out
    assert "--eps-clip-c" in out
    assert cli.main(["algorithms", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == list(ALGORITHMS)
    (gdpo,) = (entry for entry in entries if entry["name"] == "gdpo")
    assert gdpo["papers"] == ["arXiv:2601.05242"]
    assert gdpo["traits"]["min_group_size"] == 2


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["algorithms"], ["report", "--help"], ["inspect", "--help"], ["--version"]],
)
def test_help_is_quick_and_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import contextlib, sys, time\nimport torch\nstart = time.process_time()\nfrom relax import cli\n"
        f"with contextlib.suppress(SystemExit): cli.main({arguments!r})\n"
        "print(time.process_time() - start, file=sys.stderr)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    root = Path(cli.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    seconds, heavy = done.stderr.splitlines()
    assert heavy == "[]"
    assert float(seconds) < 0.7
    assert len(done.stdout) > 5


@pytest.mark.parametrize(("arguments", "status"), [(["algorithms", "--json"], 0), (["algorithms", "gdop"], 2)])
def test_what_only_tells_ends_at_once_and_loses_no_word(arguments: list[str], status: int) -> None:
    done = _program(arguments, capture_output=True)
    assert done.returncode == status
    if status:
        assert b"gdpo" in done.stderr
    else:
        assert len(json.loads(done.stdout)) == len(ALGORITHMS)


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    here, there = os.pipe()
    os.close(here)
    done = _program(["algorithms"], stdout=there, stderr=subprocess.PIPE)
    os.close(there)
    assert (done.returncode, done.stderr) == (1, b"")


def _program(arguments: list[str], **streams: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "relax.cli", *arguments]
    root = Path(cli.__file__).parent.parent
    return subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(root)}, **streams)
