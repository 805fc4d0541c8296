"""Concentration at low temperature: W₂(ρₜ^β, Π♯ρ₀) over time, for several β.

The main experiment of arXiv:2605.10931. Tokens first concentrate on Π♯ρ₀, at the pace of the
zero-temperature limit; after a time of order log β the finite temperature is felt, and they leave
for the dominant eigenspace of V.
"""

import time
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from pydantic import Field

from .. import plot
from ..attention import Attention
from ..errors import InputError
from ..fields import SoftmaxAttention, ZeroTemperature
from ..flows import AbstractMethod
from ..laws import AbstractLaw
from ..measure import Measure
from ..spectra import Assumptions, Eigenspaces, assumptions, eigenspaces
from ..transport import coupling, to_axis, wasserstein
from ..transport.axis import on_axis
from ..transport.wasserstein import COSTS
from .config import (
    AttentionConfig,
    Betas,
    DistanceConfig,
    ExperimentConfig,
    Law,
    TimeConfig,
    TokensConfig,
)
from .inspect import assumptions_table, spectrum_table
from .runner import CompileClock, Monitor, Result, on_sphere, stopped


class Config(ExperimentConfig):
    """The keys of a concentration config."""

    experiment: Literal["concentration"]
    law: Law
    tokens: TokensConfig = TokensConfig()
    dimension: Annotated[int, Field(ge=2)]
    attention: AttentionConfig
    beta: Betas
    time: TimeConfig
    distance: DistanceConfig = DistanceConfig()


class Prepared(NamedTuple):
    """Everything built from a config, checked, and ready to run."""

    config: Config
    law: AbstractLaw
    measure: Measure
    attention: Attention
    spectrum: Eigenspaces
    value_spectrum: Eigenspaces
    assumptions: Assumptions
    target: Measure
    limit: ZeroTemperature
    method: AbstractMethod


def build_law(config: Any) -> AbstractLaw:
    """The config's law, of the config's dimension."""
    law = config.law.build(config.dimension)
    if law.dimension != config.dimension:
        raise InputError(
            f"config key law is of dimension {law.dimension}, but dimension = {config.dimension}"
        )
    return law


def build_measure(law: AbstractLaw, config: Any) -> Measure:
    """The config's tokens, drawn from the law."""
    tokens = config.tokens
    given = config.law.name == "file" and tokens.placement == "quadrature"
    if tokens.count is None and not given:
        raise InputError("config key tokens.count is missing; say how many tokens to place")
    try:
        if tokens.placement == "quadrature":
            return law.quadrature(tokens.count)
        return law.sample(jax.random.key(config.seed), tokens.count)
    except InputError as error:
        raise InputError(f"config key tokens: {error}") from None


def prepare(config: Config) -> Prepared:
    """Build what the run needs.

    **Raises:** `InputError` for a law, tokens or weights that do not fit, B singular or gap zero.
    """
    law = build_law(config)
    v, b = config.attention.arrays(config.dimension)
    attention = config.attention.build(config.dimension)
    spectrum = eigenspaces(v @ b.T)
    try:
        limit = ZeroTemperature(attention)
    except InputError as error:
        raise InputError(f"config key attention: {error}") from None
    if spectrum.gap == 0:
        raise InputError(
            "config key attention: M = VBᵀ has a single eigenvalue, "
            f"{float(spectrum.eigenvalues[0]):g}, so its gap is zero and there is nothing to "
            "concentrate on; choose V and B so that VBᵀ has two distinct eigenvalues"
        )
    measure = build_measure(law, config)
    return Prepared(
        config=config,
        law=law,
        measure=measure,
        attention=attention,
        spectrum=spectrum,
        value_spectrum=eigenspaces(v),
        assumptions=assumptions(attention, law),
        target=spectrum.project(measure),
        limit=limit,
        method=config.time.build(),
    )


