"""What the concentration theorem promises, as numbers (arXiv:2605.10931, Theorem 1, Corollary 2).

Theorem 1 bounds W₂(ρₜ^β, Π♯ρ₀) with constants it does not give: `ConcentrationBound` is the bound
(`fit_bound` finds the tightest one above a measured table). The zero-temperature part has constants
that are known: `zero_temperature_bound`, whose rate rests on the moments `inverse_moment` of
1/|P_E x|.
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

from ._tracing import known
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
            check_positive(name, getattr(self, name))

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


def check_positive(name: str, values: ArrayLike, or_zero: bool = False) -> None:
    values = known(values)
    if values is None:
        return
    bad = np.argwhere(~(np.isfinite(values) & ((values >= 0) if or_zero else (values > 0))))
    if len(bad):
        index = "[" + ", ".join(map(str, bad[0])) + "]" if values.ndim else ""
        right = "≥ 0" if or_zero else "positive"
        raise InputError(f"{name}{index} is {values[tuple(bad[0])]}; it must be finite and {right}")


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
    check_positive("t", t, or_zero=True)
    if source.dimension != attention.dimension:
        raise InputError(
            f"source has dimension {source.dimension} and attention {attention.dimension}; they "
            "must agree"
        )
    ZeroTemperature(attention)  # raises if B is singular
    b = np.asarray(attention.key_query)
    with jax.ensure_compile_time_eval():
        spaces = spectrum(attention)
        asymmetry = float(spaces.asymmetry)
        biased = bool(jnp.any(attention.shift != 0) | jnp.any(attention.value_bias != 0))
    if biased or asymmetry > float(np.finfo(b.dtype).eps) ** (2 / 3):
        raise InputError(
            f"M = VBᵀ has asymmetry {asymmetry:.3g} and there are "
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
    check_positive("p", p)
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
