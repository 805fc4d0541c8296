"""Realised laws: what the experiments on exact realisation share.

A realised kernel has the target as the content marginal of the maximiser U_ξᵀu, but any other unit
vector in the place of u makes as good a maximiser, with another content marginal, and which one
tokens end in depends on their start. A frozen token that is u in the gauge, the anchor, settles it.
"""

from typing import Annotated, Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import AfterValidator, Field
from rich import box
from rich.table import Table

from ..kernels import Frozen
from ..label_laws import Interval
from ..measure import Measure
from ..realisation import Realisation
from . import auxiliary
from .auxiliary import AuxiliaryConfig, Orbit, Placed, Theory
from .config import Number


def _unit(value: list[float]) -> list[float]:
    if not any(value):
        raise ValueError("it must not be zero")
    return value


Direction = Annotated[list[Number], Field(min_length=2), AfterValidator(_unit)]


class RealisedConfig(AuxiliaryConfig):
    """The keys that these experiments share; labels are uniform on [0, 1]."""

    anchor: Annotated[float, Field(ge=0)] = Field(
        default=0.5, description="weight of the frozen token at u; without it u is the start's"
    )


class Given(eqx.Module):
    """A law that does not depend on the tokens."""

    points: Float[Array, "n d"]

    def __call__(self, mu: Measure) -> Float[Array, "n d"]:
        return self.points


def place(config: Any, count: int) -> Placed:
    """The midpoints of equal pieces of [0, 1]."""
    return Placed(np.asarray(Interval().nodes(count)[0]), kind="interval")


def theory(config: RealisedConfig, found: Realisation, law_text: str) -> Theory:
    """The target itself with an anchor; without one, U_ξᵀu for the u that the tokens find."""
    kernel, c = found.kernel, config.anchor
    mu = found.maximiser
    if c:
        anchor = Measure(mu.points[:1], labels=mu.labels[:1])  # in the gauge it is u, as all are
        kernel = kernel + c * Frozen(kernel, anchor)
    pulled = " + the pull of the anchor" if c else ""
    return Theory(
        kernel=kernel,
        predict=Given(mu.points) if c else Orbit(found.kernel.by),
        # ½∬h + c∫V, both largest where every token is u in the gauge.
        energies={"energy_bound": float(found.certificate.bound) * (1 + 2 * c)},
        kernel_text=f"e^{{β⟨U_ξx, U_ζy⟩}}/β{pulled}",
        law_text=law_text,
    )


def inspect(prepared: auxiliary.Prepared, found: Realisation) -> list[Any]:
    """What the theory says, and the certificate of the realisation."""
    table = Table(
        title="Certificate: the maximiser, discretised",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("tokens", "energy gap", "gradient", "W₂ to the target, at least", "at most"):
        table.add_column(column, justify="right")
    said = found.certificate
    numbers = (said.gap, said.gradient_norm, said.distance.lower, said.distance.upper)
    table.add_row(str(found.maximiser.size), *(f"{float(number):.3g}" for number in numbers))
    return [*auxiliary.inspect(prepared), table]


def direction(values: list[float]) -> Float[Array, " d"]:
    """Normalised in double precision, then in the config's."""
    u = np.asarray(values, np.float64)
    return jnp.asarray(u / np.linalg.norm(u), float)
