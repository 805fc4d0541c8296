"""Exact W₂ between small measures of equal weights: an assignment problem (SciPy)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from scipy import optimize

from ..measure import Measure
from .axis import root
from .costs import AbstractCost, Chordal


@jax.jit
def assignment(mu: Measure, nu: Measure, cost: AbstractCost = Chordal()) -> Float[Array, "*batch"]:
    """W₂ for n tokens of equal weight on both sides: min over permutations σ of
    √(Σᵢ c(xᵢ, y_σ(i))/n), in O(n³) time and O(n²) memory; a batch one by one.

    Differentiable in the points, with the optimal assignment held fixed (envelope theorem).
    """

    def partners(pair):
        costs = cost.all(*pair)
        shape = jax.ShapeDtypeStruct(costs.shape[:1], np.int32)
        return jax.pure_callback(_solve, shape, costs, vmap_method="sequential")

    x, y = lax.stop_gradient((mu.points, nu.points))
    *batch, n, d = jnp.broadcast_shapes(x.shape, y.shape)
    flat = tuple(jnp.broadcast_to(p, (*batch, n, d)).reshape(-1, n, d) for p in (x, y))
    partner = lax.map(partners, flat).reshape(*batch, n)
    y = jnp.broadcast_to(nu.points, (*batch, n, d))
    image = jnp.take_along_axis(y, partner[..., None], axis=-2)
    return root(jnp.mean(cost.between(mu.points, image), axis=-1))


def _solve(costs):
    costs = np.asarray(costs, np.float64)
    if not np.all(np.isfinite(costs)):  # SciPy raises; here what is not finite stays visible
        return np.zeros(len(costs), np.int32)
    return optimize.linear_sum_assignment(costs)[1].astype(np.int32)