def run(prepared: Prepared, monitor: Monitor) -> Result:
    """Flow the tokens at every β, and at zero temperature, and watch them at the saved times."""
    config, mu0, target = prepared.config, prepared.measure, prepared.target
    started = time.perf_counter()
    times = config.time.times()
    interval = jnp.asarray(times[1] - times[0], mu0.points.dtype)
    betas = list(dict.fromkeys(config.beta))
    exact, cost = on_axis(target), COSTS[config.distance.cost]
    dataset = _empty(prepared, betas, times)
    clock = CompileClock()

    def observe(mu):
        seen = {
            "finite": on_sphere(mu),
            "w2_coupling": coupling(mu, target, cost),
            "overlap_m": prepared.spectrum.overlap(mu),
            "overlap_v": prepared.value_spectrum.overlap(mu),
        }
        return seen | {"w2": to_axis(mu, target, cost)} if exact else seen

    def w2(mu, seen):
        """(value, lower, upper)"""
        if exact:
            return (seen["w2"],) * 3
        found = wasserstein(mu, target, **config.distance.model_dump())
        dataset["w2"].attrs["method"] = found.method
        return found.value, found.lower, found.upper

    def result():
        return Result(dataset, _summary(prepared, dataset, started, clock))

    monitor.start((1 + len(betas)) * config.time.save)
    look = clock(observe, mu0)
    start = look(mu0)
    start_w2 = w2(mu0, start)
    for i, beta in [(None, None), *enumerate(betas)]:
        field = prepared.limit if beta is None else SoftmaxAttention(prepared.attention, beta)
        if i in (None, 0):  # one program for every β
            step = clock(prepared.method.advance, field, mu0, interval)
        mu, seen, distances = mu0, start, start_w2
        for j, t in enumerate(times):
            if j:
                mu = step(field, mu, interval)
                seen = look(mu)
                if not seen["finite"]:
                    monitor.keep(result())
                    raise stopped(t, beta, kept=j, of=len(times))
                distances = w2(mu, seen)
                monitor.advance("zero temperature" if beta is None else f"β = {beta:g}")
            at = j if beta is None else (i, j)
            for end, distance in zip(("", "_lower", "_upper"), distances, strict=True):
                dataset[f"w2{end}" if i is not None else f"w2_zero_temperature{end}"][at] = distance
            if beta is None:
                continue
            dataset["w2_coupling"][i, j] = seen["w2_coupling"]
            for name in ("overlap_m", "overlap_v"):
                dataset[name][i, j, : len(seen[name])] = seen[name]
        if beta is not None:
            dataset["tokens_final"][i] = mu.points
        monitor.keep(result())
    return result()


def _empty(prepared: Prepared, betas: list[float], times: np.ndarray) -> xr.Dataset:
    """The dataset before anything is known, labelled."""
    mu0, spaces = prepared.measure, (prepared.spectrum, prepared.value_spectrum)
    count = max(len(space.multiplicities) for space in spaces)
    shape = (len(betas), len(times))
    dtype = np.asarray(mu0.points).dtype

    def unknown(*shape):
        return np.full(shape, np.nan, dtype)

    def padded(values):
        return np.pad(np.asarray(values, float), (0, count - len(values)), constant_values=np.nan)

    chord = "chord length" if prepared.config.distance.cost == "chordal" else "angle"
    chord += " on the unit sphere"
    eigenvalues = {
        f"{what}_{name}": ("eigenspace", padded(values), {"long_name": text, "units": "1"})
        for name, matrix, space in zip("mv", ("VBᵀ", "V"), spaces, strict=True)
        for what, values, text in (
            ("eigenvalue", space.eigenvalues, f"eigenvalue of the symmetric part of {matrix}"),
            ("multiplicity", space.multiplicities, f"dimension of that eigenspace of {matrix}"),
        )
    }
    method = "axis" if on_axis(prepared.target) else "unknown"
    distances = {
        f"{name}{end}": (
            dims,
            unknown(*sizes),
            {"long_name": f"{what}{text}", "units": chord, "method": method},
        )
        for name, dims, sizes, what in (
            ("w2", ("beta", "time"), shape, "W₂(ρₜ^β, Π♯ρ₀)"),
            ("w2_zero_temperature", ("time",), shape[1:], "W₂(ρₜ, Π♯ρ₀) at zero temperature"),
        )
        for end, text in (("", ""), ("_lower", ", at least"), ("_upper", ", at most"))
    }
    return xr.Dataset(
        {
            **distances,
            "w2_coupling": (
                ("beta", "time"),
                unknown(*shape),
                {"long_name": "√(Σ wᵢ c(xᵢ(t), Πxᵢ(0))), an upper bound of W₂", "units": chord},
            ),
            "overlap_m": (
                ("beta", "time", "eigenspace"),
                unknown(*shape, count),
                {"long_name": "Σ wᵢ|P_E xᵢ|² for the eigenspaces of M = VBᵀ", "units": "1"},
            ),
            "overlap_v": (
                ("beta", "time", "eigenspace"),
                unknown(*shape, count),
                {"long_name": "Σ wᵢ|P_E xᵢ|² for the eigenspaces of V", "units": "1"},
            ),
            "tokens_final": (
                ("beta", "token", "component"),
                unknown(len(betas), *mu0.points.shape),
                {"long_name": "tokens at the last time", "units": "1"},
            ),
            "weight": ("token", np.asarray(mu0.weights), {"long_name": "weights", "units": "1"}),
        },
        coords={
            "beta": ("beta", betas, {"long_name": "inverse temperature β", "units": "1"}),
            "time": (
                "time",
                times,
                {"long_name": "time t", "units": "softmax attention time, ẋ = P V m"},
            ),
            "eigenspace": np.arange(count),
            **eigenvalues,
        },
        attrs={
            "title": "Concentration at low temperature",
            "experiment": "concentration",
            "source": "arXiv:2605.10931",
            "gap": prepared.assumptions.gap,
            "rate_predicted": prepared.assumptions.rate,
        },
    )


