"""What one run certifies by itself: how far the field, and the tokens, are from zero temperature.

The two steps of the proof of arXiv:2605.10931, Theorem 1, measured instead of estimated: the
Laplace principle bounds v_β[μ] − v_∞, and a coupling of the two flows turns that into a bound of
W₂(ρₜ^β, Π♯ρ₀).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._typing import ArrayLike
from .attention import Attention
from .fields import AbstractField, SoftmaxAttention, ZeroTemperature
from .flows import RK4, AbstractMethod, flow
from .measure import Measure
from .spectra import spectrum
from .tilt import AbstractTilt, Automatic
from .transport.axis import root
from .transport.coupling import coupling


def discrepancy(
    attention: Attention,
    beta: ArrayLike,
    mu: Measure,
    queries: Measure | None = None,
    tilt: AbstractTilt = Automatic(),
) -> Float[Array, ""]:
    """√(Σᵢ wᵢ |v_β[μ](xᵢ) − v_∞(xᵢ)|²), the Laplace principle measured; differentiable in β.

    **Arguments:** `queries`, the tokens xᵢ and weights wᵢ over which to average; μ itself if left
    out. A smaller quadrature of the same law averages as well, and lets μ have very many nodes.

    **Raises:** `InputError` if B is singular, where v_∞ is undefined, or for a β that is not
    positive.
    """
    queries = mu if queries is None else queries
    hot = SoftmaxAttention(attention, beta, tilt)(queries.points, mu)
    cold = ZeroTemperature(attention)(queries.points)
    return root(queries.integrate(jnp.sum((hot - cold) ** 2, axis=-1)))


class Certificate(NamedTuple):
    """An upper bound of W₂(ρₜ^β, Π♯ρ₀) at every time, and its parts.

    - `times`: t, in the time of the softmax field, without rescaling.
    - `discrepancy`: ‖v_β[ρₜ^β] − v_∞‖ in L²(ρₜ^β).
    - `coupled`: √(Σ wᵢ|xᵢ^β(t) − xᵢ^∞(t)|²), between tokens at β and at zero temperature.
    - `zero_temperature`: √(Σ wᵢ|xᵢ^∞(t) − Πxᵢ(0)|²).
    - `upper`: coupled + zero_temperature ≥ W₂(ρₜ^β, Π♯ρ₀), by the triangle inequality.
    """

    times: Float[Array, "*times"]
    discrepancy: Float[Array, "*times"]
    coupled: Float[Array, "*times"]
    zero_temperature: Float[Array, "*times"]
    upper: Float[Array, "*times"]


def certificate(
    attention: Attention,
    beta: ArrayLike,
    mu0: Measure,
    times: ArrayLike,
    method: AbstractMethod = RK4(),
    tilt: AbstractTilt = Automatic(),
) -> Certificate:
    """Flow the tokens of μ₀ at β and at zero temperature, side by side, and compare.

    Nothing is estimated, whatever V, B, μ₀ and β: the certificate is for these tokens and this
    method of time stepping. Differentiable in β, forward mode included. Memory does not grow with
    the number of times.

    **Arguments:** `times` and `method`, as for `flow`.

    **Raises:** `InputError` as `discrepancy` and `flow` do, and for tokens of μ₀ with P_E x = 0.
    """
    with jax.ensure_compile_time_eval():
        spaces = spectrum(attention)
    target = spaces.project(mu0)
    field = _SideBySide(SoftmaxAttention(attention, beta, tilt), ZeroTemperature(attention), mu0)

    def observe(pair):
        hot, cold = field.split(pair.points)
        coupled, zero_temperature = coupling(hot, cold), coupling(cold, target)
        return (
            discrepancy(attention, beta, hot, tilt=tilt),
            coupled,
            zero_temperature,
            coupled + zero_temperature,
        )

    both = Measure(
        jnp.concatenate([mu0.points, mu0.points]), jnp.concatenate([mu0.weights, mu0.weights]) / 2
    )
    seen = flow(field, both, times, method, observe)
    return Certificate(jnp.asarray(times, mu0.points.dtype), *seen)


class _SideBySide(AbstractField):
    """Two measures with the weights of μ₀, each in its own field, as one measure of 2n tokens."""

    first: AbstractField
    second: AbstractField
    mu0: Measure

    def split(self, points):
        return tuple(self.mu0.move(half) for half in jnp.split(points, 2))

    def __call__(self, x, mu, labels=None):
        first, second = self.split(mu.points)
        return jnp.concatenate(
            [self.first(first.points, first), self.second(second.points, second)]
        )
