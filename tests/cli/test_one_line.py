"""One new file and one line in the registry: a copy of the packages gets an algorithm that reads components, has a flag
and needs a critic, and everything that is offered or checked follows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import relax
from tests.runtime.conftest import SHAPE

ROOT = Path(relax.__file__).parent.parent

FILE = '''
"""Zigzag: an algorithm that exists for one test. arXiv 0000.00001."""

import attrs

from relax_core import losses
from relax_core.algorithm import Advantages, Algorithm, Traits
from relax_core.algorithms import gdpo, stages
from relax_core.hyperparameters import between, hyperparameter


@attrs.frozen(kw_only=True)
class Hyperparameters(gdpo.Hyperparameters):
    """GDPO's and one more."""

    zigzag_depth: float = hyperparameter(3.0, "How deep it goes.", check=between(1.0, 5.0))


def estimate_advantages(hyperparameters, scores, tokens, *, values=None, **others):
    """The scores less what the critic expected."""
    spread = stages.broadcast(hyperparameters, scores, tokens, **others)
    return Advantages(spread.advantages - values.to(spread.advantages.dtype), spread.returns)


def value_loss(hyperparameters, values, old_values, returns, tokens):
    """As PPO's."""
    return losses.value_loss(values, old_values, returns, tokens, value_clip=hyperparameters.zigzag_depth)


ZIGZAG = Algorithm(
    name="zigzag",
    hyperparameters=Hyperparameters,
    normalize_rewards=gdpo.normalize_rewards,
    estimate_advantages=estimate_advantages,
    policy_loss=stages.ppo_clip,
    value_loss=value_loss,
    traits=Traits(reads_components=True, needs_critic=True, min_group_size=5),
)
'''

SCRIPT = """
import contextlib, io, json, sys
from relax import cli
from relax.catalogue import trait_table
from relax.config import Config, configure, ConfigError
from relax.topology import Placement, roles
from relax_core import ALGORITHMS
def call(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return out.getvalue() + err.getvalue()
told = {
    "help": call("train", "--help"),
    "listed": call("algorithms"),
    "entry": call("algorithms", "zigzag", "--json"),
    "wrong": call("train", "--advantage-estimator", "zigzag", "--zigzag-depth", "7", "--n-samples-per-prompt", "4",
                  "--gdpo-reward-keys", "a"),
    "foreign": call("train", "--zigzag-depth", "2"),
    "roles": roles(ALGORITHMS["zigzag"].traits, Placement()),
    "async_roles": roles(ALGORITHMS["zigzag"].traits, Placement(mode="fully_async")),
}
json.dump(told, sys.stdout)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    for package in ("relax", "relax_core"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "relax_core" / "algorithms" / "zigzag.py").write_text(FILE)
    registry = root / "relax_core" / "registry.py"
    lines = registry.read_text().replace('    "grpo": GRPO,\n', '    "grpo": GRPO,\n    "zigzag": ZIGZAG,\n')
    importing = "from relax_core.algorithms.grpo import GRPO\n"
    registry.write_text(lines.replace(importing, importing + "from relax_core.algorithms.zigzag import ZIGZAG\n"))
    return root


def python(root: Path, *words: object) -> str:
    """What Python prints in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told(copy: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(python(copy, "-c", SCRIPT))
    return found


def test_it_is_offered(told: dict[str, str]) -> None:
    assert "--zigzag-depth X" in told["help"]
    assert "zigzag" in told["listed"]
    entry = json.loads(told["entry"])
    assert entry["traits"] == {"needs_critic": True, "min_group_size": 5, "reads_components": True}
    assert {"flag": "--zigzag-depth", "default": 3.0, "help": "How deep it goes."} in entry["hyperparameters"]


def test_it_is_checked(told: dict[str, str]) -> None:
    for part in ("--zigzag-depth: ", "needs at least 5 (trait min_group_size)", "needs at least 2 keys"):
        assert part in told["wrong"]
    assert "--zigzag-depth: gdpo has no such hyperparameter; it belongs to zigzag" in told["foreign"]


def test_it_gets_its_roles(told: dict[str, str]) -> None:
    assert told["roles"] == ["actor", "critic", "rollout"]
    assert told["async_roles"] == ["actor", "critic", "rollout", "advantages", "reference", "actor_fwd"]


def test_it_trains_with_its_critic(copy: Path) -> None:
    sizes = ("--rollout-batch-size", 4, "--n-samples-per-prompt", 5, "--rollout-max-response-len", 6)
    brief = ("--warm-start-steps", 0, "--num-rollout", 2, "--eval-interval", 0, "--eval-samples", 4)
    python(copy, "-m", "relax.cli", "train", "--advantage-estimator", "zigzag", *SHAPE, *sizes, *brief,
           "--dynamic-sampling-filter-path", "none", "--output", "run")  # fmt: skip
    first, second = map(json.loads, (copy / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["samples/trained"] == second["samples/trained"] == 20
    assert first.keys() >= {"value_loss", "value_grad_norm", "clipfrac"}


def test_it_is_compared_and_documented(copy: Path) -> None:
    rows = [{"group_id": i // 5, "rewards": {"a": i % 2, "b": i % 3}} for i in range(20)]
    (copy / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "zigzag" in python(copy, "-m", "relax.cli", "inspect", "rollouts.jsonl", "--compare", "grpo,zigzag")
    python(copy, "-m", "relax.documentation", "pages")
    assert "--zigzag-depth" in (copy / "pages" / "algorithms" / "zigzag.md").read_text()
    assert "zigzag" in (copy / "pages" / "algorithms" / "index.md").read_text()
