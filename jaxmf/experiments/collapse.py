"""Plain unnormalised self-attention collapses: all tokens end at one point.

The kernel e^{β⟨x,y⟩}/β without labels is the yardstick of arXiv:2605.30229: its maximisers are the
single points, of energy e^β/(2β).
"""

from typing import Any, Literal

import xarray as xr

from ..kernels import Exponential
from . import auxiliary, portraits
from .auxiliary import AuxiliaryConfig, Orbit, Placed, Theory, exponential_bound


class Config(AuxiliaryConfig):
    """The keys of a collapse config."""

    experiment: Literal["collapse"]


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """A single point."""
    return Theory(
        kernel=Exponential(beta),
        predict=Orbit(),
        energies={"energy_bound": exponential_bound(beta)},
        kernel_text="e^{β⟨x,y⟩}/β",
        law_text="the point u = Σwx/|Σwx|",
    )


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for a law of another dimension."""
    return auxiliary.prepare(config, theory, place=lambda config, count: Placed())


run = auxiliary.run


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Tokens for each number of them, and the way to collapse."""
    return {"collapse": portraits.draw(dataset)}


def inspect(config: Config) -> list[Any]:
    """The bound, without running anything."""
    return auxiliary.inspect(prepare(config))
