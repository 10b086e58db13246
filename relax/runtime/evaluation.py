"""How good the policy is on held-out prompts: greedy answers, the same reward function, nothing trained on."""

from collections.abc import Mapping

import attrs

from relax.data.samples import Sample
from relax.data.seeds import generator
from relax.data.wording import asked
from relax.rewards.loader import RewardFunction
from relax.roles.rollout import rewarded
from relax.rollout.metrics import sample_metrics
from relax.rollout.sampling import Prompts, Sampler

SHOWN = 8


@attrs.frozen
class Evaluator:
    """Answers every one of its prompts once, greedily."""

    sampler: Sampler
    prompts: Prompts
    reward: RewardFunction
    input_key: str

    def evaluate(self) -> dict[str, object]:
        """Means of every reward and of the response length, and a few answers to look at."""
        groups = self.sampler.respond(self.prompts, n=1, temperature=0.0, generator=generator(0, "greedy"))
        samples = [sample for group in rewarded(self.reward, groups) for sample in group]
        return {
            "problems": len(samples),
            "greedy": True,
            **sample_metrics(samples),
            "samples": [self._shown(sample) for sample in samples[:SHOWN]],
        }

    def _shown(self, sample: Sample) -> Mapping[str, object]:
        return {"prompt": asked(sample.prompt[self.input_key]), "response": sample.response, "rewards": sample.rewards}
