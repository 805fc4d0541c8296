"""One attention head as the mathematics sees it: B = QᵀK, V, and what is left of its biases."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._typing import ArrayLike
from .errors import InputError


class Attention(eqx.Module):
    """Attention with logits ⟨Qx + b_q, Ky⟩ and values Vy + b_v, for tokens in R^d.

    Only B = QᵀK and Kᵀb_q matter: a key bias is constant in y and cancels in the softmax. Give
    either `key_query`, or `query` and `key` (which may be r × d).

    **Arguments:**

    - `value`: V, d × d.
    - `key_query`: B = QᵀK, d × d.
    - `query`, `key`: Q and K, both r × d.
    - `query_bias`: b_q, r numbers; needs `query` and `key`.
    - `value_bias`: b_v, d numbers.

    **Raises:** `InputError` for matrices that are not of these shapes, or not finite.
    """

    value: Float[Array, "d d"]
    key_query: Float[Array, "d d"]
    shift: Float[Array, " d"]
    value_bias: Float[Array, " d"]

    def __init__(
        self,
        value: ArrayLike,
        key_query: ArrayLike | None = None,
        *,
        query: ArrayLike | None = None,
        key: ArrayLike | None = None,
        query_bias: ArrayLike | None = None,
        value_bias: ArrayLike | None = None,
    ):
        value = _matrix("value", value)
        d = value.shape[0]
        if value.shape != (d, d):
            raise InputError(f"value has shape {value.shape}; V must be square, d × d")
        if d < 2:
            raise InputError(f"value has shape {value.shape}; tokens need dimension d ≥ 2")
        if (key_query is None) == (query is None) or (query is None) != (key is None):
            raise InputError("give either key_query (B = QᵀK), or both query and key")
        if key_query is not None:
            key_query = _matrix("key_query", key_query)
            if key_query.shape != (d, d):
                raise InputError(
                    f"key_query has shape {key_query.shape}; it must be {(d, d)}, like value"
                )
            if query_bias is not None:
                raise InputError("query_bias needs query and key given apart: it enters as Kᵀb_q")
            shift = jnp.zeros(d, value.dtype)
        else:
            query, key = _matrix("query", query), _matrix("key", key)
            for name, matrix in (("query", query), ("key", key)):
                if matrix.shape != (query.shape[0], d):
                    raise InputError(
                        f"{name} has shape {matrix.shape}; it must be "
                        f"{(query.shape[0], d)}: as many rows as query, as many columns as value"
                    )
            key_query = jnp.matmul(query.T, key, precision="highest")
            r = query.shape[0]
            bias = jnp.zeros(r) if query_bias is None else _vector("query_bias", query_bias, r)
            shift = jnp.matmul(bias.astype(key.dtype), key, precision="highest")
        no_bias = jnp.zeros(d, value.dtype)
        self.value, self.key_query, self.shift = value, key_query, shift
        self.value_bias = no_bias if value_bias is None else _vector("value_bias", value_bias, d)

    @property
    def dimension(self) -> int:
        """d."""
        return self.value.shape[0]

    @property
    def interaction(self) -> Float[Array, "d d"]:
        """M = VBᵀ, whose spectrum decides where tokens go at low temperature."""
        return jnp.matmul(self.value, self.key_query.T, precision="highest")

    def logit(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """Bᵀx + Kᵀb_q: the vector whose inner product with y is the logit of y, up to β."""
        return jnp.matmul(x, self.key_query, precision="highest") + self.shift

    def output(self, mean: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """V m + b_v."""
        return jnp.matmul(mean, self.value.T, precision="highest") + self.value_bias


def _matrix(name: str, value: ArrayLike) -> Array:
    value = _finite(name, value)
    if value.ndim != 2:
        raise InputError(f"{name} has shape {value.shape}; it must be a matrix")
    return value


def _vector(name: str, value: ArrayLike, size: int) -> Array:
    value = _finite(name, value)
    if value.shape != (size,):
        raise InputError(f"{name} has shape {value.shape}; it must be ({size},)")
    return value


def _finite(name: str, value: ArrayLike) -> Array:
    with np.errstate(over="ignore"):  # what overflows in float32 is found below
        value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(float)
    if not isinstance(value, jax.core.Tracer):
        bad = np.argwhere(~np.isfinite(np.asarray(value)))
        if len(bad):
            where = ", ".join(str(i) for i in bad[0])
            raise InputError(f"{name}[{where}] is not finite in {value.dtype}")
    return value
