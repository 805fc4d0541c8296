"""The energy E[μ] = ½∬ h dμ dμ that USA-AV climbs, and how fast (arXiv:2605.30229)."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ._typing import ArrayLike
from .errors import InputError
from .fields import Ascent
from .interaction import AbstractInteraction, Automatic
from .kernels import AbstractKernel
from .kernels.check import check
from .measure import Measure


def energy(
    kernel: AbstractKernel, mu: Measure, interaction: AbstractInteraction = Automatic()
) -> Float[Array, "*batch"]:
    """E[μ] = ½ Σᵢⱼ wᵢwⱼ h((xᵢ, ξᵢ), (xⱼ, ξⱼ)), the diagonal included; for batches one by one.

    **Raises:** `InputError` if labels are missing or do not fit the kernel, or the kernel is not
    symmetric, has a gauge that is not orthogonal or a negative distance bias.
    """
    check(kernel, mu)
    return _each(lambda mu: _energy(kernel, mu, interaction), mu)


def dissipation(
    kernel: AbstractKernel, mu: Measure, interaction: AbstractInteraction = Automatic()
) -> Float[Array, "*batch"]:
    """Σ wᵢ|∇ᵢ|², ∇ᵢ = P_{xᵢ}∇ₓΦ_μ(xᵢ, ξᵢ): the squared gradient of E, and dE/dt along `Ascent`.

    **Raises:** `InputError` as `energy` does.
    """
    check(kernel, mu)
    return _each(lambda mu: _dissipation(Ascent(kernel, interaction), mu), mu)


class EnergyCurve(eqx.Module):
    """The energy along saved times of an ascent, beside what the gradient says it gains.

    - `energy`: E at each time.
    - `dissipation`: Σ wᵢ|∇ᵢ|², which is dE/dt of the exact flow.
    - `gain`: ∫ of the dissipation from the first time, to fourth order in the distance of times.
    """

    times: Float[Array, " times"]
    energy: Float[Array, " times"]
    dissipation: Float[Array, " times"]
    gain: Float[Array, " times"]

    @property
    def largest_drop(self) -> Float[Array, ""]:
        """The most that the energy falls from one time to the next; 0 for an ascent."""
        return jnp.max(-jnp.diff(self.energy), initial=0)

    @property
    def identity_error(self) -> Float[Array, ""]:
        """The largest |E(t) − E(0) − ∫ dissipation|, relative to all that was gained."""
        gained = self.energy - self.energy[0]
        error = jnp.max(jnp.abs(gained - self.gain))
        return error / jnp.maximum(jnp.max(jnp.abs(gained)), jnp.finfo(gained.dtype).tiny)


def energy_curve(
    kernel: AbstractKernel,
    mu: Measure,
    times: ArrayLike,
    interaction: AbstractInteraction = Automatic(),
) -> EnergyCurve:
    """The energy of `mu`, the measure at increasing `times` that `flow(Ascent(kernel), …)` returns.

    **Raises:** `InputError` as `energy` does, or for times that are not those of the measure.
    """
    check(kernel, mu)
    times = jnp.asarray(times, mu.points.dtype)
    if times.ndim != 1 or mu.points.shape[:-2] != times.shape:
        raise InputError(
            f"times have shape {times.shape} and the measure {mu.points.shape[:-2]}; give the "
            "times of its leading axis"
        )
    return curve(times, *_each(observer(kernel, interaction), mu))


def observer(
    kernel: AbstractKernel, interaction: AbstractInteraction = Automatic()
) -> Callable[[Measure], tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]]:
    """What `flow` should observe for an energy curve: E, the dissipation and its rate of change."""
    field = Ascent(kernel, interaction)

    def observe(mu):
        velocity = field(mu.points, mu, mu.labels)
        rate, change = jax.jvp(
            lambda points: _dissipation(field, mu.move(points)), (mu.points,), (velocity,)
        )
        return _energy(kernel, mu, interaction), rate, change

    return observe


def curve(times, energy, dissipation, change) -> EnergyCurve:
    """The energy curve of what an `observer` saw, integrated by the corrected trapezium rule."""
    h = jnp.diff(times)
    gains = h / 2 * (dissipation[1:] + dissipation[:-1]) - h**2 / 12 * (change[1:] - change[:-1])
    gain = jnp.concatenate([jnp.zeros(1, gains.dtype), jnp.cumsum(gains)])
    return EnergyCurve(times, energy, dissipation, gain)


def _energy(kernel, mu, interaction):
    value = interaction(kernel, mu.points, mu, mu.labels).value
    return jnp.dot(mu.weights, value, precision="highest") / 2


def _dissipation(field, mu):
    square = jnp.sum(field(mu.points, mu, mu.labels) ** 2, axis=-1)
    return jnp.dot(mu.weights, square, precision="highest")


def _each(f: Callable[[Measure], PyTree], mu: Measure) -> PyTree:
    """f of every measure of a batch, one after the other."""
    batch = mu.points.shape[:-2]
    if not batch:
        return f(mu)
    flat = mu.points.reshape(-1, *mu.points.shape[-2:])
    found = lax.map(lambda points: f(mu.move(points)), flat)
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), found)
