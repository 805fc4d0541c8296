"""Unnormalised self-attention, USA: softmax attention without its denominator."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import sphere
from ..attention import Attention
from ..temperature import inverse_temperature
from ..tilt import AbstractTilt, Automatic
from .base import AbstractField


class UnnormalisedAttention(AbstractField):
    """v[μ](x) = P_x ∫ (Vy + b_v) e^{β(⟨Bᵀx + Kᵀb_q, y⟩ − offset)} dμ(y).

    The offset only rescales time: **t here is e^{β·offset} times the t of the kernel
    e^{β⟨Bᵀx,y⟩}**. With the default 1 and B = I the kernel is at most one. Where ‖B‖₂ > 1 and β is
    large, take offset = ‖B‖₂, since e^{β(‖B‖₂ − 1)} overflows.
    """

    attention: Attention
    beta: Float[Array, ""] = eqx.field(converter=inverse_temperature)
    offset: float = 1.0
    tilt: AbstractTilt = Automatic()

    def __call__(self, x, mu, labels=None):
        log_mass, mean = self.tilt(self.beta * self.attention.logit(x), mu)
        mass = jnp.exp(log_mass - self.beta * self.offset).astype(mean.dtype)
        return sphere.tangent(x, mass[..., None] * self.attention.output(mean))
