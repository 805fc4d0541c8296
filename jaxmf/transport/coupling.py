"""The upper bound on W₂ that costs nothing: the coupling of each token with its own image."""

import numpy as np
from jaxtyping import Array, Float

from .._tracing import known
from ..errors import InputError
from ..measure import Measure
from .axis import root
from .costs import AbstractCost, Chordal


def coupling(mu: Measure, nu: Measure, cost: AbstractCost = Chordal()) -> Float[Array, "*batch"]:
    """√(Σᵢ wᵢ c(xᵢ, yᵢ)) ≥ W₂(μ, ν), for measures with the same weights, token by token.

    With μ = ρₜ and ν = Π♯ρ₀ it couples xᵢ(t) with Π xᵢ(0).

    **Raises:** `InputError` if the measures differ in size, dimension or weights.
    """
    if mu.points.shape[-2:] != nu.points.shape[-2:]:
        raise InputError(
            f"measures have shapes {mu.points.shape} and {nu.points.shape}; a coupling token by "
            "token needs the same tokens on both sides"
        )
    a, b = known(mu.weights), known(nu.weights)
    if a is not None and b is not None:
        apart = float(np.max(np.abs(a - b)))
        if apart > 1e-5 / mu.size:
            raise InputError(
                f"weights differ by up to {apart:.3g}; a coupling token by token needs the same on "
                "both sides"
            )
    return root(mu.integrate(cost.between(mu.points, nu.points)))
