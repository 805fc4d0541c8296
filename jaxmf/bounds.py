"""What the concentration theorem promises, as numbers (arXiv:2605.10931, Theorem 1, Corollary 2).

Theorem 1 bounds W₂(ρₜ^β, Π♯ρ₀) with constants it does not give: `ConcentrationBound` is the bound,
`fit_bound` the tightest one above a measured table. The zero-temperature part has constants that
are known: `zero_temperature_bound`, whose rate rests on the moments `inverse_moment` of 1/|P_E x|.
"""

import functools
import math
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from scipy import optimize, special

from ._typing import ArrayLike
from .attention import Attention
from .errors import InputError
from .fields import ZeroTemperature
from .laws import AbstractLaw, Uniform
from .measure import Measure
from .spectra import spectrum
from .transport.axis import root


def _floating(x: ArrayLike) -> Float[Array, "..."]:
    x = jnp.asarray(x)
    return x.astype(jnp.result_type(float, x))


class ConcentrationBound(eqx.Module):
    """W₂(ρₜ^β, Π♯ρ₀) ≤ K₁ s(β) e^{C₁t} + K₂ e^{−ct}, s(β) = √(log(β + 1)/β), for t ≥ 0.

    (arXiv:2605.10931, Theorem 1.) Time is that of the softmax field, without rescaling. The
    constants, β and t are arrays that broadcast; everything is differentiable in all of them.

    **Raises:** `InputError` for a constant that is not finite and positive, where it is known.
    """

    K1: Float[Array, "..."] = eqx.field(converter=_floating)
    C1: Float[Array, "..."] = eqx.field(converter=_floating)
    K2: Float[Array, "..."] = eqx.field(converter=_floating)
    c: Float[Array, "..."] = eqx.field(converter=_floating)

    def __check_init__(self):
        for name in ("K1", "C1", "K2", "c"):
            _check_positive(name, getattr(self, name))

    def __call__(self, beta: ArrayLike, t: ArrayLike) -> Float[Array, "..."]:
        """The bound at β > 0 and t ≥ 0; infinite where it exceeds every float."""
        t = jnp.asarray(t)
        early = self.K2 * jnp.exp(-self.c * t)
        return self.K1 * jnp.exp(_log_s(beta) + self.C1 * t) + early

    def optimal_time(self, beta: ArrayLike) -> Float[Array, "..."]:
        """t*(β) = max(0, log(cK₂/(C₁K₁s(β)))/(C₁ + c)), the time t ≥ 0 of the smallest bound.

        While positive it grows like log β/(2(C₁ + c)), at the rate −s′(β)/(s(β)(C₁ + c)) in β.
        """
        return jnp.maximum(self._turn(beta), 0)

    def minimum(self, beta: ArrayLike) -> Float[Array, "..."]:
        """The smallest value of the bound over t ≥ 0."""
        return self(beta, self.optimal_time(beta))

    def window(
        self, beta: ArrayLike, tolerance: ArrayLike
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """(entry, exit): the bound is at most `tolerance` exactly for entry ≤ t ≤ exit.

        The entry is 0 where that holds at t = 0 already; both are NaN where it never holds.
        """
        turn, level = self._turn(beta), jnp.log(_floating(tolerance))
        lowest = self._log(beta, turn)
        seen = lowest <= level
        # Where there is no root, solve for another level, whose derivatives are finite.
        level = jnp.where(seen, level, lowest + 1)
        # log bound is convex and above its asymptotes, so Newton's method from where an asymptote
        # meets the level stays on its side of the root, but for rounding near the turn.
        start = (jnp.log(self.K2) - level) / self.c
        entry = self._solve(beta, level, start, lambda t: jnp.minimum(t, turn))
        start = (level - jnp.log(self.K1) - _log_s(beta)) / self.C1
        exit = self._solve(beta, level, start, lambda t: jnp.maximum(t, turn))
        seen &= exit >= 0
        return jnp.where(seen, jnp.maximum(entry, 0), jnp.nan), jnp.where(seen, exit, jnp.nan)

    def _turn(self, beta):
        """Where the two terms have opposite slopes, on the whole time axis."""
        ratio = jnp.log(self.c) + jnp.log(self.K2) - jnp.log(self.C1) - jnp.log(self.K1)
        return (ratio - _log_s(beta)) / (self.C1 + self.c)

    def _log(self, beta, t):
        """The logarithm of the bound, at any real t."""
        late = jnp.log(self.K1) + _log_s(beta) + self.C1 * t
        return jnp.logaddexp(late, jnp.log(self.K2) - self.c * t)

    def _solve(self, beta, level, start, clip):
        """The t with log bound = level on the side of the turn that `clip` keeps to."""

        def newton(excess, t):
            value, slope = jax.jvp(excess, (t,), (jnp.ones_like(t),))
            return clip(t - jnp.where(slope == 0, 0, value / slope))

        # Steps halve the distance to a root near the turn, and square it elsewhere.
        return lax.custom_root(
            lambda t: self._log(beta, t) - level,
            start,
            lambda excess, t: lax.fori_loop(0, 64, lambda _, t: newton(excess, t), t),
            lambda slope, y: y / slope(jnp.ones_like(y)),
        )


def _log_s(beta: ArrayLike) -> Float[Array, "..."]:
    """log s(β)."""
    beta = _floating(beta)
    return jnp.log(jnp.log1p(beta) / beta) / 2


def _check_positive(name: str, values: ArrayLike, or_zero: bool = False) -> None:
    if isinstance(values, jax.core.Tracer):
        return
    values = np.asarray(values)
    bad = np.argwhere(~(np.isfinite(values) & ((values >= 0) if or_zero else (values > 0))))
    if len(bad):
        index = "[" + ", ".join(map(str, bad[0])) + "]" if values.ndim else ""
        right = "≥ 0" if or_zero else "positive"
        raise InputError(f"{name}{index} is {values[tuple(bad[0])]}; it must be finite and {right}")


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
        _check_positive(name, table, or_zero=name in ("t", "w2"))
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


def zero_temperature_bound(
    attention: Attention, source: Measure | AbstractLaw, t: ArrayLike
) -> Float[Array, "..."]:
    """√(E min(2, e^{−2γt/‖B‖₂} tan²∠(x₀, E))) ≥ W₂(ρₜ, Π♯ρ₀) at zero temperature.

    (arXiv:2605.10931, Corollary 2, with its constants: Π x(t) = Π x₀ and
    tan∠(x(t), E) ≤ e^{−γt/‖B‖₂} tan∠(x₀, E) under ẋ = P_x V Bᵀx/|Bᵀx|.) γ is the gap of M = VBᵀ
    and E its dominant eigenspace, k = dim E. Where E|P_E x₀|^{−p} is infinite from p = k ≤ 2 on, as
    for a law with a density, the bound decays like e^{−kγt/(2‖B‖₂)}, no faster.

    **Arguments:** `source`, a measure, over whose tokens the expectation is summed, or
    `Uniform(d)`, for which it is exact; `t` ≥ 0, of any shape, in which the bound is
    differentiable.

    **Raises:** `InputError` if B is singular, M is not symmetric or there are biases, since then it
    is no bound; for another law, another dimension, or t < 0.
    """
    t = _floating(t)
    _check_positive("t", t, or_zero=True)
    if source.dimension != attention.dimension:
        raise InputError(
            f"source has dimension {source.dimension} and attention {attention.dimension}; they "
            "must agree"
        )
    ZeroTemperature(attention)  # raises if B is singular
    b = np.asarray(attention.key_query)
    with jax.ensure_compile_time_eval():
        spaces = spectrum(attention)
        biased = bool(jnp.any(attention.shift != 0) | jnp.any(attention.value_bias != 0))
    if biased or spaces.asymmetry > float(np.finfo(b.dtype).eps) ** (2 / 3):
        raise InputError(
            f"M = VBᵀ has asymmetry {spaces.asymmetry:.3g} and there are "
            f"{'some' if biased else 'no'} biases; the bound needs a symmetric M and no biases"
        )
    rate = spaces.gap / np.linalg.norm(b, 2)
    k = spaces.multiplicities[0]
    if isinstance(source, Uniform):
        tangents = functools.partial(_uniform_tangents, source.dimension, k)
    else:
        mu = _measure(source)
        part = jnp.square(jnp.matmul(mu.points, spaces.vectors, precision="highest"))
        tangent = jnp.log(jnp.sum(part[:, k:], axis=1)) - jnp.log(jnp.sum(part[:, :k], axis=1))

        def tangents(reach):
            return tangent, mu.weights

    def square(t):
        log_tan, weights = tangents(rate * t)
        return jnp.sum(weights * jnp.exp(jnp.minimum(log_tan - 2 * rate * t, math.log(2))))

    return root(lax.map(square, t.ravel()).reshape(t.shape))


def _uniform_tangents(
    d: int, k: int, reach: Float[Array, ""]
) -> tuple[Float[Array, " nodes"], Float[Array, " nodes"]]:
    """Nodes log tan²∠(x, E) and weights for x uniform on S^{d−1} and dim E = k.

    They integrate min(2, e^{−2·reach} tan²) exactly to rounding. The angle has density
    ∝ sin^{d−k−1}θ cos^{k−1}θ, and u = log tan θ, in which the integrand is smooth but for its kink
    and decays like an exponential, ∝ e^{(d−k)u}(1 + e^{2u})^{−d/2}. Gauss–Legendre on panels,
    between the kink and the ends of the bulk of the density and of its tail.
    """
    if k == d:
        return jnp.array([-jnp.inf]), jnp.ones(1)

    def log_density(u, module):
        constant = math.lgamma(d / 2) - math.lgamma(k / 2) - math.lgamma((d - k) / 2)
        return constant + math.log(2) + (d - k) * u - d / 2 * module.logaddexp(0, 2 * u)

    peak, far = math.log((d - k) / k) / 2, np.geomspace(1e-2, 1e2, 1000)
    drop = log_density(peak, np) - log_density(peak + np.stack([-far, far]), np)
    low, high = peak + np.array([-1, 1]) * far[np.argmax(drop > 45, axis=1)]
    kink = jnp.maximum(reach + math.log(2) / 2, low)
    ends = jnp.sort(jnp.stack([low, high, kink, jnp.maximum(high, kink) + 45 / k]))
    panels, (x, a) = 48, np.polynomial.legendre.leggauss(16)
    width = jnp.diff(ends)[:, None, None] / panels
    u = ends[:-1, None, None] + width * (np.arange(panels)[:, None] + (x + 1) / 2)
    return 2 * u.ravel(), (width * a / 2 * jnp.exp(log_density(u, jnp))).ravel()


class Moment(NamedTuple):
    """E|P_E x|^{−p}: its `value`, a 95 % confidence interval [`low`, `high`], and whether it is
    `dominated`: the ten largest terms carry more than a tenth of the sum, so that neither the value
    nor the interval can be trusted (as always for fewer than a hundred equal weights).
    """

    value: float
    low: float
    high: float
    dominated: bool


def inverse_moment(source: Measure | AbstractLaw, basis: ArrayLike, p: float | int) -> Moment:
    """E|P_E x|^{−p}, the moment that gives the rate pγ/(2‖B‖₂) at zero temperature, p ≤ 2.

    (arXiv:2605.10931, Assumption 2 and Corollary 2.) For the uniform law it is
    Γ((k−p)/2)Γ(d/2)/(Γ(k/2)Γ((d−p)/2)) for p < k = dim E, and infinite from k on (but 1 if k = d).
    For a measure it is the weighted mean over its tokens, with the normal interval
    ± 1.96 √(Σ wᵢ²(fᵢ − f̄)²/(1 − Σ wᵢ²)) for independent tokens; for quadrature nodes, which err
    less, the interval is only an indication. A token with P_E x = 0 makes it infinite.

    **Arguments:** `basis`, d × k, whose orthonormal columns span E (`spectrum(...).dominant`).

    **Raises:** `InputError` for columns that are not orthonormal, p ≤ 0, or another law. **Warns**
    if the value is dominated by few tokens.
    """
    basis = np.asarray(basis, np.float64)
    if basis.ndim != 2 or len(basis) != source.dimension:
        raise InputError(f"basis has shape {basis.shape}; it must be ({source.dimension}, k)")
    d, k = basis.shape
    off = np.abs(basis.T @ basis - np.eye(k)).max(initial=0)
    if k == 0 or off > 1e-5:
        raise InputError(f"the {k} columns of basis are off orthonormal by {off:.3g}")
    _check_positive("p", p)
    if isinstance(source, Uniform):
        if k == d:
            value = 1.0
        elif p >= k:
            value = math.inf
        else:
            gammas = [math.lgamma(a / 2) for a in (k - p, d, k, d - p)]
            value = math.exp(gammas[0] + gammas[1] - gammas[2] - gammas[3])
        return Moment(value, value, value, False)

    mu = _measure(source)
    weights = np.asarray(mu.weights, np.float64)
    shadow = np.linalg.norm(np.asarray(mu.points, np.float64) @ basis, axis=1)
    weights, shadow = weights[weights > 0] / weights.sum(), shadow[weights > 0]
    if np.any(shadow == 0):
        return Moment(math.inf, math.inf, math.inf, True)
    terms = shadow ** -float(p)
    value = float(weights @ terms)
    spread = weights**2 @ (terms - value) ** 2
    # One token says nothing of its spread.
    error = 1.96 * math.sqrt(spread / (1 - weights @ weights)) if len(weights) > 1 else math.inf
    share = float(np.sort(weights * terms)[-10:].sum()) / value
    if share > 0.1:
        warnings.warn(
            f"ten of {len(weights)} tokens carry {share:.0%} of E|P_E x|^(−{p:g}); the value and "
            "its interval cannot be trusted, so use more tokens or a smaller p",
            stacklevel=2,
        )
    return Moment(value, value - error, value + error, share > 0.1)


def _measure(source: Measure | AbstractLaw) -> Measure:
    if not isinstance(source, Measure):
        raise InputError(
            f"the expectation is known in closed form for Uniform, not for "
            f"{type(source).__name__}; pass law.quadrature(n) or law.sample(key, n)"
        )
    return source
