"""Kernels of the labels alone: what positions or prompts add to attention."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from .. import sphere
from .._tracing import known
from .._typing import ArrayLike
from ..errors import InputError
from .algebra import AbstractLabelKernel, label_of


def as_function(f: Callable) -> Callable:
    """A function that may stand in a pytree; one with parameters to differentiate is a module."""
    return f if isinstance(f, (eqx.Module, Partial)) else Partial(f)


class Constant(AbstractLabelKernel):
    """c, whatever the tokens and labels."""

    value: Float[Array, ""] = eqx.field(converter=lambda c: jnp.asarray(c, jnp.result_type(float)))

    def factor(self, xi, zeta):
        return self.value


class Toeplitz(AbstractLabelKernel):
    """k(ξ − ζ) for an even function k of a number, or of a vector if the labels are vectors."""

    function: Callable = eqx.field(converter=as_function)

    def factor(self, xi, zeta):
        if xi is None:
            label_of(xi, (), "a Toeplitz kernel")
        return self.function(xi - zeta)


class FourierToeplitz(AbstractLabelKernel):
    """Σₘ aₘ cos(2πm(ξ − ζ)/period): a Toeplitz kernel on a circle of labels, by its coefficients.

    In complex coefficients k̂₀ = a₀ and k̂_{±m} = aₘ/2. Against an exponential kernel its sums are
    2M + 1 exponential tilts for M modes.

    **Arguments:** `amplitudes`: {m: aₘ} with m = 0, 1, 2, …; `period` of the labels.

    **Raises:** `InputError` for a mode that is not a whole number ≥ 0, no modes, or a period that
    is not positive.
    """

    modes: tuple[int, ...] = eqx.field(static=True)
    amplitudes: Float[Array, " modes"]
    period: float = eqx.field(static=True)

    def __init__(self, amplitudes: dict[int, ArrayLike], period: float = 2 * np.pi):
        if not amplitudes:
            raise InputError("amplitudes is empty; give at least one mode, such as {1: 1.0}")
        for mode in amplitudes:
            if not isinstance(mode, (int, np.integer)) or mode < 0:
                raise InputError(f"amplitudes has mode {mode!r}; modes are whole numbers ≥ 0")
        if not (np.isfinite(period) and period > 0):
            raise InputError(f"period is {period}; it must be finite and positive")
        self.modes = tuple(sorted(int(mode) for mode in amplitudes))
        self.amplitudes = jnp.stack(
            [jnp.asarray(amplitudes[mode], jnp.result_type(float)) for mode in self.modes]
        )
        self.period = float(period)

    def factor(self, xi, zeta):
        label_of(xi, (), "a Fourier series in the label")
        angle = 2 * np.pi / self.period * (xi - zeta)
        return jnp.dot(self.amplitudes, jnp.cos(jnp.asarray(self.modes) * angle))

    def features(
        self, labels: Float[Array, " n"]
    ) -> tuple[Float[Array, " r"], Float[Array, "r n"]]:
        """Signs s and functions |f| ≤ 1 with k(ξ − ζ) = Σᵣ sᵣ fᵣ(ξ) fᵣ(ζ)."""
        label_of(labels[0], (), "a Fourier series in the label")
        modes = np.asarray(self.modes)
        angle = 2 * np.pi / self.period * modes[:, None] * labels
        signs = jnp.concatenate([self.amplitudes, self.amplitudes[modes > 0]])
        return signs, jnp.concatenate([jnp.cos(angle), jnp.sin(angle)[modes > 0]])


def fourier(k: Callable, modes: int, period: float = 2 * np.pi) -> FourierToeplitz:
    """The Fourier series of an even function k up to the mode `modes`, by 8·modes + 8 samples.

    **Raises:** `InputError` if k is not even, or has modes past `modes` that matter.
    """
    count = 8 * modes + 8
    samples = np.asarray(jax.vmap(k)(jnp.arange(count) * (period / count)), np.float64)
    spectrum = np.fft.rfft(samples) / count
    size = max(np.abs(spectrum).max(), 1e-300)
    if np.abs(spectrum.imag).max() > 1e-6 * size:
        raise InputError("k is not even: k(τ) = k(−τ) is what makes a Toeplitz kernel symmetric")
    left = np.abs(spectrum[modes + 1 :]).max()
    if left > 1e-6 * size:
        raise InputError(
            f"k has Fourier coefficients past mode {modes}, of size {left:.2g}; ask for more "
            "modes, or use Toeplitz(k), which needs none"
        )
    amplitudes = spectrum.real[: modes + 1] * np.where(np.arange(modes + 1) > 0, 2, 1)
    kept = [m for m in range(modes + 1) if abs(amplitudes[m]) > 1e-12 * size] or [0]
    return FourierToeplitz({m: amplitudes[m] for m in kept}, period)


class AbstractDistanceBias(AbstractLabelKernel):
    """b(|ξ − ζ|) ≥ 0, a bias of attention towards near positions; on a circle if it has a period.

    Times a content kernel that is increasing it leaves collapse as it is: maximisers are single
    points (arXiv:2605.30229). That b ≥ 0 is checked on the labels it meets.
    """

    period: eqx.AbstractVar[float | None]

    @abc.abstractmethod
    def bias(self, distance: Float[Array, ""]) -> Float[Array, ""]:
        """b at a distance ≥ 0."""

    def factor(self, xi, zeta):
        return self.bias(self.distance(xi, zeta))

    def distance(self, xi, zeta) -> Float[Array, ""]:
        """|ξ − ζ|, of numbers or of vectors; round the circle if there is a period."""
        if xi is None:
            label_of(xi, (), "a distance bias")
        difference = jnp.asarray(xi - zeta, jnp.result_type(float, xi))
        if self.period is not None:
            difference -= self.period * jnp.round(difference / self.period)
        return sphere.norm(difference.reshape(-1))


class DistanceBias(AbstractDistanceBias):
    """b(|ξ − ζ|) for a function b ≥ 0 (one that changes sign is a `Toeplitz` kernel)."""

    function: Callable = eqx.field(converter=as_function)
    period: float | None = eqx.field(static=True, default=None)

    def bias(self, distance):
        return self.function(distance)


class Alibi(AbstractDistanceBias):
    """e^{−slope·|ξ − ζ|}: attention with linear biases, where the bias is added to the logits."""

    slope: Float[Array, ""] = eqx.field(converter=lambda x: _positive("slope", x))
    period: float | None = eqx.field(static=True, default=None)

    def bias(self, distance):
        return jnp.exp(-self.slope * distance)


class GaussianBias(AbstractDistanceBias):
    """e^{−|ξ − ζ|²/(2·length²)}."""

    length: Float[Array, ""] = eqx.field(converter=lambda x: _positive("length", x))
    period: float | None = eqx.field(static=True, default=None)

    def bias(self, distance):
        return jnp.exp(-((distance / self.length) ** 2) / 2)


def _positive(name: str, value: ArrayLike) -> Float[Array, ""]:
    value = jnp.asarray(value, jnp.result_type(float))
    number = known(value)
    if number is not None and not (number.ndim == 0 and 0 < number < np.inf):
        raise InputError(f"{name} is {number}; it must be one finite, positive number")
    return value
