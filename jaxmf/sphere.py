"""The unit sphere S^{d−1} ⊂ R^d: the state space of a token.

Every function acts on the last axis and broadcasts over the others.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def norm(x: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """Euclidean length |x|, with derivative zero (not NaN) at x = 0."""
    square = jnp.sum(x * x, axis=-1)
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def normalise(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """x/|x|, the nearest point of the sphere; 0 stays 0."""
    length = norm(x)
    return x / jnp.where(length > 0, length, 1)[..., None]


def tangent(x: Float[Array, "*#n d"], v: Float[Array, "*#n d"]) -> Float[Array, "*n d"]:
    """P_x v = v − ⟨x, v⟩x, the part of v tangent to the sphere at x."""
    return v - jnp.sum(x * v, axis=-1, keepdims=True) * x


def exp(x: Float[Array, "*#n d"], v: Float[Array, "*#n d"]) -> Float[Array, "*n d"]:
    """The geodesic leaving x with tangent velocity v, after unit time."""
    length = norm(v)[..., None]
    # jnp.sinc is sin(πs)/(πs): smooth at v = 0.
    return jnp.cos(length) * x + jnp.sinc(length / jnp.pi) * v


def log(x: Float[Array, "*#n d"], y: Float[Array, "*#n d"]) -> Float[Array, "*n d"]:
    """The tangent vector at x whose `exp` is y; zero for y = −x, which every direction reaches."""
    # P_x y = P_x(y ∓ x), formed from the difference that is exactly zero where y = ±x.
    pole = jnp.where(jnp.sum(x * y, axis=-1, keepdims=True) < 0, -x, x)
    return distance(x, y)[..., None] * normalise(tangent(x, y - pole))


def distance(x: Float[Array, "*#n d"], y: Float[Array, "*#n d"]) -> Float[Array, "*n"]:
    """Geodesic distance ∠(x, y) ∈ [0, π], accurate at both ends."""
    return 2 * jnp.arctan2(norm(x - y), norm(x + y))
