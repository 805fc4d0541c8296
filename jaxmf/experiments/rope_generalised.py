"""Generalised rotary positions: rotations that do not commute, along phases of the label.

U_ξ = e^{φ₁(ξ)G₁}e^{φ₂(ξ)G₂}⋯ for skew generators Gₖ and phase maps φₖ: tokens end at U_ξᵀu, a wavy
curve where planar RoPE has a circle (arXiv:2605.30229).
"""

from functools import reduce
from operator import matmul
from typing import Annotated, Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from pydantic import AfterValidator, Field

from ..errors import InputError
from ..kernels import AbstractGauge, Exponential, Rotation
from . import auxiliary, portraits
from .auxiliary import LabelledConfig, Orbit, Theory, exponential_bound
from .config import Model, Number, as_array, check_matrix

AXES = ("x", "y", "z")


def _generator(value: Any) -> Any:
    if isinstance(value, str) and value not in AXES:
        raise ValueError(f"it must be one of the axes x, y, z, or a skew matrix, not {value!r}")
    return value if isinstance(value, str) else check_matrix(value)


Generator = Annotated[Any, AfterValidator(_generator)]


class RotationConfig(Model):
    """e^{φ(ξ)G} with φ(ξ) = multiple·ξ + amplitude·sin(waves·ξ)."""

    generator: Generator = Field(
        description="a skew matrix, or x, y, z for the rotations about an axis of R³"
    )
    multiple: Number = 0.0
    amplitude: Number = 0.0
    waves: Number = 1.0


class Config(LabelledConfig):
    """The keys of a rope_generalised config."""

    experiment: Literal["rope_generalised"]
    rotations: Annotated[list[RotationConfig], Field(min_length=1)] = Field(
        description="factors of U_ξ from left to right: the last acts first"
    )


class Phase(eqx.Module):
    """φ(ξ) = multiple·ξ + amplitude·sin(waves·ξ)."""

    multiple: float
    amplitude: float
    waves: float

    def __call__(self, xi: Float[Array, ""]) -> Float[Array, ""]:
        return self.multiple * xi + self.amplitude * jnp.sin(self.waves * xi)


def axis_generator(name: str) -> np.ndarray:
    """G with e^{tG} the rotation of R³ about this axis, by the right hand."""
    return np.cross(np.eye(3)[AXES.index(name)], np.eye(3)).T


def build_generator(key: str, given: Any, d: int) -> np.ndarray:
    """**Raises:** `InputError` for a generator that is not skew, or of another dimension."""
    if isinstance(given, str) and d != 3:
        raise InputError(f"{key} is {given}, an axis of R³; dimension = {d} needs a matrix")
    g = axis_generator(given) if isinstance(given, str) else as_array(given, d)
    if g.shape != (d, d):
        raise InputError(f"{key} has shape {g.shape}; it must be {(d, d)} (dimension = {d})")
    try:
        Rotation(g)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    return g


def build_gauge(config: Config) -> AbstractGauge:
    """**Raises:** `InputError` for a generator that is not skew, or of another dimension."""
    factors = []
    for k, rotation in enumerate(config.rotations):
        key = f"config key rotations[{k}].generator"
        turn = Rotation(build_generator(key, rotation.generator, config.dimension))
        factors.append(turn.along(Phase(rotation.multiple, rotation.amplitude, rotation.waves)))
    return reduce(matmul, factors)


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """The orbit of one point under the product."""
    if mu.labels.ndim > 1:
        raise InputError(
            f"config key labels: each label has shape {mu.labels.shape[1:]}; a phase map needs one "
            "number"
        )
    gauge = build_gauge(config)
    return Theory(
        kernel=Exponential(beta).gauge(gauge),
        predict=Orbit(gauge),
        energies={"energy_bound": exponential_bound(beta)},
        kernel_text="e^{β⟨U_ξx, U_ζy⟩}/β, U_ξ = Πₖ e^{φₖ(ξ)Gₖ}",
        law_text="the law of U_ξᵀu, u the direction of Σ w U_ξx",
    )


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for labels or generators that do not fit."""
    return auxiliary.prepare(config, theory)


run = auxiliary.run


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Tokens on their curve, and the way to it."""
    return {"rope_generalised": portraits.draw(dataset, portraits.in_order)}


def inspect(config: Config) -> list[Any]:
    """The bound, without running anything."""
    return auxiliary.inspect(prepare(config))
