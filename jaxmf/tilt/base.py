"""What every way of summing the exponential tilt provides."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import InputError
from ..measure import Measure


class Tilted(NamedTuple):
    """A measure tilted by e^⟨u,·⟩: the logarithm of its mass and its mean."""

    log_mass: Float[Array, "*queries"]
    mean: Float[Array, "*queries d"]


class AbstractTilt(eqx.Module):
    """A way of summing e^⟨u,y⟩ against a measure."""

    def __call__(self, u: Float[Array, "*queries d"], mu: Measure) -> Tilted:
        """(log F_μ(u), m_μ(u)) at any number of queries u, differentiable in u, points and weights.

        A token of weight zero is absent: derivatives with respect to that weight are zero too.

        **Raises:** `InputError` if u and the tokens differ in dimension.
        """
        flat = _flatten(u, mu)
        log_mass, mean = self.sum(flat, mu.points, log_weight(mu.weights))
        return Tilted(log_mass.reshape(u.shape[:-1]), mean.reshape(u.shape))

    def exposed(
        self, u: Float[Array, "*queries d"], mu: Measure, tolerance: float
    ) -> Float[Array, "*queries d"]:
        """The limit of m_μ(su) as s → ∞: the weighted mean of the tokens that maximise ⟨u, y⟩.

        They span the face of conv(supp μ) exposed by u. Tokens within `tolerance`·|u| of the
        maximum count as attaining it, so that ties survive rounding.
        """
        return self._exposed(_flatten(u, mu), mu.points, mu.weights, tolerance).reshape(u.shape)

    @abc.abstractmethod
    def sum(
        self, u: Float[Array, "q d"], points: Float[Array, "n d"], log_weights: Float[Array, " n"]
    ) -> tuple[Float[Array, " q"], Float[Array, "q d"]]:
        """(log F, m) for Σⱼ e^{log wⱼ} δ_{yⱼ}, of any total mass, for any points of R^d."""

    @abc.abstractmethod
    def _exposed(
        self,
        u: Float[Array, "q d"],
        points: Float[Array, "n d"],
        weights: Float[Array, " n"],
        tolerance: float,
    ) -> Float[Array, "q d"]: ...


def _flatten(u: Array, mu: Measure) -> Float[Array, "q d"]:
    if mu.points.ndim != 2:
        raise InputError(
            f"a tilt takes one measure, points (n, d), not a batch of shape {mu.points.shape}; "
            "use jax.vmap for a batch"
        )
    if u.shape[-1] != mu.dimension:
        raise InputError(
            f"queries have dimension {u.shape[-1]} and tokens {mu.dimension}; they must agree"
        )
    return jnp.reshape(u, (-1, mu.dimension)).astype(mu.points.dtype)


def inner(u: Float[Array, "q d"], y: Float[Array, "n d"]) -> Float[Array, "q n"]:
    """⟨uᵢ, yⱼ⟩ in full precision: a logit formed in TF32 or bfloat16 is off by 1e-3·β."""
    return jnp.matmul(u, y.T, precision="highest")


def log_weight(weights: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """log w, with a finite stand-in for log 0 that no logit can lift back into the sum."""
    positive = weights > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, weights, 1)), NOTHING)


NOTHING = -1e30  # the logit of a token that is not there; finite, so that −∞ − (−∞) never arises