def _summary(
    prepared: Prepared, dataset: xr.Dataset, started: float, clock: CompileClock
) -> dict[str, Any]:
    w2 = dataset["w2"].values
    known = np.any(np.isfinite(w2), axis=1)
    lowest = np.argmin(np.where(np.isfinite(w2), w2, np.inf), axis=1)
    widths = 1 - dataset["w2_lower"] / dataset["w2_upper"]
    found = prepared.assumptions
    return {
        "experiment": "concentration",
        "beta": dataset["beta"].values,
        "w2_min": np.where(known, w2[np.arange(len(w2)), lowest], np.nan),
        "w2_min_time": np.where(known, dataset["time"].values[lowest], np.nan),
        "gap": found.gap,
        "dim_E": found.multiplicity,
        "rate_predicted": found.rate,
        "assumptions": {
            name: {"holds": holds, "statement": statement, **numbers}
            for name, holds, statement, numbers in found.findings
        },
        "w2_method": dataset["w2"].attrs["method"],
        "w2_widest": np.fmax.reduce(widths.values, axis=None, initial=0.0),
        "tokens": prepared.measure.size,
        "wall_seconds": time.perf_counter() - started,
        **clock.summary(),
    }


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """The distance over time, and where the tokens are meanwhile."""
    return {"concentration": draw_distance(dataset), "overlaps": draw_overlaps(dataset)}


@plot.styled
def draw_distance(dataset: xr.Dataset) -> Any:
    """W₂ to Π♯ρ₀ against time, one curve for each β, the zero-temperature limit and its rate."""
    figure, axes = plot.subplots(1, 1, (8.2, 4.2))
    ax = axes[0, 0]
    t = dataset["time"].values
    colours = plot.sequence(dataset.sizes["beta"])
    for colour, beta in zip(colours, dataset["beta"].values, strict=True):
        ax.plot(t, dataset["w2"].sel(beta=beta), color=colour, label=f"β = {beta:g}")
        ends = (dataset[name].sel(beta=beta) for name in ("w2_lower", "w2_upper"))
        ax.fill_between(t, *ends, color=colour, alpha=0.25, linewidth=0)
    zero = dataset["w2_zero_temperature"].values
    ax.plot(t, zero, color="black", linestyle="--", label="β = ∞ (zero temperature)")
    rate = dataset.attrs["rate_predicted"]
    # The predicted slope, drawn through the middle of the zero-temperature curve.
    middle = len(t) // 2
    if np.isfinite(zero[middle]) and zero[middle] > 0:
        shown = rate * (t - t[middle]) >= np.log(zero[middle] / (1.1 * np.nanmax(zero)))
        line = zero[middle] * np.exp(-rate * np.where(shown, t - t[middle], 0))
        ax.plot(
            t[shown], line[shown], color="grey", linewidth=1, linestyle=":",
            label=f"predicted rate {rate:.3g}",
        )  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel("time t")
    ax.set_ylabel("$W_2(\\rho_t^\\beta, \\Pi_\\#\\rho_0)$")
    ax.set_title("Concentration at low temperature")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@plot.styled
def draw_overlaps(dataset: xr.Dataset) -> Any:
    """The mass in every eigenspace of M (above) and of V (below) against time, for each β."""
    betas = dataset["beta"].values
    size = (2.9 * len(betas) + 1.8, 5.0)
    figure, axes = plot.subplots(2, len(betas), size, sharex=True, sharey=True)
    for row, (name, matrix) in enumerate((("m", "M"), ("v", "V"))):
        values = dataset[f"eigenvalue_{name}"].values
        many = int(np.sum(np.isfinite(values)))
        shown = range(min(many, 6))  # the dominant ones; the others would be a tangle
        for ax, beta in zip(axes[row], betas, strict=True):
            for k in shown:
                overlap = dataset[f"overlap_{name}"].sel(beta=beta, eigenspace=k)
                ax.plot(dataset["time"], overlap, label=f"eigenvalue {values[k]:.3g}")
            ax.set_ylim(-0.02, 1.02)
            if row == 0:
                ax.set_title(f"β = {beta:g}")
            else:
                ax.set_xlabel("time t")
        axes[row, 0].set_ylabel(f"mass in eigenspaces of {matrix}")
        axes[row, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def inspect(config: Config) -> list[Any]:
    """The spectra of M and V, and the assumptions, without running anything."""
    law = build_law(config)
    v, b = config.attention.arrays(config.dimension)
    return [
        spectrum_table("M = VBᵀ (symmetric part)", eigenspaces(v @ b.T)),
        spectrum_table("V (symmetric part)", eigenspaces(v)),
        assumptions_table(assumptions(config.attention.build(config.dimension), law)),
    ]
