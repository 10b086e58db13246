"""Calls a reward function on samples and refuses, at once and by name, whatever is not a mapping of real numbers."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import attrs

from relax.data.samples import Sample
from relax.errors import RelaxError
from relax.importing import import_function
from relax_core.rewards import component_matrix


@attrs.frozen
class RewardFunction:
    """A user's `function(sample) -> {key: number}`; every mapping must hold `keys`. None: the sample is aborted."""

    path: str
    function: Callable[[Sample], object]
    keys: tuple[str, ...]

    @classmethod
    def load(cls, path: str, keys: Sequence[str]) -> "RewardFunction":
        """Import the function at the dotted `path`. Errors: `RelaxError`."""
        return cls(path, import_function(path, "--custom-rm-path"), tuple(dict.fromkeys(keys)))

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards.

        Errors: `RelaxError` naming the function, the sample (prompt and response) and the key and value at fault.
        """
        scored = [attrs.evolve(sample, rewards=self._call(sample)) for sample in samples]
        self._check([sample for sample in scored if sample.rewards is not None])
        return scored

    def of_groups(self, groups: Sequence[tuple[Sample, ...]]) -> list[tuple[Sample, ...]]:
        """`score`, group by group."""
        scored = iter(self.score([sample for group in groups for sample in group]))
        return [tuple(islice(scored, len(group))) for group in groups]

    def expect_any(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Raises RelaxError where all samples that were rewarded together were aborted."""
        samples = [sample for group in groups for sample in group]
        if samples and all(sample.rewards is None for sample in samples):
            raise RelaxError(
                f"{self._of(samples[0])}: returned None, expected a mapping with the keys {self.keys}; None says that "
                f"a sample was aborted, but all {len(samples)} of this draw got it: is a return missing?"
            )

    def _call(self, sample: Sample) -> Mapping[str, object] | None:
        try:
            rewards = self.function(sample)
        except (Exception, SystemExit) as error:  # a user's function may raise anything; where it did is what helps
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise RelaxError(f"{self._of(sample)}: {type(error).__name__}: {error} ({place})") from error
        if rewards is None:
            return None
        if not isinstance(rewards, Mapping):
            raise RelaxError(f"{self._of(sample)}: returned {rewards!r}, expected a mapping with the keys {self.keys}")
        return dict(rewards)  # a function may give the same mapping again, changed

    def _check(self, samples: Sequence[Sample]) -> None:
        try:
            component_matrix([sample.rewards for sample in samples], self.keys)
        except (TypeError, ValueError):
            # The whole batch was checked in one call; now find which sample it was, to show it.
            for sample in samples:
                try:
                    component_matrix([sample.rewards], self.keys)
                except (TypeError, ValueError) as error:
                    raise RelaxError(f"{self._of(sample)}: {error}; it returned {sample.rewards!r}") from error
            raise

    def _of(self, sample: Sample) -> str:
        prompt, response = str(sample.prompt.get("prompt", ""))[:60], sample.response[:60]
        return f"--custom-rm-path {self.path}, group {sample.group}, prompt {prompt!r}, response {response!r}"
