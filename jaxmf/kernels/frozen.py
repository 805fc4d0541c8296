"""Frozen tokens: they act on the others and do not move."""

import jax
import jax.numpy as jnp

from ..measure import Measure
from .algebra import AbstractKernel


class Frozen(AbstractKernel):
    """V(x, ξ) + V(y, ζ) with V(x, ξ) = ∫ h((x, ξ), ·) dν: the pull of frozen tokens ν under h.

    As a kernel it adds ∫V dμ to the energy and ∇V to the velocity, so that `h + Frozen(h, nu)` is
    the flow of tokens that see each other and a prompt ν; `0.3 * Frozen(h, nu)` one of less weight.
    """

    kernel: AbstractKernel
    tokens: Measure

    def evaluate(self, x, xi, y, zeta):
        return self.field(x, xi) + self.field(y, zeta)

    def field(self, x, xi):
        """V(x, ξ)."""
        nu = self.tokens
        each = jax.vmap(self.kernel.evaluate, (None, None, 0, 0))(x, xi, nu.points, nu.labels)
        return jnp.dot(nu.weights, each, precision="highest")
