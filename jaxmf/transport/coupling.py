"""The upper bound on W₂ that costs nothing: the coupling of each token with its own image."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import InputError
from ..measure import Measure
from .axis import root


def coupling(mu: Measure, nu: Measure) -> Float[Array, "*batch"]:
    """√(Σᵢ wᵢ|xᵢ − yᵢ|²) ≥ W₂(μ, ν), for measures with the same weights, token by token.

    With μ = ρₜ and ν = Π♯ρ₀ it couples xᵢ(t) with Π xᵢ(0).

    **Raises:** `InputError` if the measures differ in size or dimension.
    """
    if mu.points.shape[-2:] != nu.points.shape[-2:]:
        raise InputError(
            f"measures have shapes {mu.points.shape} and {nu.points.shape}; a coupling token by "
            "token needs the same tokens on both sides"
        )
    return root(mu.integrate(jnp.sum((mu.points - nu.points) ** 2, axis=-1)))
