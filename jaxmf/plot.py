"""What the figures share: style and colours."""

import functools
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
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
