"""Softmax self-attention (arXiv:2605.10931, equation (2))."""

import equinox as eqx
from jaxtyping import Array, Float

from .. import sphere
from ..attention import Attention
from ..temperature import inverse_temperature
from ..tilt import AbstractTilt, Automatic
from .base import AbstractField


class SoftmaxAttention(AbstractField):
    """v_β[μ](x) = P_x (V m_μ(u) + b_v) with u = β(Bᵀx + Kᵀb_q).

    m_μ(u) is the mean of μ tilted by e^⟨u,·⟩. Time is that of the continuity equation
    ∂ₜρ + div(ρ v_β[ρ]) = 0, without rescaling.

    **Arguments:** `attention`; `beta`, the inverse temperature β > 0, a differentiable leaf;
    `tilt`, how to sum.
    """

    attention: Attention
    beta: Float[Array, ""] = eqx.field(converter=inverse_temperature)
    tilt: AbstractTilt = Automatic()

    def __call__(self, x, mu, labels=None):
        u = self.beta * self.attention.logit(x)
        return sphere.tangent(x, self.attention.output(self.tilt(u, mu).mean))
