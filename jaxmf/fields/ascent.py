"""Gradient ascent of a kernel's energy: unnormalised self-attention with auxiliary variables."""

import jax.numpy as jnp
import numpy as np

from .. import sphere
from .._tracing import known
from ..errors import InputError
from ..interaction import AbstractInteraction, Automatic
from ..kernels import AbstractKernel
from .base import AbstractField


class Ascent(AbstractField):
    """v[μ](x, ξ) = P_x ∫ ∇ₓh((x, ξ), z) dμ(z), the gradient ascent of E = ½∬ h dμ dμ.

    USA-AV (arXiv:2605.30229): labels stay, tokens climb, dE/dt = Σ wᵢ|v(xᵢ)|² ≥ 0. Time is that of
    the kernel as given: for `Exponential(beta)` it is that of ẋ = P_x Σⱼ wⱼ e^{β⟨x,xⱼ⟩}xⱼ. (The
    energy's velocity is the gradient in x alone, which is that of E if h is symmetric.)
    """

    kernel: AbstractKernel
    interaction: AbstractInteraction = Automatic()

    def __call__(self, x, mu, labels=None):
        return sphere.tangent(x, self.interaction(self.kernel, x, mu, labels).gradient)


class NormalisedAscent(AbstractField):
    """v[μ](x, ξ) = P_x ∇ₓ log ∫ h((x, ξ), z) dμ(z), for kernels h > 0.

    The attention-normalised `Ascent`: the same directions, another pace. With `Exponential(beta)`
    it is β times softmax attention with V = B = I; **t here is 1/β times its t**.

    **Raises:** `InputError` where the integral is not positive; under `jax.jit` the velocity is NaN
    there.
    """

    kernel: AbstractKernel
    interaction: AbstractInteraction = Automatic()

    def __call__(self, x, mu, labels=None):
        value, gradient = self.interaction(self.kernel, x, mu, labels)
        values = known(value)
        if values is not None and np.any(values <= 0):
            index = np.argwhere(values <= 0)[0]
            raise InputError(
                f"∫h dμ is {values[tuple(index)]:.3g} at x{index.tolist()}; the normalised ascent "
                "divides by it, and needs a kernel with positive values"
            )
        mass = jnp.where(value > 0, value, jnp.nan)
        return sphere.tangent(x, gradient / mass[..., None])
