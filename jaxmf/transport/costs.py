"""Costs c(x, y) between tokens: W₂² is the least mean cost of a plan between two measures.

A cost knows itself on pairs, and softened over a measure, Σⱼ e^{log wⱼ − c(x, yⱼ)/ε}: all that
Sinkhorn's iterations and their certificates need, and never an n × m array.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import sphere
from ..tilt import AbstractTilt
from ..tilt.base import NOTHING, inner
from ..tilt.streamed import fold


class AbstractCost(eqx.Module):
    """The square of a distance on the sphere."""

    largest: eqx.AbstractClassVar[float]

    @abc.abstractmethod
    def between(self, x: Float[Array, "*#n d"], y: Float[Array, "*#n d"]) -> Float[Array, "*n"]:
        """c(x, y), pair by pair, accurate where x and y are close."""

    @abc.abstractmethod
    def all(self, x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """c(xᵢ, yⱼ) for all pairs at once: for small problems."""

    @abc.abstractmethod
    def soften(
        self,
        x: Float[Array, "n d"],
        y: Float[Array, "m d"],
        log_weights: Float[Array, " m"],
        epsilon: Float[Array, ""],
        tilt: AbstractTilt,
    ) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """log Fᵢ, Fᵢ = Σⱼ e^{log wⱼ − c(xᵢ, yⱼ)/ε}, and the mean cost of xᵢ under its summands."""


class Chordal(AbstractCost):
    """c(x, y) = |x − y|²: softened over a measure it is an exponential tilt."""

    largest: ClassVar[float] = 4.0

    def between(self, x, y):
        return jnp.sum((x - y) ** 2, axis=-1)

    def all(self, x, y):
        return jnp.sum(x**2, 1)[:, None] - 2 * inner(x, y) + jnp.sum(y**2, 1)

    def soften(self, x, y, log_weights, epsilon, tilt):
        # |x − y|² = |x|² − ⟨(2x, −1), (y, |y|²)⟩: also off the sphere, and in its derivatives.
        length = jnp.sum(x**2, axis=1)
        u = jnp.append(2 * x, jnp.full_like(x[:, :1], -1), axis=1)
        lifted = jnp.append(y, jnp.sum(y**2, axis=1, keepdims=True), axis=1)
        log_mass, mean = tilt.sum(u / epsilon, lifted, log_weights)
        return log_mass - length / epsilon, length - jnp.sum(u * mean, axis=1)


class Geodesic(AbstractCost):
    """c(x, y) = ∠(x, y)²."""

    largest: ClassVar[float] = float(jnp.pi**2)

    def between(self, x, y):
        return sphere.distance(x, y) ** 2

    def all(self, x, y):
        return _square_angle(inner(x, y))

    def soften(self, x, y, log_weights, epsilon, tilt):
        def add(carry, x, tokens):
            (top, total, moment), (y, log_weights) = carry, tokens
            cost = _square_angle(jnp.matmul(x, y, precision="highest"))
            logits = log_weights - cost / epsilon
            higher = lax.stop_gradient(jnp.maximum(top, jnp.max(logits, axis=1)))
            p, shrink = jnp.exp(logits - higher[:, None]), jnp.exp(top - higher)
            total = total * shrink + jnp.sum(p, axis=1)
            return higher, total, moment * shrink + jnp.sum(p * cost, axis=1)

        def start(x):
            nothing = jnp.zeros_like(x[:, 0])
            return nothing + NOTHING, nothing, nothing

        add = jax.checkpoint(add, prevent_cse=False)
        top, total, moment = fold(add, start, x, (y.T, log_weights), _TILE, (0.0, NOTHING))
        return top + jnp.log(total), moment / total


_TILE = (1024, 1024)


@jax.custom_jvp
def _square_angle(cosine: Array) -> Array:
    """arccos², of cosines that rounding may have put outside [−1, 1]."""
    return jnp.arccos(jnp.clip(cosine, -1, 1)) ** 2


@_square_angle.defjvp
def _square_angle_jvp(primals, tangents):
    angle = jnp.arccos(jnp.clip(primals[0], -1, 1))
    sine = jnp.sin(angle)
    # −2θ/sin θ, but zero where x = ±y: every direction leads away from y, or reaches −y.
    apart = sine > 1e-6
    slope = jnp.where(apart, -2 * angle / jnp.where(apart, sine, 1), 0)
    return angle**2, slope.astype(angle.dtype) * tangents[0]
