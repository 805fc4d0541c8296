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
from .errors import InputError

_CELLS = 4096


class InverseCdf(eqx.Module):
    """Q(p) = the smallest θ with F(θ) ≥ p, for the law on [a, b] with a density ∝ f ≥ 0.

    Each cell's mass is an integral by Gauss's rule; half of the cells are spread evenly over the
    span, half over the mass. In a cell F is the cubic with its mass and the density at both ends
    (limited, where the density is not smooth, so that F never falls), and is inverted by bisection.
    For a smooth f that is exact to about 1e-12 in F; a jump of f costs at most its cell.

    **Raises:** `InputError` for a span that is not finite and increasing, or a density that is
    negative, not finite, or zero everywhere.
    """

    edges: Float[Array, " cells+1"]
    cdf: Float[Array, " cells+1"]
    left: Float[Array, " cells"]  # the density at the ends of each cell, times its length
    right: Float[Array, " cells"]

    def __init__(self, density: Callable, span: tuple[float, float]):
        f = jax.vmap(density)
        edges = jnp.linspace(*span, 2 * _CELLS + 1)
        even = edges[::2]
        for _ in range(3):  # the mass is seen better each time
            mass = _masses(f, edges)
            cdf = lax.cummax(jnp.concatenate([jnp.zeros(1), jnp.cumsum(mass)]))
            by_mass = jnp.interp(jnp.arange(1, _CELLS + 1) / (_CELLS + 1), cdf / cdf[-1], edges)
            edges = jnp.sort(lax.stop_gradient(jnp.concatenate([even, by_mass])))
        mass, ends = _masses(f, edges), f(edges)
        total = jnp.sum(mass)
        cdf = lax.cummax(jnp.concatenate([jnp.zeros(1), jnp.cumsum(mass / total)]))
        self.edges, self.cdf = edges, cdf / cdf[-1]
        steps, most = jnp.diff(edges), 3 * jnp.diff(self.cdf)
        self.left = jnp.minimum(ends[:-1] * steps / total, most)
        self.right = jnp.minimum(ends[1:] * steps / total, most)

    def __call__(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return _invert(self, p)


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


def _masses(f, edges):
    """∫f over each cell by Gauss's rule of five nodes, exact to degree nine."""
    nodes, weights = np.polynomial.legendre.leggauss(5)
    steps = jnp.diff(edges)
    points = edges[:-1, None] + steps[:, None] * (1 + nodes) / 2
    values = f(points.ravel()).reshape(points.shape)
    found = known(values)
    if found is not None:
        bad = ~(np.isfinite(found) & (found >= 0))
        if bad.any():
            i = tuple(np.argwhere(bad)[0])
            raise InputError(
                f"density is {found[i]:.6g} at {float(points[i]):.6g}; it must be finite and ≥ 0"
            )
        if not found.any():
            raise InputError("density is zero on all of the span; it must have mass somewhere")
    return steps * (values @ (weights / 2))


class Steps(eqx.Module):
    """Q(p) = valuesₖ for W_{k−1} < p ≤ W_k, W the running sums of the weights."""

    values: Float[Array, "n *d"]
    ends: Float[Array, " n"]

    def __init__(self, values: Float[Array, "n *d"], weights: Float[Array, " n"]):
        self.values = values
        self.ends = jnp.cumsum(jnp.asarray(weights, jnp.result_type(float)))

    def __call__(self, p: Float[Array, "*n"]) -> Float[Array, "..."]:
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
