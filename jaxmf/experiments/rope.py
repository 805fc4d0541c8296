"""Rotary positions (RoPE) as a gauge: tokens keep apart, on an orbit of the rotations.

With the kernel e^{β⟨U_ξx, U_ζy⟩}/β, U_ξ turning the k-th pair of coordinates by ξθₖ, the conjugated
tokens q = U_ξx follow the plain flow and collapse, so the tokens end at x(ξ) = U_ξᵀu: on S² with
the last coordinate at rest, a latitude circle; with d/2 planes, a curve on a torus
(arXiv:2605.30229).
"""

from typing import Any, Literal

import numpy as np
import xarray as xr
from pydantic import Field

from ..errors import InputError
from ..kernels import Exponential, RoPE
from . import auxiliary, portraits
from .auxiliary import LabelledConfig, Orbit, Theory, exponential_bound
from .config import Number, Positive


class Config(LabelledConfig):
    """The keys of a rope config."""

    experiment: Literal["rope"]
    frequencies: list[Number] | list[list[Number]] | None = Field(
        default=None,
        description="θₖ of the planes, by default base^(−2k/d); lists of m for labels of m numbers",
    )
    base: Positive = 1e4
    fix_last: bool = Field(
        default=False, description="leave the last coordinate at rest, which an odd d needs"
    )


def build_gauge(config: Config) -> RoPE:
    """**Raises:** `InputError` for an odd d without `fix_last`, or frequencies that do not fit."""
    d = config.dimension
    if d % 2 and not config.fix_last:
        raise InputError(
            f"config key fix_last is false and dimension = {d} is odd: planar RoPE turns pairs of "
            "coordinates; fix_last: true leaves the last one at rest"
        )
    lengths = {len(f) for f in config.frequencies or () if isinstance(f, list)}
    if len(lengths) > 1:
        raise InputError(f"config key frequencies has rows of different lengths, {sorted(lengths)}")
    try:
        return RoPE(d, config.frequencies, base=config.base, fix_last=config.fix_last)
    except InputError as error:
        raise InputError(f"config key frequencies: {error}") from None


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """The orbit of one point under the rotations."""
    gauge = build_gauge(config)
    return Theory(
        kernel=Exponential(beta).gauge(gauge),
        predict=Orbit(gauge),
        energies={"energy_bound": exponential_bound(beta)},
        kernel_text="e^{β⟨U_ξx, U_ζy⟩}/β, U_ξ planar rotations by ξθₖ",
        law_text="the law of U_ξᵀu, u the direction of Σ w U_ξx",
    )


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for labels or frequencies that do not fit."""
    return auxiliary.prepare(config, theory)


run = auxiliary.run


def latitude(here: xr.Dataset) -> np.ndarray:
    """The circle about the last axis of S², or S¹, through the predicted points."""
    law = here["predicted"].values
    angle = np.linspace(0, 2 * np.pi, 241)
    circle = np.stack([np.cos(angle), np.sin(angle)], 1)
    if law.shape[1] == 2:
        return circle
    height = float(law[:, 2].mean())
    return np.c_[np.sqrt(1 - height**2) * circle, np.full(len(angle), height)]


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Tokens on their orbit, and the way to it."""
    curve = latitude if dataset.sizes["component"] <= 3 else None
    return {"rope": portraits.draw(dataset, curve)}


def inspect(config: Config) -> list[Any]:
    """The bound, without running anything."""
    return auxiliary.inspect(prepare(config))
