"""W₂ between any two measures with error bars that are theorems: lower ≤ W₂ ≤ upper.

Sinkhorn's iterations (ott-jax, each an exponential tilt) run down a ladder of ε, each rung started
from the last. The potentials and the plan they leave are neither feasible nor optimal, but

- *below*: f(x) = −ε' log Σⱼ e^{(gⱼ − |x − yⱼ|²)/ε'} ≤ min_j (|x − yⱼ|² − gⱼ) for every ε' > 0, so
  (f, g) is feasible for the dual problem and ∫f dμ + ∫g dν ≤ W₂²; with ε' tiny it is the
  c-transform, and taking that of f in turn only helps;
- *above*: the plan, its rows and then its columns scaled down where they exceed the marginals
  (Altschuler, Weed and Rigollet, 2017), moves all but a little mass; the rest is a transport
  problem again, solved the same way; what is left in the end goes by the product plan.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn as ott_sinkhorn

from ..errors import InputError
from ..measure import Measure
from ..tilt import AbstractTilt, Automatic
from ..tilt.base import NOTHING, log_weight
from .axis import root
from .entropic import Chordal


class Interval(NamedTuple):
    """lower ≤ W₂(μ, ν) ≤ upper, each end certified to rounding.

    - `epsilon`: the last ε of the ladder.
    - `reached`: whether upper − lower ≤ width·upper; if not, the time ran out, or the ladder did.
    - `potential`: g on the points of ν; with its c-transform, the witness of the lower end.
    """

    lower: Float[Array, ""]
    upper: Float[Array, ""]
    epsilon: float
    reached: bool
    potential: Float[Array, " m"]


def interval(
    mu: Measure,
    nu: Measure,
    *,
    width: float = 0.05,
    seconds: float = 60.0,
    upper: float | Float[Array, ""] = 2.0,
    tilt: AbstractTilt = Automatic(),
) -> Interval:
    """Tighten lower ≤ W₂(μ, ν) ≤ upper until they are within `width`·upper, or time is up.

    Any weights and sizes, cost |x − y|², memory O(n + m). An `upper` end that is known already
    (`coupling`, say) can save most of the work. Time is looked at between the rungs of the ladder,
    so large measures may overrun by a few. The ends are computed in the precision of
    the points, so in float32 they hold to about 1e-6 in W₂².

    **Raises:** `InputError` for measures of different dimension, or a width or time not positive.
    """
    if mu.dimension != nu.dimension:
        raise InputError(
            f"measures have dimensions {mu.dimension} and {nu.dimension}; they must agree"
        )
    for name, value in (("width", width), ("seconds", seconds)):
        if not (np.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; it must be finite and positive")
    deadline = time.monotonic() + seconds
    epsilon, lower = 0.25, jnp.zeros_like(mu.weights[0])
    upper = jnp.asarray(upper, lower.dtype)
    potential = witness = jnp.zeros_like(nu.weights)
    while True:
        potential = _descend(mu, nu, potential, epsilon, tilt)
        below = _lower(mu, nu, potential, tilt)
        lower, witness = (below, potential) if below > lower else (lower, witness)
        last = epsilon / 2 < _SMALLEST or time.monotonic() > deadline
        reached = bool(upper - lower <= width * upper)
        if not reached:
            left = _round(mu, nu, mu.weights, nu.weights, potential, epsilon, tilt)
            # The residual problems cost as much as all before; what the plan has moved already
            # bounds from below what they can give.
            if last or root(left[0]) - lower <= 0.8 * width * upper:
                upper = jnp.minimum(upper, _finish(mu, nu, left, epsilon, tilt))
                reached = bool(upper - lower <= width * upper)
        if reached or last:
            return Interval(lower, upper, epsilon, reached, witness)
        epsilon /= 2


_SMALLEST = 1e-4  # of ε: Sinkhorn's iterations run in float32, whose logits 2/ε must have digits
_LEVELS = 4  # of residual problems; each leaves a few per cent of the mass it is given


def _finish(mu, nu, left, epsilon, tilt):
    """√ of the cost of a plan with exactly the marginals of μ and ν, `left` being its beginning."""
    total, a, b = left
    rounding = 8 * jnp.finfo(a.dtype).eps
    for _ in range(_LEVELS):
        if min(jnp.sum(a), jnp.sum(b)) <= rounding:
            break
        rest = mu.reweight(a / jnp.sum(a)), nu.reweight(b / jnp.sum(b))
        potential = jnp.zeros_like(b)
        for coarse in (16, 4, 1):
            potential = _descend(*rest, potential, coarse * epsilon, tilt)
        cost, a, b = _round(mu, nu, a, b, potential, epsilon, tilt)
        total = total + cost
    mass = jnp.sum(a)
    if min(mass, jnp.sum(b)) <= rounding:
        return root(total + 4 * jnp.maximum(mass, jnp.sum(b)))  # 4 is the largest cost there is
    inner = jnp.dot(a @ mu.points, b @ nu.points, precision="highest")
    return root(total + 2 * mass - 2 * inner / mass)


@jax.jit
def _descend(mu, nu, potential, epsilon, tilt):
    """The potential g after at most 80 of Sinkhorn's iterations at ε, started from g, in float32.

    Per unit of weight: the plan is e^{(fᵢ + gⱼ − |xᵢ − yⱼ|²)/ε} wᵢ wⱼ.
    """
    x, y, a, b, g = (
        v.astype(jnp.float32) for v in (mu.points, nu.points, mu.weights, nu.weights, potential)
    )
    epsilon = jnp.asarray(epsilon, jnp.float32)
    geom = Chordal(x, y, epsilon=epsilon, tilt=tilt)
    problem = linear_problem.LinearProblem(geom, a=a, b=b)
    solve = ott_sinkhorn.Sinkhorn(threshold=1e-3, max_iterations=80)
    # ott's potentials carry the weights: e^{(fᵢ + gⱼ − |xᵢ − yⱼ|²)/ε} is the whole plan.
    # They start from f, since g is what ott updates first.
    f = epsilon * (log_weight(a) - geom.rows(g + epsilon * log_weight(b), epsilon, axis=1)[0])
    out = solve(problem, init=(f, g))
    return jnp.where(b > 0, out.g - epsilon * log_weight(b), 0).astype(potential.dtype)


@jax.jit
def _lower(mu, nu, potential, tilt):
    """√ of the dual value of (f, g'), f the c-transform of g and g' that of f."""
    sharp = 64 * jnp.finfo(mu.points.dtype).eps

    def transform(x, y, weights, potential):
        absent = jnp.where(weights > 0, 0, NOTHING)  # a token of weight zero constrains nothing
        return -sharp * tilt.sum(2 * x / sharp, y, absent + (potential - 2) / sharp)[0]

    f = transform(mu.points, nu.points, nu.weights, potential)
    g = transform(nu.points, mu.points, mu.weights, f)
    return root(jnp.dot(mu.weights, f) + jnp.dot(nu.weights, g))


@jax.jit
def _round(mu, nu, a, b, g, epsilon, tilt):
    """(cost, a', b'): what the plan of g moves within the marginals a and b, and what they lack."""

    def rows(x, y, log_weights):
        return tilt.sum(2 * x / epsilon, y, log_weights - 2 / epsilon)

    to_b = log_weight(b) + g / epsilon
    f = -epsilon * rows(mu.points, nu.points, to_b)[0]  # the rows then have the mass a exactly
    log_column = rows(nu.points, mu.points, log_weight(a) + f / epsilon)[0]
    log_column = g / epsilon + log_column
    # Columns may have more than b, and are scaled down to it then.
    log_row, mean = rows(mu.points, nu.points, to_b + jnp.minimum(-log_column, 0))
    row = a * jnp.exp(log_row + f / epsilon)
    column = b * jnp.exp(jnp.minimum(log_column, 0))
    cost = jnp.sum(row * 2 * (1 - jnp.sum(mu.points * mean, axis=1)))
    return cost, jnp.maximum(a - row, 0), jnp.maximum(b - column, 0)
