"""Gauges U: A → O(d): rotary positions (RoPE), rotations by any generators, prefixes.

With a gauge, q = U_ξx follows the flow of the kernel without it, exactly; so a gauged exponential
kernel has the maximisers x*(ξ) = U_ξᵀu, for any u, with the energy of the plain one.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import expm
from jaxtyping import Array, Float

from .. import sphere
from .._tracing import known
from .._typing import ArrayLike
from ..errors import InputError
from .algebra import AbstractGauge, label_of
from .labels import as_function


class RoPE(AbstractGauge):
    """Rotary positions: the k-th pair of coordinates is turned by the angle ξ·θₖ.

    **Arguments:**

    - `dimension`: d. An odd d needs `fix_last=True`: the last coordinate has no partner and stays.
    - `frequencies`: θₖ, one for each of the ⌊d/2⌋ planes; by default base^{−2k/d}. Shape
      `(planes, m)` for labels of m numbers (several commuting angles): the angle is ⟨θₖ, ξ⟩.

    **Raises:** `InputError` for an odd d without `fix_last`, d < 2 or frequencies that do not fit.
    """

    dimension: int = eqx.field(static=True)
    frequencies: Float[Array, "planes *m"]

    def __init__(
        self,
        dimension: int,
        frequencies: ArrayLike | None = None,
        *,
        base: float = 1e4,
        fix_last: bool = False,
    ):
        if dimension < 2:
            raise InputError(f"dimension is {dimension}; tokens need d ≥ 2")
        if dimension % 2 and not fix_last:
            raise InputError(
                f"dimension is {dimension}, and planar RoPE turns pairs of coordinates: the last "
                "one would stay fixed; give fix_last=True if that is meant"
            )
        planes = dimension // 2
        if frequencies is None:
            frequencies = float(base) ** (-2 * np.arange(planes) / dimension)
        frequencies = jnp.asarray(frequencies, jnp.result_type(float))
        if frequencies.ndim not in (1, 2) or len(frequencies) != planes:
            raise InputError(
                f"frequencies have shape {frequencies.shape}; d = {dimension} has {planes} planes, "
                f"so it must be ({planes},), or ({planes}, m) for labels of m numbers"
            )
        self.dimension, self.frequencies = dimension, frequencies

    def apply(self, xi, x):
        return self._turn(1, xi, x)

    def undo(self, xi, x):
        return self._turn(-1, xi, x)

    def _turn(self, sign, xi, x):
        _check_dimension(x, self.dimension, "RoPE")
        xi = label_of(xi, self.frequencies.shape[1:], "RoPE")
        angle = sign * jnp.dot(self.frequencies, xi, precision="highest")
        even, odd = x[: 2 * len(angle) : 2], x[1 : 2 * len(angle) : 2]
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        pairs = jnp.stack([cosine * even - sine * odd, sine * even + cosine * odd], axis=-1)
        return jnp.concatenate([pairs.reshape(-1), x[2 * len(angle) :]])


class Rotation(AbstractGauge):
    """e^{ξG} for a skew generator G (d, d); for m of them, (m, d, d), e^{Σ ξₖGₖ} and labels of m
    numbers.

    Generators that do not commute, one after the other, are `Rotation(G) @ Rotation(H)`: the orbits
    of e^{ξG}e^{ξH} are wavy curves.

    **Raises:** `InputError` for a generator that is not skew, or not of this shape.
    """

    generator: Float[Array, "*m d d"]

    def __init__(self, generator: ArrayLike):
        g = jnp.asarray(generator, jnp.result_type(float))
        if g.ndim not in (2, 3) or g.shape[-1] != g.shape[-2] or g.shape[-1] < 2:
            raise InputError(
                f"generator has shape {g.shape}; it must be (d, d) with d ≥ 2, or (m, d, d)"
            )
        values = known(g)
        if values is not None:
            if not np.all(np.isfinite(values)):
                raise InputError("generator is not finite")
            defect = np.abs(values + np.swapaxes(values, -1, -2)).max()
            if defect > 1e-6 * max(np.abs(values).max(), 1e-300):
                raise InputError(
                    f"generator is not skew: G + Gᵀ has entries up to {defect:.2g}; e^(ξG) is a "
                    "rotation only if G + Gᵀ = 0"
                )
        self.generator = (g - jnp.swapaxes(g, -1, -2)) / 2

    def apply(self, xi, x):
        return jnp.matmul(self._matrix(xi, x), x, precision="highest")

    def undo(self, xi, x):
        return jnp.matmul(x, self._matrix(xi, x), precision="highest")

    def _matrix(self, xi, x):
        _check_dimension(x, self.generator.shape[-1], "Rotation")
        xi = label_of(xi, self.generator.shape[:-2], "Rotation")
        g = jnp.tensordot(xi, self.generator, xi.ndim, precision="highest")
        d = g.shape[-1]
        if d > 3:
            return expm(g)
        # Rodrigues' formula, in a fraction of the time that `expm` takes to compile and to run.
        angle = sphere.norm(g.reshape(-1)) / np.sqrt(2)
        once, twice = jnp.sinc(angle / np.pi), jnp.sinc(angle / (2 * np.pi)) ** 2 / 2
        return jnp.eye(d) + once * g + twice * jnp.matmul(g, g, precision="highest")


class Along(AbstractGauge):
    """U_{φ(ξ)}: a gauge along any map φ of the labels, a phase map if U is a rotation."""

    of: AbstractGauge
    phase: Callable = eqx.field(converter=as_function)

    def apply(self, xi, x):
        return self.of.apply(self._label(xi), x)

    def undo(self, xi, x):
        return self.of.undo(self._label(xi), x)

    def _label(self, xi):
        if xi is None:
            raise InputError("the tokens have no labels; a phase map needs one for each")
        return jnp.asarray(self.phase(xi))


class Prefix(AbstractGauge):
    """One orthogonal matrix for each prompt: U_k for the label k = 0, 1, …, prompts − 1.

    `mf.kernels.OrthogonalMap` is the same for a function of the label, `Householder` for
    reflections.

    **Raises:** `InputError` for matrices that are not orthogonal (with their defect).
    """

    matrices: Float[Array, "prompts d d"]

    def __init__(self, matrices: ArrayLike):
        u = jnp.asarray(matrices, jnp.result_type(float))
        if u.ndim != 3 or u.shape[1] != u.shape[2] or u.shape[1] < 2 or not u.shape[0]:
            raise InputError(
                f"matrices have shape {u.shape}; they must be (prompts, d, d) with d ≥ 2"
            )
        if known(u) is not None:
            defects = orthogonality_defect(known(u))
            worst = int(np.argmax(np.nan_to_num(defects, nan=np.inf)))
            check_orthogonal(f"matrices[{worst}]", defects[worst], u.dtype)
        self.matrices = u

    def apply(self, xi, x):
        return jnp.matmul(self._matrix(xi, x), x, precision="highest")

    def undo(self, xi, x):
        return jnp.matmul(x, self._matrix(xi, x), precision="highest")

    def _matrix(self, xi, x):
        _check_dimension(x, self.matrices.shape[-1], "Prefix")
        return _of_prompt(self.matrices, xi, "Prefix")


class Householder(AbstractGauge):
    """The reflection I − 2vvᵀ/|v|² for a vector v of each label; the identity where v = 0.

    **Arguments:** `vectors`: an array (prompts, d) for labels 0, 1, …, or a function ξ ↦ v.
    """

    vectors: Float[Array, "prompts d"] | Callable

    def __init__(self, vectors: ArrayLike | Callable):
        if callable(vectors) and not isinstance(vectors, jnp.ndarray):
            self.vectors = as_function(vectors)
            return
        v = jnp.asarray(vectors, jnp.result_type(float))
        if v.ndim != 2 or v.shape[1] < 2 or not len(v):
            raise InputError(f"vectors have shape {v.shape}; they must be (prompts, d) with d ≥ 2")
        values = known(v)
        if values is not None and not np.all(np.isfinite(values)):
            bad = np.flatnonzero(~np.isfinite(values).all(1))[0]
            raise InputError(f"vectors[{bad}] is not finite")
        self.vectors = v

    def apply(self, xi, x):
        if callable(self.vectors):
            if xi is None:
                raise InputError("the tokens have no labels; Householder needs one for each")
            v = self.vectors(xi)
        else:
            v = _of_prompt(self.vectors, xi, "Householder")
        _check_dimension(x, v.shape[-1], "Householder")
        v = sphere.normalise(v)
        return x - 2 * jnp.dot(v, x, precision="highest") * v

    def undo(self, xi, x):
        return self.apply(xi, x)


class OrthogonalMap(AbstractGauge):
    """U_ξ for any function ξ ↦ U_ξ that returns orthogonal matrices (d, d).

    That they are orthogonal is checked on the labels it meets.
    """

    function: Callable = eqx.field(converter=as_function)

    def apply(self, xi, x):
        return jnp.matmul(self._matrix(xi, x), x, precision="highest")

    def undo(self, xi, x):
        return jnp.matmul(x, self._matrix(xi, x), precision="highest")

    def _matrix(self, xi, x):
        if xi is None:
            raise InputError("the tokens have no labels; OrthogonalMap needs one for each")
        u = jnp.asarray(self.function(xi))
        if u.shape != (x.shape[-1],) * 2:
            raise InputError(
                f"the function of OrthogonalMap returns shape {u.shape}; tokens of dimension "
                f"{x.shape[-1]} need {(x.shape[-1],) * 2}"
            )
        return u


def _of_prompt(table: Array, xi: Array | None, who: str) -> Array:
    """The row of the prompt ξ; NaN, where JAX would silently take the last, if there is none."""
    xi = label_of(xi, (), who)
    if not jnp.issubdtype(xi.dtype, jnp.integer):
        raise InputError(
            f"labels are {xi.dtype}; {who} needs whole numbers from 0 to {len(table) - 1}"
        )
    return table.at[jnp.where(xi < 0, len(table), xi)].get(mode="fill", fill_value=jnp.nan)


def orthogonality_defect(u: np.ndarray) -> np.ndarray:
    """The largest entry of |UᵀU − I| for each matrix."""
    return np.abs(np.swapaxes(u, -1, -2) @ u - np.eye(u.shape[-1])).max((-1, -2))


def check_orthogonal(name: str, defect: float, dtype) -> None:
    """**Raises:** `InputError` if the defect of a matrix is not rounding."""
    if not defect <= 1e3 * float(jnp.finfo(dtype).eps):
        raise InputError(
            f"{name} is not orthogonal: UᵀU − I has entries up to {defect:.2g}; a gauge must be"
        )


def _check_dimension(x: Array, dimension: int, who: str) -> None:
    if x.shape[-1] != dimension:
        raise InputError(
            f"tokens have dimension {x.shape[-1]} and {who} acts on {dimension}; they must agree"
        )
