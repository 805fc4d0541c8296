"""What a velocity field is, and the sum of several."""

import abc
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..errors import InputError
from ..measure import Measure


class AbstractField(eqx.Module):
    """A velocity x ↦ v[μ](x) tangent to the sphere. Time is in the field's own scaling."""

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "*queries d"],
        mu: Measure,
        labels: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "*queries d"]:
        """v[μ](x, ξ) at any number of unit vectors x, with the label ξ of each (leading axes
        `*queries`) for fields that look at labels.
        """


class HeadSum(AbstractField):
    """Σₕ vₕ[μ](x): several heads of one layer acting together.

    The heads must be fields of one kind and shape; they are evaluated one after another, so that
    memory and compile time do not grow with their number.
    """

    heads: AbstractField  # every leaf carries a leading axis of heads

    def __init__(self, heads: Sequence[AbstractField]):
        if not heads:
            raise InputError("heads is empty; a sum needs at least one field")
        if len({jax.tree.structure(head) for head in heads}) > 1:
            raise InputError("heads are fields of different kinds; a sum needs one kind")
        self.heads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads)

    def __call__(self, x, mu, labels=None):
        def add(total, head):
            return total + head(x, mu, labels), None

        return lax.scan(add, jnp.zeros_like(x), self.heads)[0]
