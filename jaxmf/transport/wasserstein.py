"""One call for W₂ between two measures: exact where it can be, and always saying how."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import InputError
from ..measure import Measure
from .assignment import assignment
from .axis import on_axis, to_axis

LARGEST_ASSIGNMENT = 1024


class Distance(NamedTuple):
    """W₂(μ, ν) by `method`: "axis" and "assignment" are exact; "sinkhorn" is biased upward by its
    regularisation `epsilon` (in units of |x − y|²), which is None for the exact methods.
    """

    value: Float[Array, ""]
    method: str
    epsilon: float | None


def wasserstein(mu: Measure, nu: Measure, *, epsilon: float = 0.01) -> Distance:
    """W₂(μ, ν) with cost |x − y|².

    Exact if ν lives on two antipodal points (Π♯ρ₀ with dim E = 1), or if both measures have at most
    1024 tokens, equally many and of equal weight; otherwise Sinkhorn's value at `epsilon`.
    The choice looks at values, so ν and the weights must be known, not traced.

    **Raises:** `InputError` for measures of different dimension.
    """
    if mu.dimension != nu.dimension:
        raise InputError(
            f"measures have dimensions {mu.dimension} and {nu.dimension}; they must agree"
        )
    if on_axis(nu):
        return Distance(to_axis(mu, nu), "axis", None)
    if mu.size == nu.size <= LARGEST_ASSIGNMENT and _equal(mu.weights) and _equal(nu.weights):
        return Distance(assignment(mu, nu), "assignment", None)
    from .entropic import sinkhorn  # imports ott, which takes two seconds

    found = jax.jit(sinkhorn, static_argnames="tilt")(mu, nu, epsilon)
    return Distance(found.value, "sinkhorn", epsilon)


def _equal(weights: Float[Array, " n"]) -> bool:
    return bool(jnp.max(weights) - jnp.min(weights) <= 1e-6 * jnp.max(weights))
