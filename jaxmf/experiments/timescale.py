"""How long concentration lasts: the window in which W₂(ρₜ^β, Π♯ρ₀) is below a tolerance.

By Theorem 1 of arXiv:2605.10931 the window opens at the pace of the zero-temperature limit, at a
time that does not depend on β, and stays open for a time of order log β: its end is regressed on
log β here, and the tightest bound of the theorem's form above the measured distances is drawn over
them. The law should have no symmetry, since one that keeps a cluster's mean on E keeps the cluster
there until rounding breaks it; and tokens should be quadrature nodes, since independent ones see
their own n^{−1/2} before they see 1/β.
"""

from typing import Any, Literal

import numpy as np
import xarray as xr
from pydantic import Field

from .. import plot
from ..errors import InputError, NonFiniteError
from ..fits import fit_bound
from ..observables import window
from .approach import Approach, ApproachConfig, Follower, build, coordinates, distances, quality
from .approach import inspect as inspect
from .config import Positive
from .regression import Line, fit_line
from .runner import CompileClock, Monitor, Result


class Config(ApproachConfig):
    """The keys of a timescale config."""

    experiment: Literal["timescale"]
    tolerance: Positive = Field(description="W₂ below which ρₜ counts as concentrated on Π♯ρ₀")


def prepare(config: Config) -> Approach:
    """Build what the run needs.

    **Raises:** `InputError` as `approach.build` does, or for fewer than three β.
    """
    if len(set(config.beta)) < 3:
        raise InputError(
            f"config key beta has {len(set(config.beta))} different values; a slope in log β and "
            "its interval need at least 3"
        )
    return build(config)


def run(approach: Approach, monitor: Monitor) -> Result:
    """Follow the tokens at every β, and see when they enter the window and leave it."""
    config = approach.config
    clock = CompileClock()
    times, betas = config.time.times(), sorted(set(config.beta))
    dataset = _empty(approach, betas, times)

    def result():
        dataset["w2"].attrs["method"] = follow.method
        return Result(dataset, _summary(approach, dataset, clock))

    monitor.start(len(betas) * config.time.save)
    follow = Follower(approach, monitor, clock)
    for i, beta in enumerate(betas):
        try:
            for j, seen in enumerate(follow(beta)):
                for name in ("w2", "w2_lower", "w2_upper"):
                    dataset[name][i, j] = getattr(seen, name)
        except NonFiniteError:
            monitor.keep(result())
            raise
        entry, exit = window(times, dataset["w2"].values[i], config.tolerance)
        dataset["entry_time"][i], dataset["exit_time"][i] = entry, exit
        _add_bound(dataset)
        monitor.keep(result())
    return result()


def _empty(approach: Approach, betas: list[float], times: np.ndarray) -> xr.Dataset:
    shape = {"beta": len(betas), "time": len(times)}
    units = "softmax attention time, ẋ = P V m"

    def by_beta(text):
        return "beta", np.full(len(betas), np.nan), {"long_name": text, "units": units}

    w2 = distances(approach, "w2", "W₂(ρₜ^β, Π♯ρ₀)", shape)
    return xr.Dataset(
        {
            **w2,
            "entry_time": by_beta("first time with W₂ at most the tolerance"),
            "exit_time": by_beta("first time after that with W₂ above it"),
            "bound": (
                ("beta", "time"),
                np.full(tuple(shape.values()), np.nan),
                {
                    "long_name": "K₁ √(log(β+1)/β) e^{C₁t} + K₂ e^{−ct}, fitted above W₂",
                    "units": w2["w2"][2]["units"],
                },
            ),
            "bound_entry_time": by_beta("first time with the bound at most the tolerance"),
            "bound_exit_time": by_beta("last time with the bound at most the tolerance"),
        },
        coords=coordinates(betas, times),
        attrs={
            "title": "How long concentration lasts",
            "experiment": "timescale",
            "source": "arXiv:2605.10931",
            "tolerance": approach.config.tolerance,
            "gap": approach.assumptions.gap,
            "rate_predicted": approach.assumptions.rate,
        },
    )


def _add_bound(dataset: xr.Dataset) -> None:
    """Fit the bound to all that is known so far, and see when it is below the tolerance."""
    w2 = dataset["w2_upper"].values.astype(float)
    known = np.isfinite(w2)
    beta, t = (x.values for x in xr.broadcast(dataset["beta"], dataset["time"]))
    if np.count_nonzero(w2[known]) < 4:
        return
    fit = fit_bound(beta[known], t[known], w2[known])
    dataset["bound"].values[:] = fit.bound(beta, t)
    ends = fit.bound.window(dataset["beta"].values, dataset.attrs["tolerance"])
    for name, end in zip(("bound_entry_time", "bound_exit_time"), ends, strict=True):
        dataset[name].values[:] = end
    constants = {name: float(getattr(fit.bound, name)) for name in ("K1", "C1", "K2", "c")}
    dataset["bound"].attrs |= constants | {"mean_ratio": fit.ratio}


