"""Quantile functions Q: [0, 1] → R: what carries the uniform law to any law on a line.

Tables that `jax.jit`, `jax.vmap` and derivatives go through.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ._tracing import known
from ._typing import ArrayLike
from .errors import InputError

_CELLS = 4096


class InverseCdf(eqx.Module):
    """Q(p) = the smallest θ with F(θ) ≥ p, for the law on [a, b] with a density ∝ f ≥ 0.

    Each cell's mass is an integral by Gauss's rule; half of the cells are spread evenly over the
    span, half where the mass is. In a cell F is the cubic with its mass and the density at both
    ends (limited, where the density is not smooth, so that F never falls), inverted by bisection.
    For a smooth f that is exact to about 1e-12 in F; a jump of f costs at most its cell.

    **Raises:** `InputError` for a span that is not finite and increasing, or a density that is
    negative, not finite, or zero everywhere.
    """

    edges: Float[Array, " cells+1"]
    cdf: Float[Array, " cells+1"]
    left: Float[Array, " cells"]  # the density at the ends of each cell, times its length
    right: Float[Array, " cells"]

    def __init__(self, density: Callable, span: tuple[float, float]):
        f = jax.jit(jax.vmap(density))
        edges = jnp.linspace(*span, 2 * _CELLS + 1)
        for _ in range(3):  # the mass is seen better each time
            edges = _refined(edges, _values(f, _nodes(edges)))
        tables = _tables(edges, _values(f, _nodes(edges)), _values(f, edges))
        self.edges, self.cdf, self.left, self.right = edges, *tables

    def __call__(self, p: ArrayLike) -> Float[Array, "*n"]:
        return _invert(self, jnp.asarray(p))


@jax.jit
def _invert(law, p):
    k = jnp.clip(jnp.searchsorted(law.cdf, p) - 1, 0, len(law.left) - 1)
    target, mass = p - law.cdf[k], law.cdf[k + 1] - law.cdf[k]
    a, b = law.left[k], law.right[k]

    def cubic(s):
        return s * (a + s * (3 * mass - 2 * a - b + s * (a + b - 2 * mass)))

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        below = cubic(middle) < target
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    start = jnp.zeros_like(target), jnp.ones_like(target)
    s = lax.stop_gradient(lax.fori_loop(0, jnp.finfo(target.dtype).nmant, halve, start)[1])
    # Bisection has no derivative; Newton's step, which is zero here, has that of the inverse.
    slope = a + s * (2 * (3 * mass - 2 * a - b) + 3 * s * (a + b - 2 * mass))
    slope = lax.stop_gradient(slope)
    step = (target - cubic(s)) / jnp.where(slope > 0, slope, jnp.inf)
    s += step - lax.stop_gradient(step)
    return law.edges[k] + (law.edges[k + 1] - law.edges[k]) * s


_GAUSS = np.polynomial.legendre.leggauss(5)  # exact to degree nine


@jax.jit
def _nodes(edges):
    return edges[:-1, None] + jnp.diff(edges)[:, None] * (1 + _GAUSS[0]) / 2


def _values(f, theta):
    values = f(theta.ravel()).reshape(theta.shape)
    found = known(values)
    if found is not None:
        bad = ~(np.isfinite(found) & (found >= 0))
        if bad.any():
            i = tuple(np.argwhere(bad)[0])
            raise InputError(
                f"density is {found[i]:.6g} at {float(theta[i]):.6g}; it must be finite and ≥ 0"
            )
        if not found.any():
            raise InputError("density is zero on all of the span; it must have mass somewhere")
    return values


def _running(edges, values):
    """(F, total): F at the edges, from 0 to 1, and what it was divided by."""
    sums = jnp.cumsum(jnp.diff(edges) * (values @ (_GAUSS[1] / 2)))
    sums = jnp.concatenate([jnp.zeros_like(sums[:1]), sums])
    sums += lax.stop_gradient(lax.cummax(sums) - sums)  # rounding may let them fall
    return sums / sums[-1], sums[-1]


@jax.jit
def _refined(edges, values):
    """Half of the edges evenly over the span, half evenly over ∫f^{1/4}: the mass and its tails."""
    even = jnp.linspace(edges[0], edges[-1], _CELLS + 1)
    ranks = jnp.arange(1, _CELLS + 1) / (_CELLS + 1)
    by_mass = jnp.interp(ranks, _running(edges, values**0.25)[0], edges)
    return jnp.sort(lax.stop_gradient(jnp.concatenate([even, by_mass])))


@jax.jit
def _tables(edges, values, ends):
    cdf, total = _running(edges, values)
    steps, most = jnp.diff(edges), 3 * jnp.diff(cdf)
    left, right = (jnp.minimum(end * steps / total, most) for end in (ends[:-1], ends[1:]))
    return cdf, left, right


class Steps(eqx.Module):
    """Q(p) = valuesₖ for W_{k−1} < p ≤ W_k, W the running sums of the weights."""

    values: Float[Array, "n *d"]
    ends: Float[Array, " n"]

    def __init__(self, values: Float[Array, "n *d"], weights: Float[Array, " n"]):
        self.values = values
        self.ends = jnp.cumsum(jnp.asarray(weights, jnp.result_type(float)))

    def __call__(self, p: ArrayLike) -> Float[Array, "..."]:
        index = jnp.searchsorted(self.ends, p)
        return self.values[jnp.minimum(index, len(self.ends) - 1)]


def check_quantile(quantile: Callable, span: tuple[float, float] | None) -> None:
    """**Raises:** `InputError` if Q falls, is not finite or leaves the span, seen at 1025 ranks."""
    ranks = (np.arange(1025) + 0.5) / 1025
    found = known(jax.vmap(quantile)(jnp.asarray(ranks)))
    if found is None:
        return
    if found.shape != ranks.shape:
        raise InputError(f"quantile returns shape {found.shape[1:]} for one p; it must be a number")
    if not np.isfinite(found).all():
        p = ranks[np.argmin(np.isfinite(found))]
        raise InputError(f"quantile is not finite at p = {p:.6g}; it must be an angle")
    falls = np.flatnonzero(np.diff(found) < 0)
    if len(falls):
        p, q = ranks[falls[0]], ranks[falls[0] + 1]
        raise InputError(
            f"quantile falls from {found[falls[0]]:.6g} at p = {p:.6g} to "
            f"{found[falls[0] + 1]:.6g} at p = {q:.6g}; it must increase"
        )
    if span is None:
        return
    slack = 1e-6 * (span[1] - span[0])
    outside = (found < span[0] - slack) | (found > span[1] + slack)
    if outside.any():
        i = int(np.argmax(outside))
        raise InputError(
            f"quantile is {found[i]:.6g} at p = {ranks[i]:.6g}, outside the span "
            f"[{span[0]:.6g}, {span[1]:.6g}] of angles; give span= to choose another"
        )
