"""What one looks at in a cloud of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy import sparse

from . import sphere
from ._tracing import known
from ._typing import ArrayLike
from .errors import InputError
from .measure import Measure


def resultant_length(mu: Measure) -> Float[Array, "*batch"]:
    """|∫ x dμ| ∈ [0, 1]: one for a single point, zero for a balanced cloud."""
    return sphere.norm(jnp.einsum("n,...nd->...d", mu.weights, mu.points, precision="highest"))


def effective_rank(mu: Measure) -> Float[Array, "*batch"]:
    """exp(−Σ λ log λ) ∈ [1, d] for the eigenvalues λ of ∫ xxᵀ dμ, which sum to one.

    The number of directions that the tokens use: 1 for ±x, k for k orthogonal ones in equal parts.
    """
    moment = jnp.einsum(
        "n,...ni,...nj->...ij", mu.weights, mu.points, mu.points, precision="highest"
    )
    values = jnp.linalg.eigvalsh(moment)
    positive = values > 0
    values = jnp.where(positive, values, 1)  # 0 log 0 = 0, and rounding may leave less than 0
    return jnp.exp(-jnp.sum(values * jnp.log(values), axis=-1))


def conditional_variance(mu: Measure) -> Float[Array, "*batch"]:
    """Σ_ξ ρ(ξ)(1 − |m_ξ|²) ∈ [0, 1], m_ξ = E[x | ξ]: how far tokens of one label are apart.

    Zero if the conditional laws are Dirac masses, as those of maximisers may be chosen
    (arXiv:2605.30229). Labels count as one if they are equal to the last digit; without labels all
    tokens have one, and this is 1 − |∫x dμ|².
    """
    n = mu.size
    labels = np.zeros((n, 1)) if mu.labels is None else mu.labels.reshape(n, -1)
    values = known(labels)
    if values is not None:
        group = np.unique(values, axis=0, return_inverse=True)[1]
    else:
        group = jnp.unique(labels, axis=0, return_inverse=True, size=n)[1]
    group = group.reshape(-1)

    def total(values):
        return jax.ops.segment_sum(values, group, n)

    mass = total(mu.weights)

    def one(points):
        mean = total(mu.weights[:, None] * points) / jnp.where(mass > 0, mass, 1)[:, None]
        # Σ w|x − m|², which is the same without its cancellation.
        return jnp.dot(mu.weights, jnp.sum((points - mean[group]) ** 2, -1), precision="highest")

    batch = mu.points.shape[:-2]
    return jax.vmap(one)(mu.points.reshape(-1, n, mu.dimension)).reshape(batch)


def count_clusters(
    points: Float[np.ndarray, "n d"], up_to_sign: bool = False, reach: float | int = 0.05
) -> int:
    """Groups of tokens linked by steps of at most `reach`, x and −x being one if `up_to_sign`.

    In NumPy; O(n²) time and memory.
    """
    cosine = points @ points.T
    close = (np.abs(cosine) if up_to_sign else cosine) >= 1 - reach**2 / 2
    return int(sparse.csgraph.connected_components(sparse.csr_array(close), directed=False)[0])


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


def window(
    times: ArrayLike, values: ArrayLike, tolerance: ArrayLike
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """(entry, exit): when a curve is first at most `tolerance`, and when it is next above it.

    Linear interpolation between the times, with an error of the square of their distance. The entry
    is the first time if the curve starts inside; what is not seen is NaN. Differentiable in values
    and tolerance: with β the exit moves by −(∂W/∂β)/(∂W/∂t), to first order in the distance.

    **Arguments:** `times`, increasing; `values`, with the times along the last axis; `tolerance`,
    one, or one for each curve.

    **Raises:** `InputError` for times that do not increase or do not fit the values.
    """
    times, values, tolerance = jnp.asarray(times), jnp.asarray(values), jnp.asarray(tolerance)
    if times.ndim != 1 or values.shape[-1:] != times.shape:
        raise InputError(
            f"times and values have shapes {times.shape} and {values.shape}; the last axis of "
            "values must be that of times"
        )
    stalls = [] if known(times) is None else np.flatnonzero(np.diff(known(times)) <= 0)
    if len(stalls):
        raise InputError(f"times[{stalls[0] + 1}] is not later than the time before it")
    inside, outside = values <= tolerance[..., None], values > tolerance[..., None]
    above = jnp.broadcast_to(values - tolerance[..., None], inside.shape)

    def crossing(found, first):
        """Where the curve crosses before the index `first`, if `found`."""
        last = jnp.maximum(first - 1, 0)
        a, b = (jnp.take_along_axis(above, i, axis=-1) for i in (last, first))
        # Without a crossing the share is 0/1, not 0/0, which would spoil the derivative.
        crosses = found & (first > 0)
        share = jnp.where(crosses, a, 0) / jnp.where(crosses, a - b, 1)
        t = times[last] + share * (times[first] - times[last])
        return jnp.where(found, t, jnp.nan)[..., 0]

    entered, entry = _first(inside)
    left, exit = _first(outside & (jnp.arange(len(times)) > entry))
    return crossing(entered, entry), crossing(entered & left, exit)


def _first(mask: Bool[Array, "*batch n"]) -> tuple[Bool[Array, "*batch 1"], Int[Array, "*batch 1"]]:
    """Whether the mask holds anywhere, and the first index at which it does."""
    return jnp.any(mask, axis=-1, keepdims=True), jnp.argmax(mask, axis=-1, keepdims=True)
