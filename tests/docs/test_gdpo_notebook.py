"""The notebook runs from top to bottom and finds what the paper says (arXiv 2601.05242, Figures 2 and 3)."""

import json
from typing import Any

import pytest

from tests.docs.copied import ROOT


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    import matplotlib as mpl

    mpl.use("agg")
    notebook = json.loads((ROOT / "docs" / "gdpo.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "gdpo.ipynb", "exec"), names)
    return names


def test_two_responses(found: dict[str, Any]) -> None:
    assert found["pair_scores"]["GRPO"].tolist() == pytest.approx([-0.7071, 0.7071] * 3, abs=1e-4)
    wide = [-0.7071, 0.7071, -1.4142, 1.4142, -0.7071, 0.7071]
    assert found["pair_scores"]["GDPO"].tolist() == pytest.approx(wide, abs=1e-4)


def test_counts(found: dict[str, Any]) -> None:
    assert found["counts"] == {
        "GRPO": [size * (size - 1) // 2 + 1 for size in range(2, 9)],
        "GRPO without std": [size * (size + 1) // 2 for size in range(2, 9)],
        "GDPO": [3, 6, 14, 26, 38, 59, 81],
    }


def test_scale_and_cancellation(found: dict[str, Any]) -> None:
    grpo, gdpo = (found["scale_scores"][name].tolist() for name in ("GRPO", "GDPO"))
    assert grpo.index(min(grpo)) == 0
    assert gdpo.index(min(gdpo)) != 0
    assert not any(scores.any() for scores in found["cancelled"].values())
    assert found["weighted"].tolist() == pytest.approx([-0.8660, 0.8660] * 2, abs=1e-4)
