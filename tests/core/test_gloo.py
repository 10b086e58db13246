"""Whitening in groups of two and four real processes, which go on after each fault: none may hang."""

import pytest
import torch

import relax_core as rc
from tests.core.gloo import run_scenarios

NAN = float("nan")
GOOD = {
    "uneven shares": (([1.0, 3.0], [2]), ([2.0, 6.0, 5.5], [3])),
    "two batches, uneven": (([0.9, 1.1, -1.2], [2, 1]), ([0.8, 1.2, -0.8, -1.1, -0.9], [2, 3])),
    "an empty rank": (([1.0, 2.0, 4.0], [3]), ([], [0])),
    "an empty share of one batch": (([1.0, 2.0], [2, 0]), ([0.5, 3.0, 1e-3], [1, 2])),
}
BAD = {
    "malformed sizes": (([1.0, 2.0], [2]), ([1.0, 2.0], [3]), "add up to 3, not to 2"),
    "missing segmentation": (
        ([1.0, 2.0], "missing"),
        ([1.0, 2.0], [2]),
        "segmentation into optimizer batches is missing",
    ),
    "missing sizes": (([1.0, 2.0], [2]), ([1.0, 2.0], None), "sizes of the optimizer batches are missing"),
    "non-finite": (([1.0, 2.0], [1, 1]), ([NAN, 2.0], [1, 1]), "score of sample 0 is nan"),
    "differing counts": (([1.0, 2.0], [2]), ([1.0, 2.0], [1, 1]), "disagree on the number of optimizer batches"),
    "empty everywhere": (([1.0, 2.0], [0, 2]), ([1.0], [0, 1]), "holds no sample on any rank"),
}


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> dict[str, list]:
    """Of all scenarios; ranks beyond the second repeat the first one's healthy part."""
    scenarios = {}
    for name, case in (GOOD | BAD).items():
        first, second = case[:2]
        healthy = second if name == "missing segmentation" else first
        scenarios[name] = [first, second] + [healthy] * (request.param - 2)
    if request.param == 4:
        scenarios["differing counts"][2:] = [([1.0], [1])] * 2
    return dict(
        zip(scenarios, zip(scenarios.values(), run_scenarios(list(scenarios.values())), strict=True), strict=True)
    )


@pytest.mark.parametrize("name", GOOD)
def test_processes_agree_with_a_single_process_to_the_bit(name: str, outcomes: dict[str, list]) -> None:
    shares, results = outcomes[name]
    scores = [torch.tensor(values, dtype=torch.float64).split(sizes) for values, sizes in shares]
    algorithm = rc.get_algorithm("gdpo")
    for batch in range(len(scores[0])):
        whole = torch.cat([own[batch] for own in scores])
        alone = algorithm.estimate_advantages(algorithm.hyperparameters(), whole, rc.Tokens.full([1] * len(whole)))
        parts = [torch.tensor(r, dtype=torch.float64).split(s[1])[batch] for r, s in zip(results, shares, strict=True)]
        assert torch.equal(torch.cat(parts), alone.advantages)


@pytest.mark.parametrize("name", BAD)
def test_every_process_raises_the_same_error(name: str, outcomes: dict[str, list]) -> None:
    _, results = outcomes[name]
    assert {result[0] for result in results} == {"ValueError"}
    assert all(BAD[name][2] in result[1] for result in results)
