"""What every way of summing a kernel against a measure provides."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ..errors import InputError
from ..kernels import AbstractKernel
from ..kernels.check import check_pair
from ..measure import Measure


class Potential(NamedTuple):
    """Φ_μ = ∫ h(·, z) dμ(z) and its gradient in x, as a vector of R^d: not yet tangent."""

    value: Float[Array, "*queries"]
    gradient: Float[Array, "*queries d"]


class States(NamedTuple):
    """Tokens with their labels, if they have any."""

    points: Float[Array, "n d"]
    labels: Shaped[Array, "n ..."] | None


class AbstractInteraction(eqx.Module):
    """A way of summing a kernel against a measure."""

    def __call__(
        self,
        kernel: AbstractKernel,
        x: Float[Array, "*queries d"],
        mu: Measure,
        labels: Shaped[Array, "..."] | None = None,
    ) -> Potential:
        """Φ_μ(x, ξ) = ∫ h((x, ξ), ·) dμ and ∇ₓΦ_μ at any number of queries x with labels ξ.

        The first variation of the energy E = ½∬ h dμ dμ. Differentiable in everything.

        **Arguments:** `labels`, of the queries: their leading axes are `*queries`.

        **Raises:** `InputError` if queries, tokens, labels and kernel do not fit.
        """
        if mu.points.ndim != 2:
            raise InputError(
                f"an interaction takes one measure, points (n, d), not a batch of shape "
                f"{mu.points.shape}; use jax.vmap for a batch"
            )
        if x.shape[-1] != mu.dimension:
            raise InputError(
                f"queries have dimension {x.shape[-1]} and tokens {mu.dimension}; they must agree"
            )
        batch = x.shape[:-1]
        if labels is not None:
            labels = jnp.asarray(labels)
            if labels.shape[: len(batch)] != batch:
                raise InputError(
                    f"labels of the queries have shape {labels.shape}; it must start with {batch}"
                )
            labels = labels.reshape(-1, *labels.shape[len(batch) :])
        queries = States(x.reshape(-1, mu.dimension).astype(mu.points.dtype), labels)
        tokens = States(mu.points, mu.labels)
        check_pair(kernel, queries, tokens)
        value, gradient = self.sum(kernel, queries, tokens, mu.weights)
        dtype = mu.points.dtype
        return Potential(
            value.reshape(batch).astype(dtype), gradient.reshape(x.shape).astype(dtype)
        )

    @abc.abstractmethod
    def sum(
        self,
        kernel: AbstractKernel,
        queries: States,
        tokens: States,
        weights: Float[Array, " n"],
    ) -> tuple[Float[Array, " q"], Float[Array, "q d"]]:
        """(Φ, ∇Φ) for Σⱼ wⱼ h(·, zⱼ), for any weights and any points of R^d."""
