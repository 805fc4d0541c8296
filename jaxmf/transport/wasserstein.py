"""One call for W₂ between two measures: exact where it can be, and always saying how."""

from typing import NamedTuple

import jax
import numpy as np
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

    Exact if one of them lives on two antipodal points (Π♯ρ₀ with dim E = 1), or if both have at
    most 1024 tokens, equally many and of equal weight; otherwise Sinkhorn's value at `epsilon`.
    The choice looks at values, and what is traced has none: keep ν out of `jax.jit`'s arguments (in
    the closure) for its axis to be seen.

    **Raises:** `InputError` for measures of different dimension.
    """
    if mu.dimension != nu.dimension:
        raise InputError(
            f"measures have dimensions {mu.dimension} and {nu.dimension}; they must agree"
        )
    for source, target in ((mu, nu), (nu, mu)):
        if on_axis(target):
            return Distance(to_axis(source, target), "axis", None)
    if mu.size == nu.size <= LARGEST_ASSIGNMENT and _equal(mu.weights) and _equal(nu.weights):
        return Distance(assignment(mu, nu), "assignment", None)
    from .entropic import sinkhorn  # imports ott, which takes two seconds

    found = jax.jit(sinkhorn, static_argnames="tilt")(mu, nu, epsilon)
    return Distance(found.value, "sinkhorn", epsilon)


def _equal(weights: Float[Array, " n"]) -> bool:
    if isinstance(weights, jax.core.Tracer):
        return False
    w = np.asarray(weights)
    return bool(w.max() - w.min() <= 1e-6 * w.max())
