"""An algorithm that no file of the package knows, to see what follows from its record alone."""

from collections.abc import Callable, Iterator

import attrs
import pytest

from relax.config import options
from relax_core import ALGORITHMS, Algorithm, Traits
from relax_core.algorithms import ppo, stages
from relax_core.hyperparameters import Clip, KlInReward, hyperparameter

Register = Callable[..., Algorithm[object]]


@attrs.frozen(kw_only=True)
class MadeUpHyperparameters(KlInReward, Clip):
    """One flag of its own, of a type that no other has."""

    made_up_powers: tuple[int, ...] = hyperparameter((1, 2), "Powers that nobody needs.")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Puts an algorithm with the given traits into the registry, for one test."""

    def add(name: str = "made_up", **traits: object) -> Algorithm[object]:
        algorithm = Algorithm(
            name=name,
            hyperparameters=MadeUpHyperparameters,
            normalize_rewards=stages.group_mean_std,
            estimate_advantages=stages.broadcast,
            policy_loss=stages.ppo_clip,
            value_loss=ppo.value_loss if traits.get("needs_critic") else None,
            traits=Traits(**traits),
        )
        monkeypatch.setitem(ALGORITHMS, name, algorithm)
        options.cache_clear()
        return algorithm

    yield add
    options.cache_clear()


@pytest.fixture
def own_data(tmp_path: object) -> dict[str, object]:
    """Settings of a run on data of one's own, with nothing from a recipe."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1="}\n')
    return {"prompt_data": path, "custom_rm_path": "my_rewards.score", "reward_key": "score"}