def _line(dataset: xr.Dataset, name: str) -> Line:
    return fit_line(np.log(dataset["beta"].values), dataset[name].values)


def _summary(approach: Approach, dataset: xr.Dataset, clock: CompileClock) -> dict[str, Any]:
    exit, entry = _line(dataset, "exit_time"), _line(dataset, "entry_time")
    bound = dataset["bound"].attrs
    names = ("K1", "C1", "K2", "c", "mean_ratio")
    return {
        "experiment": "timescale",
        "beta": dataset["beta"].values,
        "tolerance": approach.config.tolerance,
        "entry_time": dataset["entry_time"].values,
        "exit_time": dataset["exit_time"].values,
        "slope": exit.slope,
        "slope_low": exit.low,
        "slope_high": exit.high,
        "entry_slope": entry.slope,
        "never_entered": int(np.isnan(dataset["entry_time"]).sum()),
        "not_left_by_the_end": int(
            (np.isnan(dataset["exit_time"]) & np.isfinite(dataset["entry_time"])).sum()
        ),
        **{f"bound_{name}": bound.get(name) for name in names},
        **quality(approach, dataset, dataset["w2"].attrs["method"]),
        **clock.summary(),
    }


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """The distances with their windows, and the windows against β."""
    return {"timescale": draw(dataset)}


@plot.styled
def draw(dataset: xr.Dataset) -> Any:
    """W₂ over time with the tolerance (left); entry and exit against β, with line and bound."""
    figure, axes = plot.subplots(1, 2, (10.0, 4.6))
    left, right = axes[0]
    beta, t = dataset["beta"].values, dataset["time"].values
    tolerance = dataset.attrs["tolerance"]
    for colour, b in zip(plot.sequence(len(beta)), beta, strict=True):
        w2 = dataset["w2"].sel(beta=b)
        left.plot(t, w2, color=colour, label=f"β = {b:g}")
        inside = (t >= float(dataset["entry_time"].sel(beta=b))) & (
            t <= float(dataset["exit_time"].sel(beta=b))
        )
        left.plot(t[inside], w2[inside], color=colour, linewidth=3.2)
        if b in (beta[0], beta[len(beta) // 2], beta[-1]):
            bound = dataset["bound"].sel(beta=b)
            shown = bound <= 1.5 * float(dataset["w2"].max())
            label = "fitted bound of Theorem 1" if b == beta[-1] else None
            left.plot(t[shown], bound[shown], color=colour, linestyle=":", label=label)
    left.axhline(tolerance, color="black", linestyle="--", linewidth=1)
    left.text(t[-1], tolerance, f"tolerance {tolerance:g}", ha="right", va="top", fontsize=8)
    left.set_yscale("log")
    left.set_xlabel("time t")
    left.set_ylabel("$W_2(\\rho_t^\\beta, \\Pi_\\#\\rho_0)$")
    left.set_title("Concentration comes and goes")
    left.legend(loc="lower left", fontsize=7)

    blue, orange = "tab:blue", "tab:orange"
    entry, exit = dataset["entry_time"].values, dataset["exit_time"].values
    right.plot(beta, exit, "o", color=blue, label="exit")
    right.plot(beta, entry, "s", color=orange, label="entry")
    line = _line(dataset, "exit_time")
    if np.isfinite(line.slope):
        label = f"exit = {line.slope:.2f} log β + {line.intercept:.2f}".replace("+ -", "− ")
        if np.isfinite(line.low):
            label += f" (95 %: {line.low:.2f} to {line.high:.2f})"
        right.plot(beta, line.slope * np.log(beta) + line.intercept, color=blue, label=label)
    ends = dataset["bound_entry_time"].values, dataset["bound_exit_time"].values
    right.fill_between(
        beta, *ends, color="grey", alpha=0.25, linewidth=0, label="where the bound says so"
    )
    right.set_xscale("log")
    right.set_ylim(bottom=0)
    right.set_xlabel("inverse temperature β")
    right.set_ylabel("time t")
    right.set_title(f"When $W_2$ is below {tolerance:g}")
    right.legend(loc="upper left", fontsize=8)
    return figure
