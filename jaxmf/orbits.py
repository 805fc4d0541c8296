"""Orbits θ ↦ e^{θG}u of a rotation group on the sphere, by their frequencies."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._tracing import known
from .errors import InputError
from .measure import Measure

_LARGEST_DENOMINATOR = 64  # of a ratio of frequencies that counts as rational


class Orbit:
    """e^{θG}u = Σⱼ cos(ωⱼθ)Aⱼ + sin(ωⱼθ)Bⱼ, from the eigenvectors of the Hermitian iG.

    G is taken to be skew (`mf.kernels.Rotation` checks it), u to be a unit vector.

    **Raises:** `InputError` if they do not fit each other, if Gu = 0, so that the orbit is a point,
    or if `jax.jit` traces them.
    """

    def __init__(self, generator, u):
        g, start = known(generator), known(u)
        if g is None or start is None:
            raise InputError("generator and u are traced; an orbit needs their values")
        if g.ndim != 2 or start.shape != g.shape[:1]:
            raise InputError(
                f"generator has shape {g.shape} and u {start.shape}; an orbit needs one generator "
                "(d, d) and a vector (d,)"
            )
        g, start = g.astype(np.float64), start.astype(np.float64)
        values, vectors = np.linalg.eigh(1j * (g - g.T) / 2)
        modes = vectors.conj().T @ start
        parts = vectors.T * modes[:, None]
        rounding = max(1e-9, 16 * float(jnp.finfo(jnp.result_type(float, generator)).eps))
        seen = (np.abs(modes) > rounding) & (values > rounding * np.abs(values).max())
        if not seen.any():
            raise InputError(
                "u is fixed by the generator (Gu = 0), so that its orbit is one point; choose a u "
                "that turns"
            )
        self.frequencies, self.dimension = values[seen], len(start)
        self._values, self._cosine, self._sine = values, parts.real, parts.imag
        self._rounding = rounding

    @property
    def period(self) -> float | None:
        """The smallest T > 0 with e^{TG}u = u; None if the frequencies have no common one."""
        base = self.frequencies.min()
        denominators = []
        for ratio in self.frequencies / base:
            fraction = Fraction(float(ratio)).limit_denominator(_LARGEST_DENOMINATOR)
            if abs(ratio - fraction) > self._rounding * ratio:
                return None
            denominators.append(fraction.denominator)
        return 2 * math.pi / float(base) * math.lcm(*denominators)

    def curve(self, angles: Float[Array | np.ndarray, "*n"]) -> Float[Array | np.ndarray, "*n d"]:
        """e^{θG}u, in NumPy for NumPy's angles."""
        np_or_jnp = np if isinstance(angles, np.ndarray) else jnp
        turned = angles[..., None] * self._values
        return np_or_jnp.cos(turned) @ self._cosine + np_or_jnp.sin(turned) @ self._sine

    def angles(self, points: np.ndarray, span: tuple[float, float]) -> np.ndarray:
        """θ in the span with e^{θG}u = x, for points x on the orbit.

        **Raises:** `InputError` for a point that is not on this part of the orbit.
        """
        Measure(points)  # unit vectors
        dtype = points.dtype
        points = points.astype(np.float64)
        turns = (span[1] - span[0]) * self.frequencies.max() / (2 * math.pi)
        grid = np.linspace(*span, 64 * math.ceil(turns + 1) + 1)
        curve = self.curve(grid)
        found = []
        for x in np.array_split(points, math.ceil(len(points) * len(grid) / 2**24)):
            theta = grid[np.argmax(x @ curve.T, axis=1)]
            for _ in range(6):  # Gauss and Newton: quadratic for points of the curve
                away, velocity = x - self.curve(theta), self._velocity(theta)
                theta = theta + np.sum(away * velocity, 1) / np.sum(velocity**2, 1)
            found.append(np.clip(theta, *span))
        theta = np.concatenate(found)
        off = np.linalg.norm(points - self.curve(theta), axis=1)
        if off.max() > max(1e-6, 1e3 * float(jnp.finfo(dtype).eps)):
            i = int(np.argmax(off))
            raise InputError(
                f"sample[{i}] is {off[i]:.3g} away from the orbit of u; every point must lie on it"
            )
        return theta

    def _velocity(self, angles):
        turned = angles[:, None] * self._values
        return (np.cos(turned) * self._values) @ self._sine - (
            np.sin(turned) * self._values
        ) @ self._cosine
