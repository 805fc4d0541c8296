"""Kernels of the tokens alone."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..errors import InputError
from ..temperature import inverse_temperature
from .algebra import AbstractContentKernel


class Exponential(AbstractContentKernel):
    """e^{β(⟨x,y⟩ − offset)}/β, the kernel of unnormalised self-attention with V = B = I.

    Its maximisers are the single points, with energy e^{β(1 − offset)}/(2β). The offset only
    rescales energy and time: **t here is e^{β·offset} times the t of e^{β⟨x,y⟩}/β**. The default
    0 is that kernel, which overflows from β = 88 in float32 and 709 in float64; take 1 there.
    """

    beta: Float[Array, ""] = eqx.field(converter=inverse_temperature)
    offset: float = 0.0

    def profile(self, s):
        return jnp.exp(self.beta * (s - self.offset)) / self.beta


class Linear(AbstractContentKernel):
    """⟨x, y⟩."""

    def profile(self, s):
        return s


class Polynomial(AbstractContentKernel):
    """(⟨x, y⟩ + c)^p for a degree p = 1, 2, ….

    **Raises:** `InputError` for another p.
    """

    degree: int = eqx.field(static=True)
    constant: float = 0.0

    def __check_init__(self):
        if self.degree < 1:
            raise InputError(f"degree is {self.degree}; it must be at least 1")

    def profile(self, s):
        return (s + self.constant) ** self.degree
