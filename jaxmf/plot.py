"""What the figures share: style and colours."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Make a function that draws a figure draw it in the house style."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def subplots(rows: int, columns: int, size: tuple[float, float], **kwargs: Any):
    """A figure that needs no display, and its array of axes."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def sequence(count: int) -> list[Any]:
    """Colours for an ordered parameter (β, say), dark to light."""
    return list(mpl.colormaps["viridis"](np.linspace(0.05, 0.85, count)))


def handle(**kwargs: Any) -> Line2D:
    """A line or a marker that only a legend shows."""
    return Line2D([], [], **kwargs)


class View(NamedTuple):
    """How points of S^{d−1} are seen in at most three dimensions: by ⟨x, basis⟩."""

    basis: Float[np.ndarray, "d k"]
    note: str

    def __call__(self, points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "k n"]:
        return (np.asarray(points, float) @ self.basis).T


def view(points: Float[np.ndarray, "n d"]) -> View:
    """S¹ and S² as they are; above them the first three principal axes of Σ xxᵀ."""
    points = np.asarray(points, float)
    d = points.shape[1]
    if d <= 3:
        return View(np.eye(d), "")
    values, vectors = np.linalg.eigh(points.T @ points / len(points))
    shown = values[-3:].sum() / values.sum()
    return View(vectors[:, :-4:-1], f"first 3 of {d} principal axes: {100 * shown:.0f} % of Σxxᵀ")


def globe(figure: Figure, where: Any, seen: View, towards: Float[np.ndarray, " d"]) -> Any:
    """Axes with the outline of the unit circle or sphere; `towards` faces the reader.

    The vertical axis stays vertical: a sphere is turned about it, and looked at from a little above
    or below.
    """
    circle = np.linspace(0, 2 * np.pi, 121)
    grey = {"color": "#c8c8c8", "linewidth": 0.6, "zorder": 0}
    if seen.basis.shape[1] == 2:
        ax = figure.add_subplot(where)
        ax.plot(np.cos(circle), np.sin(circle), **grey)
        ax.set(aspect="equal", xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))
    else:
        ax = figure.add_subplot(where, projection="3d", computed_zorder=False)
        for height in np.sin(np.radians([-60, -30, 0, 30, 60])):
            radius = np.sqrt(1 - height**2)
            ax.plot(radius * np.cos(circle), radius * np.sin(circle), height, **grey)
        for angle in np.radians(np.arange(0, 180, 30)):
            across = np.cos(circle)
            ax.plot(across * np.cos(angle), across * np.sin(angle), np.sin(circle), **grey)
        x, y, z = np.asarray(towards, float) @ seen.basis
        turn = np.degrees(np.arctan2(y, x)) if np.hypot(x, y) > 1e-6 else 0.0
        ax.view_init(elev=-25 if z < -0.1 else 25, azim=turn)
        ax.set_box_aspect((1, 1, 1), zoom=1.45)
        ax.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
    ax.set_axis_off()
    if seen.note:
        ax.text2D(0.5, -0.02, seen.note, transform=ax.transAxes, ha="center", fontsize=8)
    return ax
