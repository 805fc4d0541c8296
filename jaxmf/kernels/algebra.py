"""The algebra of kernels h((x, ξ), (y, ζ)): sums, products, multiples and gauges of kernels.

(arXiv:2605.30229: unnormalised self-attention with auxiliary variables, USA-AV.) A kernel says what
h is on **one pair** of tokens; how pairs are summed is the business of an `interaction`.
"""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ..errors import InputError

Point = Float[Array, " d"]
Label = Shaped[Array, "..."] | None


class AbstractKernel(eqx.Module):
    """A kernel h((x, ξ), (y, ζ)) of two tokens x, y ∈ S^{d−1} and their labels ξ, ζ.

    A kernel of one's own is a subclass with its parameters as fields, and `evaluate`. Kernels add
    and multiply (`h + k`, `h * k`, `2 * h`, `-h`), and `h.gauge(U)` turns the tokens first.
    """

    @abc.abstractmethod
    def evaluate(self, x: Point, xi: Label, y: Point, zeta: Label) -> Float[Array, ""]:
        """h((x, ξ), (y, ζ)) for one pair; a label is None where the tokens have none.

        Gradients follow by autodiff, in x as a vector of R^d. The energy's kernels are symmetric:
        h(z, z′) = h(z′, z).
        """

    def gauge(self, gauge: "AbstractGauge") -> "Gauged":
        """h((U_ξx, ξ), (U_ζy, ζ))."""
        return Gauged(self, gauge)

    def __add__(self, other):
        if other == 0 and isinstance(other, int):  # where sum() starts
            return self
        return Sum(self, other) if isinstance(other, AbstractKernel) else NotImplemented

    __radd__ = __add__

    def __mul__(self, other):
        if isinstance(other, AbstractKernel):
            return Product(self, other)
        return Scaled(self, other) if _is_number(other) else NotImplemented

    def __rmul__(self, other):
        return Scaled(self, other) if _is_number(other) else NotImplemented

    def __neg__(self):
        return Scaled(self, -1.0)

    def __sub__(self, other):
        return self + (-other) if isinstance(other, AbstractKernel) else NotImplemented

    __array_ufunc__ = None  # so that NumPy's numbers leave the product to __rmul__


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and (
        isinstance(value, (int, float, np.number)) or hasattr(value, "dtype")
    )


class AbstractContentKernel(AbstractKernel):
    """A kernel g(⟨x, y⟩) of the tokens alone."""

    @abc.abstractmethod
    def profile(self, s: Float[Array, ""]) -> Float[Array, ""]:
        """g(s) at s = ⟨x, y⟩."""

    def evaluate(self, x, xi, y, zeta):
        return self.profile(jnp.dot(x, y, precision="highest"))


class AbstractLabelKernel(AbstractKernel):
    """A kernel k(ξ, ζ) of the labels alone."""

    @abc.abstractmethod
    def factor(self, xi: Label, zeta: Label) -> Float[Array, ""]:
        """k(ξ, ζ)."""

    def evaluate(self, x, xi, y, zeta):
        return self.factor(xi, zeta)


class Sum(AbstractKernel):
    """h + k."""

    first: AbstractKernel
    second: AbstractKernel

    def evaluate(self, x, xi, y, zeta):
        return self.first.evaluate(x, xi, y, zeta) + self.second.evaluate(x, xi, y, zeta)


class Product(AbstractKernel):
    """h·k."""

    first: AbstractKernel
    second: AbstractKernel

    def evaluate(self, x, xi, y, zeta):
        return self.first.evaluate(x, xi, y, zeta) * self.second.evaluate(x, xi, y, zeta)


class Scaled(AbstractKernel):
    """c·h for a number c of either sign, a differentiable leaf."""

    kernel: AbstractKernel
    scale: Float[Array, ""] = eqx.field(converter=lambda c: jnp.asarray(c, jnp.result_type(float)))

    def evaluate(self, x, xi, y, zeta):
        return self.scale * self.kernel.evaluate(x, xi, y, zeta)


class Gauged(AbstractKernel):
    """h((U_ξx, ξ), (U_ζy, ζ)) for a gauge U: A → O(d)."""

    kernel: AbstractKernel
    by: "AbstractGauge"

    def evaluate(self, x, xi, y, zeta):
        return self.kernel.evaluate(self.by.apply(xi, x), xi, self.by.apply(zeta, y), zeta)


class AbstractGauge(eqx.Module):
    """Orthogonal matrices U_ξ, one for every label ξ.

    `U @ W` is the gauge U_ξW_ξ, and `U.along(phi)` the gauge U_{φ(ξ)}.
    """

    @abc.abstractmethod
    def apply(self, xi: Label, x: Point) -> Point:
        """U_ξx."""

    @abc.abstractmethod
    def undo(self, xi: Label, x: Point) -> Point:
        """U_ξᵀx."""

    def along(self, phase) -> "AbstractGauge":
        """U_{φ(ξ)} for any map φ of the labels."""
        from .gauges import Along

        return Along(self, phase)

    def __matmul__(self, other):
        return Composed(self, other) if isinstance(other, AbstractGauge) else NotImplemented


class Composed(AbstractGauge):
    """U_ξW_ξ: the second gauge acts first."""

    first: AbstractGauge
    second: AbstractGauge

    def apply(self, xi, x):
        return self.first.apply(xi, self.second.apply(xi, x))

    def undo(self, xi, x):
        return self.second.undo(xi, self.first.undo(xi, x))


def label_of(xi: Label, shape: tuple[int, ...], who: str) -> Array:
    """The label ξ, if it has the shape that `who` needs: () for a number, (m,) for m of them.

    **Raises:** `InputError` if there is none, or it has another shape.
    """
    what = "one number" if shape == () else f"{shape[0]} numbers" if len(shape) == 1 else "an array"
    if xi is None:
        raise InputError(f"the tokens have no labels; {who} needs one label, {what}, for each")
    if jnp.shape(xi) != shape:
        raise InputError(
            f"each label has shape {jnp.shape(xi)}; {who} needs {what}, shape {shape}, a token"
        )
    return xi
