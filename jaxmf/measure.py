"""A measure μ = Σᵢ wᵢ δ_(xᵢ, ξᵢ): tokens on the sphere, their weights, and labels at rest."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ._typing import ArrayLike
from .errors import InputError


class Measure(eqx.Module):
    """Σᵢ wᵢ δ_(xᵢ, ξᵢ), a probability measure on S^{d−1} × A with n atoms.

    Points may carry leading batch axes (a flow's saved times, say); weights and labels are then
    shared by the whole batch.

    **Arguments:**

    - `points`: tokens xᵢ, unit vectors, shape `(*batch, n, d)` with d ≥ 2.
    - `weights`: wᵢ ≥ 0 summing to one; uniform if left out.
    - `labels`: ξᵢ, any array whose leading axis is n.

    **Raises:** `InputError` for points off the sphere or not finite, no points at all, d < 2, or
    weights and labels that do not fit. Values are checked where they are known, so not on tracers.
    """

    points: Float[Array, "*batch n d"]
    weights: Float[Array, " n"]
    labels: Shaped[Array, "n ..."] | None

    def __init__(
        self,
        points: ArrayLike,
        weights: ArrayLike | None = None,
        labels: ArrayLike | None = None,
    ):
        points = jnp.asarray(points)
        if not jnp.issubdtype(points.dtype, jnp.floating):
            points = points.astype(float)
        _check_points(points)
        n = points.shape[-2]
        weights = jnp.full(n, 1 / n) if weights is None else jnp.asarray(weights)
        weights = weights.astype(points.dtype)
        _check_weights(weights, n)
        if labels is not None:
            labels = jnp.asarray(labels)
            if labels.ndim == 0 or labels.shape[0] != n:
                raise InputError(
                    f"labels have shape {labels.shape}; their first axis must be the {n} tokens"
                )
        self.points, self.weights, self.labels = points, weights, labels

    @property
    def size(self) -> int:
        """The number of atoms n."""
        return self.points.shape[-2]

    @property
    def dimension(self) -> int:
        """d, for tokens on S^{d−1}."""
        return self.points.shape[-1]

    def move(self, points: Float[Array, "*batch n d"]) -> "Measure":
        """The same weights and labels at other points."""
        return eqx.tree_at(lambda mu: mu.points, self, points)

    def reweight(self, weights: Float[Array, " n"]) -> "Measure":
        """Other weights at the same points and labels."""
        return eqx.tree_at(lambda mu: mu.weights, self, weights)

    def pushforward(
        self, f: Callable[[Float[Array, "*batch n d"]], Float[Array, "*batch n d"]]
    ) -> "Measure":
        """f♯μ = Σᵢ wᵢ δ_(f(xᵢ), ξᵢ)."""
        return self.move(f(self.points))

    def integrate(self, values: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
        """∫ f dμ = Σᵢ wᵢ fᵢ."""
        return jnp.sum(self.weights * values, axis=-1)


def _check_points(points: Array) -> None:
    if points.ndim < 2 or points.shape[-1] < 2:
        raise InputError(
            f"points have shape {points.shape}; they must be (n, d), n tokens of dimension d ≥ 2"
        )
    if points.shape[-2] == 0:
        raise InputError("a measure needs at least one token; points is empty")
    if isinstance(points, jax.core.Tracer):
        return
    length = np.linalg.norm(np.asarray(points, np.float64), axis=-1)
    if not np.all(np.isfinite(length)):
        index = _where(~np.isfinite(length))
        raise InputError(f"points{index} is not finite; every token must be a finite unit vector")
    off = np.abs(length - 1) > 1e3 * float(jnp.finfo(points.dtype).eps)
    if np.any(off):
        index = _where(off)
        raise InputError(
            f"points{index} has length {length[off][0]:.6g}; every token must be a unit vector "
            "(see jaxmf.sphere.normalise)"
        )


def _check_weights(weights: Array, n: int) -> None:
    if weights.shape != (n,):
        raise InputError(f"weights have shape {weights.shape}; they must be ({n},), one a token")
    if isinstance(weights, jax.core.Tracer):
        return
    w = np.asarray(weights, np.float64)
    bad = ~(np.isfinite(w) & (w >= 0))
    if np.any(bad):
        raise InputError(f"weights{_where(bad)} is {w[bad][0]:.6g}; weights must be finite and ≥ 0")
    if abs(w.sum() - 1) > 1e-5:
        raise InputError(f"weights sum to {w.sum():.8g}; they must sum to one")


def _where(mask: np.ndarray) -> str:
    return "[" + ", ".join(str(i) for i in np.argwhere(mask)[0]) + "]"
