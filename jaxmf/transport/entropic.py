"""Entropic W₂ by Sinkhorn's iterations (ott-jax), each one an exponential tilt, so never n × n."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from ott.geometry import geometry
from ott.solvers import linear

from ..measure import Measure
from ..tilt import AbstractTilt, Automatic
from ..tilt.base import log_weight
from .axis import root


class Sinkhorn(NamedTuple):
    """What Sinkhorn's iterations found.

    - `value`: √⟨P, C⟩ for the regularised plan P, larger than W₂ by a bias that ε decides.
    - `epsilon`: ε, in units of |x − y|².
    - `potentials`: f on the points of μ and g on those of ν.
    - `error`: how far the marginals of P are off, in ℓ₁; `converged`: whether below the threshold.
    - `iterations`: how many there were.
    """

    value: Float[Array, ""]
    epsilon: Float[Array, ""]
    potentials: tuple[Float[Array, " n"], Float[Array, " m"]]
    error: Float[Array, ""]
    converged: Bool[Array, ""]
    iterations: Array


def sinkhorn(
    mu: Measure,
    nu: Measure,
    epsilon: float | Float[Array, ""],
    *,
    threshold: float = 1e-3,
    max_iterations: int = 2000,
    tilt: AbstractTilt = Automatic(),
) -> Sinkhorn:
    """min over plans P of ⟨P, C⟩ + ε KL(P | μ⊗ν), C = |x − y|², to a marginal error `threshold`.

    Any weights and sizes; memory O(n + m).
    """
    geom = Chordal(mu.points, nu.points, epsilon=epsilon, tilt=tilt)
    out = linear.solve(
        geom, mu.weights, nu.weights, threshold=threshold, max_iterations=max_iterations
    )
    # Row i of the plan has mass Fᵢ e^{fᵢ/ε} and mean mᵢ, so it costs 2 − 2⟨xᵢ, mᵢ⟩ a unit of mass.
    log_mass, mean = geom.rows(out.g, epsilon, axis=1)
    row = jnp.exp(log_mass + out.f / epsilon)
    cost = jnp.sum(row * 2 * (1 - jnp.sum(mu.points * mean, axis=1)))
    return Sinkhorn(
        value=root(cost / jnp.sum(row)),
        epsilon=jnp.asarray(epsilon, mu.points.dtype),
        potentials=(out.f, out.g),
        error=out.errors[jnp.maximum(jnp.sum(out.errors > -1) - 1, 0)],
        converged=out.converged,
        iterations=out.n_iters,
    )


@jax.tree_util.register_pytree_node_class
class Chordal(geometry.Geometry):
    """The cost |x − y|² = 2 − 2⟨x, y⟩ between unit vectors, its kernel applied by a tilt.

    Σⱼ e^{(gⱼ − |x − yⱼ|²)/ε} is the tilt at u = 2x/ε of the measure with weights e^{(gⱼ − 2)/ε}.
    """

    def __init__(self, x, y, tilt=Automatic(), **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.tilt = x, y, tilt

    @property
    def shape(self):
        return len(self.x), len(self.y)

    @property
    def dtype(self):
        return self.x.dtype

    def rows(self, potential, epsilon, axis):
        """(log mass, mean) of the rows (axis 1) or columns (axis 0) of e^{(potential − C)/ε}."""
        x, y = (self.x, self.y) if axis == 1 else (self.y, self.x)
        return self.tilt.sum(2 * x / epsilon, y, (potential - 2) / epsilon)

    def apply_lse_kernel(self, f, g, eps, vec=None, axis=0):
        potential = g if axis == 1 else f
        if vec is None:
            sign = jnp.ones(())
        else:
            sign = jnp.sign(vec)
            potential = potential + eps * log_weight(jnp.abs(vec))
        return eps * self.rows(potential, eps, axis)[0], sign

    def tree_flatten(self):
        return (self.x, self.y, self.tilt, self._epsilon_init), {}

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        x, y, tilt, epsilon = children
        return cls(x, y, tilt, epsilon=epsilon)
