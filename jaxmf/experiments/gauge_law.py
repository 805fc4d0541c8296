"""Gauge-level universality: tokens end in any shape that one draws.

Theorem 4 of arXiv:2605.30229: for any map T of the labels to the sphere the reflections U_ξ that
swap u and T(ξ) are a gauge whose maximiser is T(ξ). Here T runs along a drawing on S².
"""

import math
from typing import Annotated, Any, Literal

import equinox as eqx
import jax.numpy as jnp
import xarray as xr
from jaxtyping import Array, Float
from pydantic import Field

from .. import sphere
from ..errors import InputError
from ..realisation import Realisation, realise_by_gauge
from . import auxiliary, portraits, realised
from .auxiliary import Theory
from .realised import RealisedConfig


class Config(RealisedConfig):
    """The keys of a gauge_law config."""

    experiment: Literal["gauge_law"]
    shape: Literal["heart", "spiral"] = "heart"
    size: Annotated[float, Field(gt=0, le=1.5)] = Field(
        default=0.9, description="the angle from the middle of the drawing to its farthest point"
    )


class Drawing(eqx.Module):
    """T: [0, 1] → S², a plane curve of radius 1 drawn on the sphere by the exponential map."""

    shape: str = eqx.field(static=True)
    size: float

    def __call__(self, xi: Float[Array, ""]) -> Float[Array, " 3"]:
        x, y = {"heart": _heart, "spiral": _spiral}[self.shape](xi)
        tilt = math.radians(25)  # from which side figures look at the sphere
        centre = jnp.array([math.cos(tilt), 0.0, math.sin(tilt)])
        up = jnp.array([-math.sin(tilt), 0.0, math.cos(tilt)])
        across = jnp.array([0.0, 1.0, 0.0])
        return sphere.normalise(sphere.exp(centre, self.size * (x * across + y * up)))


def _heart(xi):
    t = 2 * jnp.pi * xi
    x = 16 * jnp.sin(t) ** 3
    y = 13 * jnp.cos(t) - 5 * jnp.cos(2 * t) - 2 * jnp.cos(3 * t) - jnp.cos(4 * t)
    return x / 17, y / 17


def _spiral(xi):
    # Tokens are spread evenly over its length, nearly: the radius grows like a square root.
    radius = jnp.sqrt(0.01 + 0.99 * xi)
    angle = 6 * jnp.pi * radius
    return radius * jnp.cos(angle), radius * jnp.sin(angle)


def build(config: Config, beta: float, count: int) -> Realisation:
    """**Raises:** `InputError` for a dimension other than 3."""
    if config.dimension != 3:
        raise InputError(
            f"config key dimension is {config.dimension}; shapes are drawn on S², dimension = 3"
        )
    drawing = Drawing(config.shape, config.size)
    return realise_by_gauge(drawing, beta=beta, count=count, seconds=1)


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """The drawing."""
    return realised.theory(config, build(config, beta, mu.size), f"the {config.shape}")


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for a dimension other than 3."""
    return auxiliary.prepare(config, theory, realised.place)


run = auxiliary.run


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """The drawing that tokens end in, and the way to it."""
    return {"gauge_law": portraits.draw(dataset, portraits.in_order)}


def inspect(config: Config) -> list[Any]:
    """The bound and the certificate, without running anything."""
    prepared = prepare(config)
    case = prepared.cases[0]
    return realised.inspect(prepared, build(config, case.beta, case.count))
