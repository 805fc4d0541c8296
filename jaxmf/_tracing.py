"""What is known of an array while JAX traces the function around it."""

import jax
import numpy as np
from jax import lax

from ._typing import ArrayLike


def known(array: ArrayLike) -> np.ndarray | None:
    """The values of an array, also where only a derivative is being taken of it; None under
    `jax.jit`, `jax.vmap` and the like, if the array depends on their arguments.
    """
    if isinstance(array, jax.core.Tracer):
        # Not unless it is one: what is concrete becomes a tracer here under `jax.jit`.
        array = lax.stop_gradient(array)
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)
