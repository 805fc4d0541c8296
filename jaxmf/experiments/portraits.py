"""Figures of tokens with auxiliary variables: spheres, and what happens over time on all seeds."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from .. import plot

Panel = Callable[[Any, list[xr.Dataset], list[Any]], None]  # of axes, cases and their colours
Curve = Callable[[xr.Dataset], np.ndarray]  # of one seed, points of the predicted law, joined


@plot.styled
def draw(
    dataset: xr.Dataset,
    curve: Curve | None = None,
    extra: Sequence[Panel] = (),
    best: bool = False,
) -> Figure:
    """One seed's tokens on the sphere at the start (grey) and at the end, beside the predicted law;
    and the curves of all seeds (thin) with their median (thick).

    **Arguments:** `curve`, the predicted law as a line, rings if left out; `extra` panels; `best`,
    to show the seed with the most energy, not the first.
    """
    axis = next((dim for dim in ("count", "beta") if dim in dataset.dims), None)
    cases = (
        [dataset] if axis is None else [dataset.isel({axis: i}) for i in range(dataset.sizes[axis])]
    )
    colours = plot.sequence(len(cases))
    panels = [draw_length, draw_energy, draw_rank, *extra]
    if axis is None:
        figure = Figure(figsize=(3.9 * (1 + len(panels)), 4.1), layout="constrained")
        grid = figure.add_gridspec(1, 1 + len(panels), width_ratios=(1.25, *([1] * len(panels))))
        spheres, curves = [grid[0, 0]], [grid[0, 1 + k] for k in range(len(panels))]
    else:
        width = 4.1 * max(len(cases), len(panels))
        figure = Figure(figsize=(width, 7.4), layout="constrained")
        rows = figure.add_gridspec(2, 1, height_ratios=(1.1, 1))
        above, below = rows[0].subgridspec(1, len(cases)), rows[1].subgridspec(1, len(panels))
        spheres, curves = list(above), list(below)
    symbol = {"count": "n", "beta": "β", None: ""}[axis]
    names = ["" if axis is None else f"{symbol} = {case[axis].item():g}" for case in cases]
    for where, case, name in zip(spheres, cases, names, strict=True):
        draw_tokens(figure, where, case, name, curve, best)
    for where, panel in zip(curves, panels, strict=True):
        panel(figure.add_subplot(where), cases, colours)
    if axis is not None:
        handles = [
            plot.handle(color=colour, label=name)
            for colour, name in zip(colours, names, strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(cases))
    seeds = dataset.sizes["seed"]
    about = "" if axis == "beta" else f"β = {dataset.attrs['beta']:g}, "
    figure.suptitle(f"{dataset.attrs['title']} ({about}{seeds} seeds, thick: their median)")
    return figure


def in_order(here: xr.Dataset) -> np.ndarray:
    """The predicted points in the order of their labels, closed on a circle of them."""
    order = np.argsort(here["label"].values, kind="stable")
    if "period" in here["label"].attrs:
        order = np.append(order, order[0])
    return here["predicted"].values[order]


def draw_tokens(
    figure: Figure, where: Any, case: xr.Dataset, name: str, curve: Curve | None, best: bool
) -> None:
    """The tokens of one seed, coloured by label, and the law predicted for them."""
    end = case["energy"].values[:, -1]
    seed = 0 if not best or np.all(np.isnan(end)) else int(np.nanargmax(end))
    here = case.isel(seed=seed)
    here = here.isel(token=here["weight"].values > 0)
    start, final, law = (
        here[name].values for name in ("tokens_initial", "tokens_final", "predicted")
    )
    if not np.all(np.isfinite(final)):  # not there yet
        final = law = final[:0]
    seen = plot.view(final if len(final) else start)
    ax = plot.globe(figure, where, seen, law.mean(0) if len(law) else start.mean(0))
    ax.scatter(*seen(start), s=11, color="#8c8c8c", linewidths=0, zorder=1)
    if curve is not None and len(law):
        ax.plot(*seen(curve(here)), color="black", linewidth=1, zorder=2)
    elif len(law):
        law = np.unique(np.round(law, 3), axis=0)
        rings = {"s": 70, "facecolors": "none", "edgecolors": "black", "linewidths": 0.8}
        ax.scatter(*seen(law), zorder=2, **rings)
    colour, bar = token_colours(here)
    if len(final):
        shown = ax.scatter(*seen(final), s=16, zorder=3, linewidths=0, **colour)
        if bar:
            figure.colorbar(shown, ax=ax, shrink=0.6, pad=0.02, label=bar, location="left")
        draw_prompts(ax, here)
    title = f"seed {int(here['seed'])}: grey at the start, coloured at the end"
    ax.set_title(f"{name}, {title}" if name else title, fontsize=9)


def token_colours(here: xr.Dataset) -> tuple[dict[str, Any], str]:
    """How tokens of these labels are coloured, and what a colour bar should say."""
    if "label" not in here:
        return {"color": "#b5497b"}, ""
    labels = here["label"].values
    kind = here["label"].attrs["kind"]
    if kind == "prompts":
        return {"c": [mpl.colormaps["tab10"](int(k) % 10) for k in labels]}, ""
    values = labels.reshape(len(labels), -1)[:, 0]
    cyclic = "period" in here["label"].attrs
    return {"c": values, "cmap": "hsv" if cyclic else "viridis"}, "label ξ"


def draw_prompts(ax: Any, here: xr.Dataset) -> None:
    """The masses of prompts, where labels are prompts, as a legend."""
    if "label" not in here or here["label"].attrs["kind"] != "prompts":
        return
    labels, weights = here["label"].values, here["weight"].values
    handles = [
        plot.handle(
            color=mpl.colormaps["tab10"](int(k) % 10), marker="o", linestyle="none",
            label=f"{100 * weights[labels == k].sum():.3g} %",
        )
        for k in np.unique(labels)[:10]
    ]  # fmt: skip
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(-0.16, 0.5), fontsize=8)


def draw_seeds(ax: Any, time: Any, values: np.ndarray, colour: Any, **kwargs: Any) -> None:
    """The curve of every seed, thin, and their median."""
    values = values[np.isfinite(values).all(1)].astype(float)
    if len(values):
        ax.plot(time, values.T, color=colour, linewidth=0.5, alpha=0.35)
        ax.plot(time, np.median(values, axis=0), color=colour, linewidth=2.2, **kwargs)


def draw_length(ax: Any, cases: list[xr.Dataset], colours: list[Any]) -> None:
    """Resultant length; and the conditional variance, where several tokens share a label."""
    for case, colour in zip(cases, colours, strict=True):
        draw_seeds(ax, case["time"], case["resultant_length"].values, colour)
        shared = np.nanmax(case["conditional_variance"].values, initial=0) > 1e-6
        if shared and "label" in case:
            draw_seeds(
                ax, case["time"], case["conditional_variance"].values, "#d0753a",
                label="conditional variance",
            )  # fmt: skip
    top = 1.03
    if ax.get_legend_handles_labels()[0]:
        top = 1.3  # room for the legend
        handles = [
            plot.handle(color=colours[0], linewidth=2.2, label="resultant length"),
            plot.handle(color="#d0753a", linewidth=2.2, label="conditional variance"),
        ]
        ax.legend(handles=handles, loc="upper right")
    ax.set(
        xlabel="time t",
        ylim=(-0.03, top),
        yticks=np.linspace(0, 1, 6),
        title="resultant length |Σ wx|",
    )


def draw_energy(ax: Any, cases: list[xr.Dataset], colours: list[Any]) -> None:
    """The energy beside what is known of it; relative to that, where it depends on the case."""
    known = next((n for n in ("energy_great_circle", "energy_bound") if n in cases[0]), None)
    text = {"energy_bound": "bound", "energy_great_circle": "great circle"}.get(known, "")
    values = [1.0 if known is None else float(case[known]) for case in cases]
    relative = max(values) > min(values) * (1 + 1e-9)
    for case, colour, value in zip(cases, colours, values, strict=True):
        scale = value if relative else 1
        draw_seeds(ax, case["time"], case["energy"].values / scale, colour)
    if known is not None:
        ax.axhline(1 if relative else values[0], color="black", linestyle="--", linewidth=1)
        ax.legend(
            handles=[plot.handle(color="black", linestyle="--", linewidth=1, label=text)],
            loc="lower right",
        )
    ax.set(xlabel="time t", title=f"energy / that of the {text}" if relative else "energy")


def draw_rank(ax: Any, cases: list[xr.Dataset], colours: list[Any]) -> None:
    """How many directions the tokens use."""
    for case, colour in zip(cases, colours, strict=True):
        draw_seeds(ax, case["time"], case["effective_rank"].values, colour)
    ax.set(xlabel="time t", ylim=(0.95, None), title="effective rank of Σ wxxᵀ")
