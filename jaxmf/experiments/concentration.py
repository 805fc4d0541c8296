"""Concentration at low temperature: W₂(ρₜ^β, Π♯ρ₀) over time, for several β.

The main experiment of arXiv:2605.10931. Tokens first concentrate on Π♯ρ₀, at the pace of the
zero-temperature limit; after a time of order log β the finite temperature is felt, and they leave
for the dominant eigenspace of V.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from .. import plot
from ..errors import NonFiniteError
from ..spectra import Eigenspaces, eigenspaces
from .approach import Approach, ApproachConfig, Follower, build, coordinates, distances, quality
from .approach import inspect as inspect
from .runner import CompileClock, Monitor, Result


class Config(ApproachConfig):
    """The keys of a concentration config."""

    experiment: Literal["concentration"]


class Prepared(NamedTuple):
    """The approach to Π♯ρ₀, and the eigenspaces of V, where the tokens go afterwards."""

    approach: Approach
    value_spectrum: Eigenspaces


def prepare(config: Config) -> Prepared:
    """Build what the run needs. **Raises:** `InputError` as `approach.build` does."""
    value = config.attention.arrays(config.dimension)[0]
    return Prepared(build(config), eigenspaces(value))


def run(prepared: Prepared, monitor: Monitor) -> Result:
    """Flow the tokens at every β, and at zero temperature, and watch them at the saved times."""
    approach, config = prepared.approach, prepared.approach.config
    clock = CompileClock()
    times = config.time.times()
    betas = list(dict.fromkeys(config.beta))
    dataset = _empty(prepared, betas, times)

    def observe(mu):
        return {
            "overlap_m": approach.spectrum.overlap(mu),
            "overlap_v": prepared.value_spectrum.overlap(mu),
        }

    def result():
        for name in ("w2", "w2_zero_temperature"):
            dataset[name].attrs["method"] = follow.method
        return Result(dataset, _summary(prepared, dataset, clock))

    monitor.start((1 + len(betas)) * config.time.save)
    follow = Follower(approach, monitor, clock, observe)
    for i, beta in [(None, None), *enumerate(betas)]:
        try:
            for j, seen in enumerate(follow(beta)):
                for end in ("", "_lower", "_upper"):
                    value = getattr(seen, f"w2{end}")
                    if beta is None:
                        dataset[f"w2_zero_temperature{end}"][j] = value
                    else:
                        dataset[f"w2{end}"][i, j] = value
                if beta is None:
                    continue
                dataset["w2_coupling"][i, j] = seen.others["coupling"]
                for name in ("overlap_m", "overlap_v"):
                    overlap = seen.others[name]
                    dataset[name][i, j, : len(overlap)] = overlap
        except NonFiniteError:
            monitor.keep(result())
            raise
        if beta is not None:
            dataset["tokens_final"][i] = seen.measure.points
        monitor.keep(result())
    return result()


def _empty(prepared: Prepared, betas: list[float], times: np.ndarray) -> xr.Dataset:
    """The dataset before anything is known, labelled."""
    approach = prepared.approach
    mu0, spaces = approach.measure, (approach.spectrum, prepared.value_spectrum)
    count = max(len(space.multiplicities) for space in spaces)
    shape = {"beta": len(betas), "time": len(times)}
    dtype = np.asarray(mu0.points).dtype

    def unknown(*shape):
        return np.full(shape, np.nan, dtype)

    def padded(values):
        return np.pad(np.asarray(values, float), (0, count - len(values)), constant_values=np.nan)

    eigenvalues = {
        f"{what}_{name}": ("eigenspace", padded(values), {"long_name": text, "units": "1"})
        for name, matrix, space in zip("mv", ("VBᵀ", "V"), spaces, strict=True)
        for what, values, text in (
            ("eigenvalue", space.eigenvalues, f"eigenvalue of the symmetric part of {matrix}"),
            ("multiplicity", space.multiplicities, f"dimension of that eigenspace of {matrix}"),
        )
    }
    w2 = distances(approach, "w2", "W₂(ρₜ^β, Π♯ρ₀)", shape)
    zero = "W₂(ρₜ, Π♯ρ₀) at zero temperature"
    return xr.Dataset(
        {
            **w2,
            **distances(approach, "w2_zero_temperature", zero, {"time": len(times)}),
            "w2_coupling": (
                ("beta", "time"),
                unknown(*shape.values()),
                {
                    "long_name": "√(Σ wᵢ c(xᵢ(t), Πxᵢ(0))), an upper bound of W₂",
                    "units": w2["w2"][2]["units"],
                },
            ),
            "overlap_m": (
                ("beta", "time", "eigenspace"),
                unknown(*shape.values(), count),
                {"long_name": "Σ wᵢ|P_E xᵢ|² for the eigenspaces of M = VBᵀ", "units": "1"},
            ),
            "overlap_v": (
                ("beta", "time", "eigenspace"),
                unknown(*shape.values(), count),
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
            **coordinates(betas, times),
            "eigenspace": np.arange(count),
            **eigenvalues,
        },
        attrs={
            "title": "Concentration at low temperature",
            "experiment": "concentration",
            "source": "arXiv:2605.10931",
            "gap": approach.assumptions.gap,
            "rate_predicted": approach.assumptions.rate,
        },
    )


def _summary(prepared: Prepared, dataset: xr.Dataset, clock: CompileClock) -> dict[str, Any]:
    w2 = dataset["w2"].values
    known = np.any(np.isfinite(w2), axis=1)
    lowest = np.argmin(np.where(np.isfinite(w2), w2, np.inf), axis=1)
    found = prepared.approach.assumptions
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
        **quality(prepared.approach, dataset, dataset["w2"].attrs["method"]),
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
