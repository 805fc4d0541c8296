"""A distance bias, b(|ξ − ζ|) e^{β⟨x,y⟩}/β with b ≥ 0: positions are there, and tokens collapse.

The single points are the maximisers still, of energy (e^β/2β)∬b: a bias that is not negative slows
collapse down and does not prevent it (arXiv:2605.30229).
"""

import math
from typing import Annotated, Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Array, Float
from pydantic import Field

from ..energies import energy
from ..errors import InputError
from ..kernels import Alibi, DistanceBias, Exponential, GaussianBias
from ..kernels.check import check
from ..kernels.labels import AbstractDistanceBias
from . import auxiliary, portraits
from .auxiliary import LabelledConfig, Orbit, Theory
from .config import Model, Number, Positive


class AlibiBias(Model):
    """e^{−slope·r}."""

    name: Literal["alibi"]
    slope: Positive

    def build(self, period: float | None) -> AbstractDistanceBias:
        return Alibi(self.slope, period)


class Gaussian(Model):
    """e^{−r²/(2·length²)}."""

    name: Literal["gaussian"]
    length: Positive

    def build(self, period: float | None) -> AbstractDistanceBias:
        return GaussianBias(self.length, period)


class Table(Model):
    """The straight lines through given values at given distances; constant beyond them."""

    name: Literal["table"]
    distances: Annotated[list[Number], Field(min_length=1)]
    values: list[Number]

    @pydantic.model_validator(mode="after")
    def _fits(self):
        if len(self.values) != len(self.distances) or np.any(np.diff(self.distances) <= 0):
            raise ValueError("distances must increase, and values be as many")
        return self

    def build(self, period: float | None) -> AbstractDistanceBias:
        return DistanceBias(Lines(jnp.asarray(self.distances), jnp.asarray(self.values)), period)


class Lines(eqx.Module):
    """Linear interpolation."""

    distances: Float[Array, " k"]
    values: Float[Array, " k"]

    def __call__(self, r: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.interp(r, self.distances, self.values)


class Config(LabelledConfig):
    """The keys of a distance_bias config."""

    experiment: Literal["distance_bias"]
    bias: Annotated[AlibiBias | Gaussian | Table, Field(discriminator="name")] = Field(
        description="of the distance r of labels, round the circle for labels on one"
    )


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """A single point, as without the bias."""
    bias = config.bias.build(2 * math.pi if config.labels.name == "circle" else None)
    try:
        check(bias, mu)
    except InputError as error:
        raise InputError(f"config key bias: {error}") from None
    # ½∬b, times the kernel of two tokens at one point.
    bound = float(energy(bias, mu)) * math.exp(beta) / beta
    return Theory(
        kernel=bias * Exponential(beta),
        predict=Orbit(),
        energies={"energy_bound": bound},
        kernel_text=f"b(|ξ − ζ|) e^{{β⟨x,y⟩}}/β, b {config.bias.name}",
        law_text="the point u = Σwx/|Σwx|",
    )


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for labels that do not fit, or a bias that is negative somewhere."""
    return auxiliary.prepare(config, theory)


run = auxiliary.run


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Tokens, and the way to collapse."""
    return {"distance_bias": portraits.draw(dataset)}


def inspect(config: Config) -> list[Any]:
    """The bound, without running anything."""
    return auxiliary.inspect(prepare(config))
