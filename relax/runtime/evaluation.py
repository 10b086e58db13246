"""How good the policy is on held-out prompts: greedy answers, the same reward function, nothing trained on."""

from collections.abc import Mapping

import attrs

from relax.data.samples import Sample
from relax.data.wording import asked
from relax.rewards.loader import RewardFunction
from relax.rollout.metrics import sample_metrics
from relax.rollout.sampling import Prompts, Sampler
from relax.rollout.sharing import Share, alone

SHOWN = 8


@attrs.frozen
class Evaluator:
    """Answers every one of its prompts once, greedily."""

    sampler: Sampler
    prompts: Prompts
    reward: RewardFunction
    input_key: str
    share: Share = alone

    def evaluate(self) -> dict[str, object]:
        """Means of every reward and of the response length, and a few answers to look at."""
        groups = self.share(
            len(self.prompts.ids),
            lambda share: self.sampler.best(self.prompts.take(share), share.start),
            self.reward.of_groups,
            place="answers to held-out prompts",
        )
        self.reward.expect_any(groups)
        samples = [sample for group in groups for sample in group]
        return {
            "problems": len(samples),
            "greedy": True,
            **sample_metrics(samples),
            "samples": [self._shown(sample) for sample in samples[:SHOWN]],
        }

    def _shown(self, sample: Sample) -> Mapping[str, object]:
        return {"prompt": asked(sample.prompt[self.input_key]), "response": sample.response, "rewards": sample.rewards}
