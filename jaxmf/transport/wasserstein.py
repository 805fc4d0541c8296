"""One call for W₂ between two measures: exact where it can be, and always saying how good it is."""

import time
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from .._tracing import known
from ..errors import InputError
from ..measure import Measure
from ..tilt import AbstractTilt, Automatic
from ..tilt.base import log_weight
from .assignment import assignment
from .axis import on_axis, to_axis
from .costs import Chordal, Geodesic

LARGEST_ASSIGNMENT = 2048
COSTS = {"chordal": Chordal(), "geodesic": Geodesic()}


class Distance(eqx.Module):
    """lower ≤ W₂(μ, ν) ≤ upper, and one value between them.

    - `value`: W₂ itself by the exact methods, else the middle of the interval. Derivatives are
      those of the value; the ends have none.
    - `reached`: whether upper − lower ≤ width·upper, or both are rounding, as it always is for the
      exact methods; if not, the time budget ended it (or, seldom, iterations that no longer
      helped).
    - `method`: "axis" and "assignment" are exact, both ends equal to the value; "interval" is not.
    """

    value: Float[Array, "*batch"]
    lower: Float[Array, "*batch"]
    upper: Float[Array, "*batch"]
    reached: Bool[Array, "*batch"]
    method: str = eqx.field(static=True)


def wasserstein(
    mu: Measure,
    nu: Measure,
    *,
    cost: Literal["chordal", "geodesic"] = "chordal",
    method: Literal["axis", "assignment", "interval"] | None = None,
    width: float | int = 0.02,
    seconds: float | int = 60.0,
    tilt: AbstractTilt = Automatic(),
) -> Distance:
    """W₂(μ, ν) with cost |x − y|² (chordal) or ∠(x, y)² (geodesic).

    Exact if one of them lives on two antipodal points (Π♯ρ₀ with dim E = 1), in O(n), or if both
    have at most 2048 tokens, equally many and of equal weight; otherwise an interval that is
    tightened until its width is `width` of its upper end or `seconds` have passed. Measures may be
    batched (all saved times of a flow, say): distances are then those of each pair, one after the
    other, and the seconds are for all of them. Differentiable in points and weights, with the
    optimal plan and potentials held fixed (envelope theorem).

    The choice looks at values, and what `jax.jit` traces has none: keep ν out of its arguments (in
    the closure) for its axis to be seen. An interval traced by it heeds no clock.

    **Raises:** `InputError` for measures of different dimension, points that are not finite, a
    width or time not positive, or a `method` that does not apply.
    """
    _check(mu, nu, cost, width, seconds)
    c = COSTS[cost]
    for source, target in ((mu, nu), (nu, mu)):
        if method in (None, "axis") and on_axis(target):
            return _exact(to_axis(source, target, c), "axis")
    if method == "axis":
        raise InputError(
            "method is axis, but neither measure is seen to be on two antipodal points"
        )
    equal = mu.size == nu.size and _equal(mu.weights) and _equal(nu.weights)
    small = mu.size <= LARGEST_ASSIGNMENT
    if equal and (method == "assignment" or (small and method is None)):
        return _exact(assignment(mu, nu, c), "assignment")
    if method == "assignment":
        raise InputError("method is assignment, which needs equally many tokens of equal weight")
    return _by_interval(mu, nu, c, width, seconds, tilt)


def _exact(value, method):
    end = lax.stop_gradient(value)
    return Distance(value, end, end, jnp.ones(value.shape, bool), method)


def _by_interval(mu, nu, cost, width, seconds, tilt):
    from .certified import interval  # imports ott, which takes two seconds

    deadline = time.monotonic() + seconds
    batch = jnp.broadcast_shapes(mu.points.shape[:-2], nu.points.shape[:-2])
    pairs = tuple(
        jnp.broadcast_to(m.points, (*batch, *m.points.shape[-2:])).reshape(-1, *m.points.shape[-2:])
        for m in (mu, nu)
    )
    arrays = (mu.points, mu.weights, nu.points, nu.weights)
    count = len(pairs[0])

    def one(pair, seconds, start=None):
        at = mu.move(pair[0]), nu.move(pair[1])
        found = interval(*at, cost, width=width, seconds=seconds, start=start, tilt=tilt)
        middle = (found.lower + found.upper) / 2
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            # The derivative of W₂² is that of its dual at fixed potentials; its value cancels.
            dual = _dual(*at, found, cost, tilt)
            middle += (dual - lax.stop_gradient(dual)) / (
                2 * jnp.where(middle > 0, middle, jnp.inf)
            )
        return middle, found

    if any(known(array) is None for array in arrays):
        value, found = lax.map(lambda pair: one(pair, seconds), pairs)
    else:
        results, start = [], None
        for i in range(count):
            left = max(deadline - time.monotonic(), 1e-3) / (count - i)
            results.append(one((pairs[0][i], pairs[1][i]), left, start))
            start = results[-1][1]
        value, found = jax.tree.map(lambda *values: jnp.stack(values), *results)
    ends = (end.reshape(batch) for end in (value, found.lower, found.upper, found.reached))
    return Distance(*ends, "interval")


@jax.jit
def _dual(mu, nu, found, cost, tilt):
    """∫f dμ + ∫g dν for the g found and f = −ε log ∫e^{(g(y) − c(·, y))/ε} dν(y)."""
    g, epsilon = found.potential, found.epsilon
    log_weights = log_weight(nu.weights) + g / epsilon
    log_mass, _ = cost.soften(mu.points, nu.points, log_weights, epsilon, tilt)
    return jnp.dot(mu.weights, -epsilon * log_mass) + jnp.dot(nu.weights, g)


def _equal(weights: Float[Array, " n"]) -> bool:
    w = known(weights)
    return w is not None and bool(w.max() - w.min() <= 1e-6 * w.max())


def _check(mu, nu, cost, width, seconds):
    if mu.dimension != nu.dimension:
        raise InputError(
            f"measures have dimensions {mu.dimension} and {nu.dimension}; they must agree"
        )
    if cost not in COSTS:
        raise InputError(f"cost is {cost!r}; it must be one of: {', '.join(COSTS)}")
    for name, value in (("width", width), ("seconds", seconds)):
        if not (np.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; it must be finite and positive")
    for name, measure in (("mu", mu), ("nu", nu)):
        points = known(measure.points)
        if points is not None and not np.isfinite(points).all():
            index = ", ".join(str(i) for i in np.argwhere(~np.isfinite(points))[0])
            raise InputError(f"{name}.points[{index}] is not finite; tokens must be")
