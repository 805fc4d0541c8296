"""Which way of summing suits which size."""

import equinox as eqx

from .base import AbstractTilt
from .dense import Dense
from .streamed import Streamed


class Automatic(AbstractTilt):
    """The fastest way for the shapes at hand; `choose` says which, and why.

    Shapes are known when JAX traces, so the choice costs nothing at run time.
    """

    largest_dense: int = eqx.field(static=True, default=512 * 512)

    def choose(self, queries: int, tokens: int) -> tuple[AbstractTilt, str]:
        """The way of summing for these sizes, and the reason in a few words."""
        pairs = queries * tokens
        if pairs <= self.largest_dense:
            return Dense(), f"{pairs} logits, at most {self.largest_dense}, are held at once"
        return Streamed(), f"{pairs} logits, more than {self.largest_dense}, are summed in tiles"

    def sum(self, u, points, log_weights):
        return self.choose(len(u), len(points))[0].sum(u, points, log_weights)

    def _exposed(self, u, points, weights, tolerance):
        return self.choose(len(u), len(points))[0]._exposed(u, points, weights, tolerance)
