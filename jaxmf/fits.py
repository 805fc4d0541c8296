"""The tightest bound of the form of Theorem 1 of arXiv:2605.10931 above measured distances."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import optimize, special

from ._typing import ArrayLike
from .bounds import ConcentrationBound, check_positive
from .errors import InputError


class Fit(NamedTuple):
    """The tightest `bound` above a table of measured W₂.

    - `slack`: bound − w2 ≥ 0 at every point, in the shape of the table.
    - `touches`: indices of the points that the bound touches, one a row.
    - `ratio`: the mean of bound/w2 over the points with w2 > 0, which is what was minimised.
    """

    bound: ConcentrationBound
    slack: np.ndarray
    touches: np.ndarray
    ratio: float


def fit_bound(beta: ArrayLike, t: ArrayLike, w2: ArrayLike, c: float | int | None = None) -> Fit:
    """The bound of Theorem 1 that is nowhere below measured distances and closest to them.

    Of all (K₁, C₁, K₂, c) with bound ≥ w2 at every point it minimises the mean of bound/w2. A point
    with w2 = 0 is below every bound and does not enter the mean. Computed on the host, in float64;
    K₁ and K₂ are then enlarged by rounding units until no point is above the bound as JAX evaluates
    it. The search starts from many rates and is deterministic.

    **Arguments:** `beta`, `t`, `w2`, which broadcast against each other (say `beta[:, None]`,
    `t[None, :]` and a table); `c`, the rate if theory gives it (`assumptions(...).rate`).

    **Raises:** `InputError` for entries that are not finite, β ≤ 0, t < 0, w2 < 0, shapes that do
    not broadcast, or fewer points with w2 > 0 than constants to find (4, or 3 with c).
    """
    tables = {"beta": beta, "t": t, "w2": w2} | ({} if c is None else {"c": c})
    tables = {name: np.asarray(table, np.float64) for name, table in tables.items()}
    for name, table in tables.items():
        check_positive(name, table, or_zero=name in ("t", "w2"))
    beta, t, w2 = tables["beta"], tables["t"], tables["w2"]
    try:
        beta, t, w2 = np.broadcast_arrays(beta, t, w2)
    except ValueError:
        raise InputError(
            f"beta, t and w2 have shapes {beta.shape}, {t.shape} and {w2.shape}, which do not "
            "broadcast; give beta[:, None], t[None, :] and a table w2"
        ) from None
    points, constants = np.count_nonzero(w2), 4 if c is None else 3
    if points < constants:
        raise InputError(
            f"w2 has {points} positive entries; finding {constants} constants needs at least as "
            "many"
        )
    measured = w2 > 0
    log_s = np.log(np.log1p(beta[measured]) / beta[measured]) / 2
    k1, c1, k2, c = _tightest(log_s, t[measured], np.log(w2[measured]), tables.get("c"))
    late, early = log_s + k1 + c1 * t[measured], k2 - c * t[measured]
    ratio = np.exp(np.logaddexp(late, early) - np.log(w2[measured]))
    touches = np.argwhere(measured)[ratio - 1 < 1e-9]

    lift = 4 * float(jnp.finfo(jnp.zeros(()).dtype).eps)
    while True:
        bound = ConcentrationBound((1 + lift) * np.exp(k1), c1, (1 + lift) * np.exp(k2), c)
        slack = np.asarray(bound(beta, t), np.float64) - w2
        if np.all(slack >= 0):
            return Fit(bound, slack, touches, float(ratio.mean()))
        lift *= 2


def _tightest(
    log_s: np.ndarray, t: np.ndarray, log_w2: np.ndarray, c: np.ndarray | None
) -> np.ndarray:
    """(log K₁, C₁, log K₂, c) of the least mean ratio.

    The best (K₁, K₂) for given rates are a linear programme. Its value has several local minima in
    the rates, so a grid of them is searched, and the best are improved in all four constants by
    sequential quadratic programming. In these the log of the bound is convex: a step that keeps the
    linearised bound above the table keeps the bound above it.
    """
    last = t.max() or 1.0
    t = t / last
    first = t[t > 0].min(initial=1.0)
    offsets = np.stack([log_s - log_w2, -log_w2], axis=1)
    times = np.stack([t, -t], axis=1)

    def log_ratio(theta):
        return np.logaddexp(*(offsets + theta[::2] + theta[1::2] * times).T)

    def slopes(theta):
        late, early = (offsets + theta[::2] + theta[1::2] * times).T
        share = special.expit(late - early)
        return np.stack([share, share * t, 1 - share, (share - 1) * t], axis=1)

    def mean(theta):
        with np.errstate(over="ignore"):  # a line search may go far before it comes back
            return np.exp(log_ratio(theta)).mean()

    def gradient(theta):
        return np.exp(log_ratio(theta)) @ slopes(theta) / len(t)

    def best(c1, c):
        rates = np.array([c1, c])
        k1, k2 = _programme(offsets + rates * times)
        return np.array([k1, c1, k2, c])

    # Up to where a term changes by e^40 over the table, or before its first positive time.
    late = np.concatenate([np.geomspace(1e-2, 1, 8), np.arange(2.0, 41.0)])
    early = np.geomspace(1e-2, 40 / first, 8) if c is None else c * last
    grid = np.array([[best(c1, c) for c in np.atleast_1d(early)] for c1 in late])
    values = np.apply_along_axis(mean, 2, grid)
    around = np.lib.stride_tricks.sliding_window_view(
        np.pad(values, 1, constant_values=np.inf), (3, 3)
    ).min(axis=(2, 3))
    minima = grid[values == around]
    # Where the value does not depend on a rate, one of its grid points stands for all.
    _, distinct = np.unique(values[values == around].round(12), return_index=True)

    limits = [(None, None), (1e-6, 40), (None, None)]
    limits.append((1e-6, 40 / first) if c is None else (early, early))
    found = [minima[i] for i in distinct[:4]]
    for theta in found.copy():
        improved = optimize.minimize(
            mean,
            theta,
            method="SLSQP",
            jac=gradient,
            bounds=limits,
            constraints={"type": "ineq", "fun": log_ratio, "jac": slopes},
            options={"maxiter": 200, "ftol": 1e-14},
        )
        found.append(best(*improved.x[1::2]))
    return min(found, key=mean) / [1, last, 1, last]


def _programme(exponents: np.ndarray) -> np.ndarray:
    """log K for the K ≥ 0 with K·pᵢ ≥ 1 for all i and K·p̄ smallest, pᵢ = exp(exponentsᵢ).

    K is the edge of the lower left hull of the points p₁, p₂, … ∈ R² that the ray through their
    mean p̄ crosses. Starting from the extreme points on either side of the ray, the point furthest
    below the edge replaces the one on its side.
    """
    scale = exponents.max(axis=0)
    p = np.exp(exponents - scale)
    mean = p.mean(axis=0)
    above = mean[0] * p[:, 1] - mean[1] * p[:, 0]  # > 0: above the ray
    i, j = np.lexsort((p[:, 1], p[:, 0]))[0], np.lexsort((p[:, 0], p[:, 1]))[0]
    if above[i] <= 0:
        k = np.array([1 / p[i, 0], 0])
    elif above[j] >= 0:
        k = np.array([0, 1 / p[j, 1]])
    else:
        for _ in range(len(p)):
            k = np.array([p[i, 1] - p[j, 1], p[j, 0] - p[i, 0]])  # across the edge
            height = p @ k
            lowest = np.argmin(height)
            if lowest in (i, j) or height[lowest] > height[i] * (1 - 1e-14):
                break
            i, j = (lowest, j) if above[lowest] > 0 else (i, lowest)
        k = k / (p @ k).min()
    # A constant is positive, if only by a rounding unit.
    return np.log(np.maximum(k, np.finfo(float).eps)) - scale
