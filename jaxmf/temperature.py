"""The inverse temperature β, as every field and kernel takes it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._tracing import known
from ._typing import ArrayLike
from .errors import InputError


def inverse_temperature(beta: ArrayLike) -> Float[Array, ""]:
    """β as an array leaf, checked where its value is known.

    **Raises:** `InputError` unless it is one finite, positive number.
    """
    beta = jnp.asarray(beta, dtype=jnp.result_type(float, beta))
    if beta.ndim:
        raise InputError(f"beta has shape {beta.shape}; a field takes one β (jax.vmap for more)")
    value = known(beta)
    if value is not None and not 0 < value < jnp.inf:
        raise InputError(f"beta is {beta}; it must be finite and positive")
    return beta
