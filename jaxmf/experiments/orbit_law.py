"""Orbit-wise universality: any law on an orbit is where tokens end, for the right phase map.

Theorem 2 of arXiv:2605.30229: with U_ξ = e^{−φ(ξ)G} and φ the quantile function of a law of angles,
the maximiser e^{φ(ξ)G}u has that law on the orbit of u. Here a law of several peaks; on S² with G
about an axis, on a latitude circle.
"""

from typing import Annotated, Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from pydantic import Field

from .. import plot
from ..errors import InputError
from ..realisation import Realisation, realise_on_orbit
from . import auxiliary, portraits, realised
from .auxiliary import Theory
from .config import Model, Number, Positive
from .realised import Direction, RealisedConfig
from .rope import latitude
from .rope_generalised import Generator, build_generator


class Peak(Model):
    """weight·e^{κ(cos(θ − angle) − 1)}."""

    angle: Number
    kappa: Positive
    weight: Positive = 1.0


class Config(RealisedConfig):
    """The keys of an orbit_law config."""

    experiment: Literal["orbit_law"]
    generator: Generator = Field(description="a skew matrix, or x, y, z for an axis of R³")
    u: Direction = Field(description="where the orbit starts, θ = 0; normalised")
    peaks: Annotated[list[Peak], Field(min_length=1)] = Field(
        description="the density of θ up to a factor, their sum"
    )


class Density(eqx.Module):
    """Σ weight·e^{κ(cos(θ − angle) − 1)}."""

    angle: Float[Array, " k"]
    kappa: Float[Array, " k"]
    weight: Float[Array, " k"]

    def __call__(self, theta: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.sum(self.weight * jnp.exp(self.kappa * (jnp.cos(theta - self.angle) - 1)))


def build(config: Config, beta: float, count: int) -> Realisation:
    """**Raises:** `InputError` for a generator or a u that do not fit, or an orbit that does not
    close.
    """
    if len(config.u) != config.dimension:
        d = config.dimension
        raise InputError(f"config key u has {len(config.u)} numbers; dimension = {d} needs {d}")
    g = build_generator("config key generator", config.generator, config.dimension)
    columns = ([getattr(p, name) for p in config.peaks] for name in ("angle", "kappa", "weight"))
    density = Density(*(jnp.asarray(column, float) for column in columns))
    u = realised.direction(config.u)
    try:
        return realise_on_orbit(g, u, density=density, beta=beta, count=count, seconds=1)
    except InputError as error:
        raise InputError(f"config keys generator and u: {error}") from None


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """The law of the peaks on the orbit."""
    return realised.theory(
        config, build(config, beta, mu.size), "the law of the peaks on the orbit"
    )


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for a generator or a u that do not fit."""
    return auxiliary.prepare(config, theory, realised.place)


run = auxiliary.run


def draw_angles(ax: Any, cases: list[xr.Dataset], colours: list[Any]) -> None:
    """Azimuths of all seeds' tokens at the end, beside those of the predicted law."""
    bins = np.linspace(-np.pi, np.pi, 49)
    for case, colour in zip(cases, colours, strict=True):
        for name, style in (
            ("tokens_final", {"color": colour, "alpha": 0.45}),
            ("predicted", {"histtype": "step", "color": "black", "linewidth": 1.3}),
        ):
            x = case[name].values[..., case["weight"].values > 0, :]
            x = x[np.isfinite(x).all((-2, -1))].reshape(-1, x.shape[-1])
            if len(x):
                ax.hist(np.arctan2(x[:, 1], x[:, 0]), bins, density=True, **style)
    ax.legend(
        handles=[
            plot.handle(color=colours[0], alpha=0.45, linewidth=6, label="tokens at the end"),
            plot.handle(color="black", linewidth=1.3, label="target"),
        ]
    )
    ax.set(xlabel="azimuth", title="density of the azimuth, all seeds")


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Tokens on the orbit, their law beside the target, and the way to it."""
    curve = latitude if _circular(dataset) else None
    return {"orbit_law": portraits.draw(dataset, curve, extra=[draw_angles])}


def _circular(dataset: xr.Dataset) -> bool:
    """Whether the predicted law is on one latitude circle (or S¹), and not on another orbit."""
    d, law = dataset.sizes["component"], dataset["predicted"].values
    if d > 3 or not np.isfinite(law).any():
        return False
    return d == 2 or bool(np.nanmax(np.ptp(law[..., 2], axis=-1)) < 1e-3)


def inspect(config: Config) -> list[Any]:
    """The bound and the certificate, without running anything."""
    prepared = prepare(config)
    case = prepared.cases[0]
    return realised.inspect(prepared, build(config, case.beta, case.count))
