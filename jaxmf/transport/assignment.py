"""Exact W₂ between small measures of equal weights: an assignment problem (ott-jax)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..measure import Measure
from .axis import root


def assignment(mu: Measure, nu: Measure) -> Float[Array, ""]:
    """W₂ for n tokens of equal weight on both sides: min over permutations σ of
    √(Σᵢ |xᵢ − y_σ(i)|²/n), by the Hungarian algorithm, O(n³) time and O(n²) memory.

    Differentiable in the points, with the optimal assignment held fixed (envelope theorem).
    """
    # ott takes two seconds to import; only those who need it pay.
    from ott.geometry import pointcloud
    from ott.tools import unreg

    x, y = jax.lax.stop_gradient((mu.points, nu.points))
    pairs = unreg.hungarian(pointcloud.PointCloud(x, y))[1].paired_indices
    difference = mu.points[pairs[0]] - nu.points[pairs[1]]
    return root(jnp.sum(difference**2) / mu.size)
