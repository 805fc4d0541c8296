"""The spectral dichotomy (arXiv:2605.30229): whether tokens collapse under ⟨x, y⟩ k(ξ − ζ).

With labels uniform on a circle and x̂_m the Fourier coefficients of the map ξ ↦ x(ξ),

    E = ½ Σ_{m ∈ Z} k̂_m |x̂_m|²,   Σ |x̂_m|² = 1,

so that E ≤ ½ max_m k̂_m: the largest coefficient decides. Mode 0 is a constant map, collapse;
mode m ≥ 1 a great circle, gone round m times. For finitely many labels, or a label kernel that is
not Toeplitz, `mf.energy_bound` has the largest eigenvalue in place of the largest coefficient.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._tracing import known
from ._typing import ArrayLike
from .errors import InputError
from .kernels import FourierToeplitz, Toeplitz, fourier
from .measure import Measure


class Dichotomy(eqx.Module):
    """What the spectrum of k says of the maximisers of E = ½∬⟨x, y⟩ k(ξ − ζ) dμ dμ.

    - `energy`: the largest energy, ½ max(0, max_m k̂_m).
    - `modes`: the modes m ≥ 0 that attain it, those of k and 0; several if they tie, and then mixed
      states do too. If it is zero, the first mode that k does not have is one of them, and stands
      for all it does not have.
    - `mode`: the first of them. `collapses`: whether it is 0, so that a single point is a maximiser
      (the only ones up to rotation, if nothing ties).
    - `coefficients`: k̂_m by mode, k̂₀ = a₀ and k̂_m = k̂_{−m} = aₘ/2.
    """

    energy: Float[Array, ""]
    coefficients: dict[int, Float[Array, ""]]
    modes: tuple[int, ...] = eqx.field(static=True)
    period: float = eqx.field(static=True)

    @property
    def mode(self) -> int:
        return self.modes[0]

    @property
    def collapses(self) -> bool:
        return self.mode == 0

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        energy = f"energy {float(self.energy):.6g}"
        circles = [m for m in self.modes if m]
        around = ", ".join(str(m) for m in circles)
        winding = f"a great circle of mode {around}"
        if len(circles) > 1:
            winding = f"great circles of modes {around}"
        if not known(self.energy) > 0:
            states = f"a single point and {winding}" if self.collapses else winding
            verb = "have" if len(self.modes) > 1 else "has"
            return f"no coefficient is positive: {states} {verb} {energy}, the most there is"
        if not self.collapses:
            tie = ", which tie" if len(circles) > 1 else ""
            return f"no collapse: {winding}{tie}, {energy}"
        if circles:
            return f"a tie: a single point and {winding} have the same {energy}"
        return f"collapse: a single point, {energy}"

    def state(self, labels: ArrayLike, d: int, *, mode: int | None = None) -> Measure:
        """A predicted maximiser at these labels, in R^d: e₁ for mode 0, and for m ≥ 1
        (cos mξ, sin mξ, 0, …) with ξ in units of period/2π.

        Its energy is `energy` if the labels are equispaced, more than twice as many as any mode.

        **Arguments:** `mode`, another than the first of `modes`.

        **Raises:** `InputError` for d < 2 or labels that are not numbers (n,).
        """
        labels = jnp.asarray(labels)
        if d < 2:
            raise InputError(f"d is {d}; tokens need d ≥ 2")
        if labels.ndim != 1:
            raise InputError(f"labels have shape {labels.shape}; they must be numbers, (n,)")
        m = self.mode if mode is None else mode
        angle = 2 * np.pi * m / self.period * labels.astype(jnp.result_type(float, labels))
        points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        return Measure(jnp.pad(points, ((0, 0), (0, d - 2))), labels=labels)


def dichotomy(
    k: FourierToeplitz | Toeplitz | Callable, *, modes: int = 32, period: float = 2 * np.pi
) -> Dichotomy:
    """Collapse or not under h = ⟨x, y⟩ k(ξ − ζ), for labels uniform on a circle.

    Coefficients that differ by rounding tie.

    **Arguments:** `k`, a Fourier series, or an even function with Fourier coefficients up to
    `modes` and this `period`.

    **Raises:** `InputError` for a function that is not even or has modes past `modes`, or
    amplitudes that are not finite or that `jax.jit` traces.
    """
    if isinstance(k, Toeplitz):
        k = k.function
    if not isinstance(k, FourierToeplitz):
        k = fourier(k, modes, period)
    halves = jnp.where(np.asarray(k.modes) > 0, k.amplitudes / 2, k.amplitudes)
    values = known(halves)
    if values is None or not np.isfinite(values).all():
        raise InputError("the amplitudes of k are traced or not finite; the dichotomy needs them")
    missing = next(m for m in range(1, len(k.modes) + 2) if m not in k.modes)
    spectrum = {0: 0.0, missing: 0.0} | dict(zip(k.modes, values, strict=True))
    best = max(spectrum.values())
    slack = 64 * np.finfo(values.dtype).eps * np.abs(values).max()
    attained = tuple(sorted(m for m, value in spectrum.items() if value >= best - slack))
    coefficients = dict(zip(k.modes, halves, strict=True))
    energy = coefficients.get(attained[0], jnp.zeros((), halves.dtype)) / 2
    return Dichotomy(energy, coefficients, attained, k.period)
