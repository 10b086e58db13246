"""Losses and recursions once more: NumPy and plain loops, written from their papers, for laws to hold the core against.

All take float64 vectors of tokens; `rows` are the responses, each the indices of its tokens that count.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Rows = Sequence[NDArray[np.int64]]


def surrogate(ratio: Vector, a: Vector, low: float, high: float) -> Vector:
    return np.maximum(-ratio * a, -np.clip(ratio, 1 - low, 1 + high) * a)


def ppo(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    return surrogate(np.exp(lp - old), a, 0.2, 0.2)


def dapo(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    return surrogate(np.exp(lp - old), a, 0.2, 0.28)


def reinforce(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    return -a * lp


def gspo(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    ratio = np.ones_like(lp)
    for row in rows:
        ratio[row] = np.exp(np.mean(lp[row] - old[row])) if len(row) else 1.0
    return surrogate(ratio, a, 0.2, 0.2)


def gmpo(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    loss = np.zeros_like(lp)
    for row in rows:
        d, sign = lp[row] - old[row], np.sign(a[row])
        kept = sign * np.minimum(sign * d, sign * np.clip(d, -0.2, 0.2))
        loss[row] = -a[row] * np.exp(kept.mean()) if len(row) else 0.0
    return loss


def sapo(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    tau = np.array([1.0 if each > 0 else 1.05 for each in a])
    return -a * 4 / tau / (1 + np.exp(-tau * (np.exp(lp - old) - 1)))


def cispo(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    ratio = np.exp(lp - old)
    return -np.array([min(r, 1.2) if each >= 0 else max(r, 0.8) for r, each in zip(ratio, a, strict=True)]) * a * lp


def m2po(lp: Vector, old: Vector, a: Vector, rows: Rows) -> Vector:
    d, counted = lp - old, np.concatenate([np.zeros(0, dtype=int), *rows])
    harmful = np.abs([d[t] for t in counted if d[t] * np.sign(a[t]) > 0])
    if not len(harmful) or np.mean(harmful**2) <= 0.01:
        return -np.exp(d) * a
    least, most = 0.0, harmful.max()
    for _ in range(200):
        tau = (least + most) / 2
        least, most = (tau, most) if np.mean(np.minimum(harmful, tau) ** 2) <= 0.01 else (least, tau)
    return surrogate(np.exp(d), a, max(1 - np.exp(-least), 0.3), max(np.exp(least) - 1, 0.5))


LOSSES: dict[str, Callable[[Vector, Vector, Vector, Rows], Vector]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "ppo", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), ppo),
    **dict.fromkeys(("rloo", "remax", "opo", "gpg"), reinforce),
    **dict.fromkeys(("gspo", "gspo_token"), gspo),
    "dapo": dapo,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "m2po": m2po,
}
"""By algorithm, at its default hyperparameters. Those of clip_cov and kl_cov: `covarying`."""


def covarying(
    lp: Vector, old: Vector, a: Vector, rows: Rows, share: float, coef: float | None
) -> tuple[Vector, Vector]:
    """Of kl_cov with this `coef`, or of clip_cov (None) for covariances 1/4 to 4: loss, and what clipfrac marks."""
    counted = np.concatenate([*rows, np.empty(0, int)])
    ratio = np.exp(lp - old)
    if coef is None:
        loss, marked = surrogate(ratio, a, 0.2, 0.2), np.zeros(len(lp))
        marked[(ratio > 1.2) & (a > 0) | (ratio < 0.8) & (a < 0)] = 1
    else:
        loss, marked = -ratio * a, np.zeros(len(lp))
    most: list[tuple[float, int]] = []
    for token in counted:
        covariance = (lp[token] - lp[counted].mean()) * (a[token] - a[counted].mean())
        if coef is not None or (not marked[token] and 0.25 <= covariance <= 4):
            most.append((-covariance, token))
    for _, token in sorted(most)[: max(1, int(len(counted) * share))]:
        loss[token] = 0 if coef is None else loss[token] + coef * abs(lp[token] - old[token])
        marked[token] = 1
    return loss, np.where(np.isin(np.arange(len(lp)), counted), marked, 0)


def value(v: Vector, old: Vector, target: Vector) -> Vector:
    return np.maximum((v - target) ** 2, (np.clip(v, old - 0.2, old + 0.2) - target) ** 2)


def gae(r: Vector, v: Vector, rows: Rows, gamma: float, lambd: float) -> Vector:
    out = np.zeros_like(r)
    for row in rows:
        next_v = next_a = 0.0
        for t in reversed(row):
            next_a = r[t] + gamma * next_v - v[t] + gamma * lambd * next_a
            out[t], next_v = next_a, v[t]
    return out


def returns(r: Vector, lengths: Sequence[int], mask: NDArray[np.bool_], gamma: float) -> Vector:
    out, t = np.zeros_like(r), len(r)
    for length in reversed(lengths):
        following = 0.0
        for _ in range(length):
            t -= 1
            following = (r[t] if mask[t] else 0.0) + gamma * following
            out[t] = following if mask[t] else 0.0
    return out


def kl(d: Vector, kind: str) -> Vector:
    return {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "low_var_kl": np.clip(np.exp(-d) - 1 + d, -10, 10)}[kind]
