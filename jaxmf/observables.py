"""What one looks at in a cloud of tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from . import sphere
from .measure import Measure


def resultant_length(mu: Measure) -> Float[Array, "*batch"]:
    """|∫ x dμ| ∈ [0, 1]: one for a single point, zero for a balanced cloud."""
    return sphere.norm(jnp.einsum("n,...nd->...d", mu.weights, mu.points, precision="highest"))


def cosine_histogram(mu: Measure, edges: Float[Array, " edges"]) -> Float[Array, " edges-1"]:
    """The law of ⟨x, y⟩ for two different tokens drawn from μ: the mass of each bin.

    Pairs i ≠ j count with wᵢwⱼ; the masses sum to one. O(n²) time and memory.
    """
    cosines = jnp.matmul(mu.points, mu.points.T, precision="highest")
    pairs = mu.weights[:, None] * mu.weights * (1 - jnp.eye(mu.size, dtype=mu.weights.dtype))
    # Rounding may put a cosine of one a little outside the last bin.
    cosines = jnp.clip(cosines, edges[0], edges[-1])
    mass = jnp.histogram(cosines.ravel(), edges, weights=pairs.ravel())[0]
    return mass / jnp.sum(pairs)
