"""A Toeplitz kernel k(ξ − ζ) e^{β⟨x,y⟩}/β whose k changes sign: no collapse, and many ends.

For k = cos on a circle of labels and small β tokens end on a great circle, p cos ξ + q sin ξ, of
energy I₁(β)/(2β); at larger β other states have more, and different starts end in different ones
(arXiv:2605.30229). So every seed's energy counts, and the largest is what a search is held against.
"""

import math
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from pydantic import Field

from .. import plot
from ..errors import InputError
from ..kernels import Exponential, FourierToeplitz
from ..maximisers import maximise
from ..measure import Measure
from . import auxiliary, portraits
from .auxiliary import Case, LabelledConfig, Theory
from .config import Number, Positive
from .runner import Monitor, Result


class Config(LabelledConfig):
    """The keys of a toeplitz config."""

    experiment: Literal["toeplitz"]
    amplitudes: dict[Annotated[int, Field(ge=0)], Number] = Field(
        default={1: 1.0}, description="{m: aₘ} of k(τ) = Σ aₘ cos(2πmτ/period)"
    )
    period: Positive = 2 * math.pi
    search: Annotated[int, Field(ge=0)] = Field(
        default=64, description="starts of a search for the largest energy, 0 for none"
    )


class GreatCircle(eqx.Module):
    """p cos φ + q sin φ, φ = 2πmξ/period: the great circle nearest to the tokens' m-th mode.

    p, q are the orthonormal pair nearest to 2 Σ w x cos φ and 2 Σ w x sin φ (polar decomposition).
    """

    mode: int = eqx.field(static=True)
    period: float = eqx.field(static=True)

    def __call__(self, mu: Measure) -> Float[Array, "n d"]:
        phase = 2 * math.pi * self.mode / self.period * mu.labels
        waves = jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=1).astype(mu.points.dtype)
        found = jnp.einsum("n,nd,nk->dk", mu.weights, mu.points, waves, precision="highest")
        left, _, right = jnp.linalg.svd(found, full_matrices=False)
        return jnp.matmul(waves, jnp.matmul(left, right).T, precision="highest")


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """The great circle of the strongest mode."""
    if not config.amplitudes:
        raise InputError("config key amplitudes is empty; give at least one mode, such as {1: 1}")
    mode = max(config.amplitudes, key=lambda m: (m > 0, config.amplitudes[m]))
    if mode == 0 or config.amplitudes[mode] <= 0:
        raise InputError(
            "config key amplitudes: none but mode 0 is positive, so that there is no great circle; "
            "give a positive one, such as {1: 1}"
        )
    if mu.labels.ndim > 1:
        raise InputError(
            f"config key labels: each label has shape {mu.labels.shape[1:]}; a Fourier series in "
            "the label needs one number"
        )
    kernel = FourierToeplitz(config.amplitudes, config.period) * Exponential(beta)
    return Theory(
        kernel=kernel,
        predict=GreatCircle(mode, config.period),
        energies={"energy_great_circle": great_circle_energy(config, mode, beta, mu)},
        kernel_text=f"k(ξ − ζ) e^{{β⟨x,y⟩}}/β, k = {series(config)}",
        law_text="the great circle nearest to the tokens' strongest mode in the labels",
    )


def series(config: Config) -> str:
    """k in words, in τ = 2π/period times the difference of labels."""
    terms = []
    for m, a in sorted(config.amplitudes.items()):
        size = "" if a == 1 and m else f"{a:g} "
        wave = "" if m == 0 else "cos τ" if m == 1 else f"cos {m}τ"
        terms.append((size + wave).strip())
    return " + ".join(terms).replace("+ -", "− ")


def great_circle_energy(config: Config, mode: int, beta: float, mu: Measure) -> float:
    """½ Σ wᵢwⱼ k(ξᵢ − ξⱼ) e^{β cos(φᵢ − φⱼ)}/β, φ the phase of the mode."""
    xi, w = (np.asarray(a, np.float64) for a in (mu.labels, mu.weights))
    angle = 2 * np.pi / config.period * (xi[:, None] - xi)
    k = sum(a * np.cos(m * angle) for m, a in config.amplitudes.items())
    return float(w @ (k * np.exp(beta * np.cos(mode * angle))) @ w / (2 * beta))


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for labels or amplitudes that do not fit."""
    return auxiliary.prepare(config, theory)


def searched(config: Config, case: Case) -> Case:
    """The case with the best energy of a search of many starts beside the great circle's."""
    mu, said = case.measure, case.theory
    found = maximise(
        said.kernel,
        mu.labels,
        config.dimension,
        key=jax.random.key(config.seed),
        starts=config.search,
    )
    energies = said.energies | {"energy_searched": found.energy}
    return case._replace(theory=said._replace(energies=energies))


def run(prepared: auxiliary.Prepared, monitor: Monitor) -> Result:
    """Search the maximum at every β, if the config asks; then flow the tokens of every seed."""
    if prepared.config.search:
        cases = [searched(prepared.config, case) for case in prepared.cases]
        prepared = prepared._replace(cases=cases)
    return auxiliary.run(prepared, monitor)


def draw_ends(ax: Any, cases: list[xr.Dataset], colours: list[Any]) -> None:
    """Every seed's energy at the end, in order, relative to the great circle's."""
    for case, colour in zip(cases, colours, strict=True):
        great = float(case["energy_great_circle"])
        end = np.sort(case["energy"].values[:, -1].astype(float) / great)
        ax.plot(np.arange(1, len(end) + 1), end, "o-", color=colour, markersize=3.5, linewidth=0.8)
        if "energy_searched" in case:
            best = float(case["energy_searched"]) / great
            ax.axhline(best, color=colour, linestyle=":", linewidth=1.2)
    ax.axhline(1, color="black", linestyle="--", linewidth=1)
    if "energy_searched" in cases[0]:
        label = "best of a search"
        ax.legend(handles=[plot.handle(color="black", linestyle=":", linewidth=1.2, label=label)])
    ax.set(xlabel="seeds, in order of their energy", title="energy at the end / great circle's")


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """The best seed's tokens at every β beside the great circle; where all seeds end."""
    return {"toeplitz": portraits.draw(dataset, portraits.in_order, extra=[draw_ends], best=True)}


def inspect(config: Config) -> list[Any]:
    """The great circle's energy, without running anything."""
    return auxiliary.inspect(prepare(config))
