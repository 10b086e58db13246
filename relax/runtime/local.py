"""The local runtime: every role in this process, one after another. This is what the commands call.

Under torchrun there are several such processes, which train together; the first one writes files and tells the user.
"""

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from relax.agreement import stage
from relax.config import Config, configure
from relax.data.prompts import Worded
from relax.data.seeds import derived_seed
from relax.data.wording import asked
from relax.errors import ConfigError, RelaxError
from relax.megatron import checkpoint
from relax.megatron.groups import leads
from relax.megatron.runtime import job_size, megatron_process
from relax.report.html import write_report
from relax.rollout.sampling import Prompts
from relax.runtime.files import RunFiles, write_whole
from relax.runtime.parts import Parts, build, imitation_steps, layout_of, phases, with_data
from relax.runtime.policy import Policy
from relax.runtime.recorder import Recorder, Silence
from relax.runtime.run import Position, Run
from relax.runtime.stop import StopRequest

STOPPED = 130  # what a shell reports for a program that Ctrl-C ended


def train(config: Config, run_dir: Path, *, resume: bool) -> int:
    """Train as configured, leaving everything in `run_dir`; returns the exit status.

    With `resume`, go on from the latest checkpoint of `run_dir`. Errors: `RelaxError`.
    """
    files, layout = RunFiles(run_dir), layout_of(config)
    if faults := list(layout.job_faults(job_size())):
        raise ConfigError(faults)
    timeout_s = 60 * config.distributed_timeout_minutes
    with StopRequest() as stop, megatron_process(config.seed, layout, timeout_s=timeout_s):
        with _removed_unless_begun(files, resume):
            run = _prepare(config, files, stop, resume)
        finished = False
        try:
            with run.recorder:
                finished = run.finish()
        finally:
            if not finished and leads():
                print(f"\nTo go on: {_program()} train --resume {run_dir}", file=sys.stderr)
        if not finished:
            return STOPPED
        run.parts.policy.export(run.parts.trainer, files.export)
        leading = leads()
    if leading:
        print(_farewell(run_dir, write_report(run_dir), _example(run.parts, config.input_key)))
    return 0


def _example(parts: Parts, key: str) -> str:
    """A prompt of the run's own, for a shell."""
    prompts = parts.evaluator.prompts if parts.evaluator else parts.rollout.prompts if parts.rollout else None
    return "PROMPT" if prompts is None else shlex.quote(asked(prompts.records[0][key]))


@contextmanager
def _removed_unless_begun(files: RunFiles, resume: bool) -> Iterator[None]:
    """A run that could not be prepared leaves nothing behind: no half-made directory that looks like a run."""
    existed = files.root.exists()
    try:
        yield
    except BaseException:
        if not resume and files.root.is_dir():
            shutil.rmtree(files.data, ignore_errors=True)
            files.config.unlink(missing_ok=True)
            if not existed:
                shutil.rmtree(files.root, ignore_errors=True)
        raise


def _prepare(config: Config, files: RunFiles, stop: StopRequest, resume: bool) -> Run:
    position, latest = Position(), None
    if resume:
        latest = checkpoint.latest(files.checkpoints)
        if latest is not None:
            position = _position(latest)
    try:
        files.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RelaxError(f"{files.root}: cannot be made: {error.strerror}") from error
    with stage("reading the data and building the model"):
        complete, policy = with_data(config, files), Policy.of(config)
        weights = policy.weights() if latest is None else None
        parts = build(complete, policy, imitating=position.imitated < imitation_steps(config))
        if weights is not None:
            parts.trainer.start_from(weights)
    if latest is not None:
        checkpoint.load(latest, parts.trainer, parts.critic)
    with stage("writing the configuration"):
        if leads():
            if resume:
                files.rewind(position.step, position.evaluated)
            else:
                write_whole(files.config, config.to_yaml())
    recorder = (Recorder if leads() else Silence)(files, phases(config), position.step)
    run = Run(complete, files, parts, recorder, stop, position)
    run.saved = None if latest is None else position
    return run


def _position(path: Path) -> Position:
    kept: Mapping[str, int] = checkpoint.read_extra(path)["position"]
    return Position(**kept)


def _farewell(run_dir: Path, report: Path, example: str) -> str:
    return "\n".join(
        (
            f"Report:    {report}",
            f"Model:     {run_dir / 'export'} (Hugging Face format)",
            f"Try it:    {_program()} sample {run_dir} {example}",
            f"Measure:   {_program()} eval {run_dir}",
        )
    )


def _program() -> str:
    """How the user calls this program: by name where the shell finds it, else by the path that was typed."""
    called = sys.argv[0]
    return "relax" if shutil.which("relax") is not None or Path(called).name != "relax" else called


@contextmanager
def _restored(run_dir: Path, step: int | None, eval_samples: int | None = None) -> Iterator[tuple[Config, Parts]]:
    """A run's parts with the weights of a checkpoint (None: the latest)."""
    files = RunFiles(run_dir)
    config = with_data(configure(files.config), files)
    if eval_samples is not None:
        config = attrs.evolve(config, eval_samples=eval_samples)
    found = checkpoint.latest(files.checkpoints) if step is None else checkpoint.at_step(files.checkpoints, step)
    if found is None:
        raise RelaxError(f"{files.checkpoints}: holds no checkpoint yet")
    with megatron_process(config.seed):
        position = _position(found)
        parts = build(config, Policy.of(config), imitating=position.imitated < imitation_steps(config))
        checkpoint.load(found, parts.trainer, parts.critic)
        parts.engine.update_weights(parts.trainer)
        yield config, parts


def evaluate(run_dir: Path, *, checkpoint: int | None, samples: int | None) -> int:
    """Print how a run's model does on its held-out prompts; returns the exit status."""
    with _restored(run_dir, checkpoint, samples) as (_, parts):
        if parts.evaluator is None:
            raise RelaxError(f"{run_dir}: has no held-out prompts or no reward function (--eval-prompt-data)")
        result = parts.evaluator.evaluate()
    print(f"{result['problems']} held-out prompts, greedy")
    for name, value in result.items():
        if "/" in name:
            print(f"  {name:<24} {value:.4f}")
    return 0


def sample(run_dir: Path, prompts: Sequence[str], *, n: int, temperature: float, checkpoint: int | None) -> int:
    """Print `n` responses of a run's model to each of `prompts`; returns the exit status."""
    with _restored(run_dir, checkpoint) as (config, parts):
        key, wordings = config.input_key, {config.input_key: parts.wording}
        encoded = Prompts.encode(
            [Worded.of({key: prompt}, wordings, "on the command line") for prompt in prompts],
            key,
            parts.policy.codec,
            config.max_position_embeddings - config.rollout_max_response_len,
        )
        seeds = [derived_seed(config.seed, "sample", place) for place in range(len(prompts))]
        groups = parts.sampler.respond(encoded, n=n, temperature=temperature, seeds=seeds)
    between = "\n" if config.apply_chat_template else ""  # where the template says that the answer begins
    for prompt, group in zip(prompts, groups, strict=True):
        for answer in group:
            print(f"{prompt}{between}{answer.response}{'' if answer.completion.finished else ' ...'}")
    return 0
