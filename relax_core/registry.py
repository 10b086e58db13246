"""Every algorithm, by name. Adding one is a file in `relax_core/algorithms/` and a line here."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from relax_core.algorithm import Algorithm
from relax_core.algorithms.cispo import CISPO
from relax_core.algorithms.clip_cov import CLIP_COV
from relax_core.algorithms.dapo import DAPO
from relax_core.algorithms.dr_grpo import DR_GRPO
from relax_core.algorithms.gdpo import GDPO
from relax_core.algorithms.gmpo import GMPO
from relax_core.algorithms.gpg import GPG
from relax_core.algorithms.grpo import GRPO
from relax_core.algorithms.gspo import GSPO
from relax_core.algorithms.gspo_token import GSPO_TOKEN
from relax_core.algorithms.kl_cov import KL_COV
from relax_core.algorithms.m2po import M2PO
from relax_core.algorithms.opo import OPO
from relax_core.algorithms.ppo import PPO
from relax_core.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from relax_core.algorithms.reinforce_plus_plus_baseline import REINFORCE_PLUS_PLUS_BASELINE
from relax_core.algorithms.remax import REMAX
from relax_core.algorithms.rloo import RLOO
from relax_core.algorithms.sapo import SAPO

# `Any`, since a mapping holds algorithms of unlike hyperparameters: the one place where their type is not known.
ALGORITHMS: Final[Mapping[str, Algorithm[Any]]] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "gmpo": GMPO,
    "sapo": SAPO,
    "cispo": CISPO,
    "clip_cov": CLIP_COV,
    "kl_cov": KL_COV,
    "rloo": RLOO,
    "remax": REMAX,
    "opo": OPO,
    "gpg": GPG,
    "m2po": M2PO,
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
    "reinforce_plus_plus_baseline": REINFORCE_PLUS_PLUS_BASELINE,
    "ppo": PPO,
    "gdpo": GDPO,
}
"""Name -> record. `get_algorithm` is the same with a helpful error."""


def get_algorithm(name: str) -> Algorithm[Any]:
    """The algorithm of that name.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    close = get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown algorithm {name!r}: known are {', '.join(ALGORITHMS)}{hint}")
