"""Which way of summing suits which kernel and size."""

import equinox as eqx

from ..kernels import AbstractKernel
from ..kernels.expansion import expand
from ..tilt import AbstractTilt
from ..tilt import Automatic as AutomaticTilt
from .base import AbstractInteraction
from .dense import Dense
from .streamed import Streamed
from .structured import Structured, tilts


class Automatic(AbstractInteraction):
    """The fastest way for the kernel and the shapes at hand; `choose` says which, and why.

    **Arguments:** `tilt`, how exponential tilts are summed; `largest_dense`, how many pairs are
    held at once.
    """

    tilt: AbstractTilt = AutomaticTilt()
    largest_dense: int = eqx.field(static=True, default=512 * 512)

    def choose(
        self, kernel: AbstractKernel, queries: int, tokens: int
    ) -> tuple[AbstractInteraction, str]:
        """The way of summing for this kernel and these sizes, and the reason in a few words."""
        small = queries * tokens <= self.largest_dense
        # Of a few pairs, one sum is faster than several tilts.
        way = Structured(self.tilt, Dense(), 1) if small else Structured(self.tilt, Streamed())
        monomials = expand(kernel)
        ways = [way.way(m) for m in monomials]
        count = sum(tilts(m) for m in monomials if way.way(m) == "tilts")
        parts = []
        if count:
            parts.append(f"{count} exponential tilt{'s' if count > 1 else ''}")
        if any(m.gauge is not None for m in monomials):
            parts.append("in conjugated tokens")
        if "moments" in ways:
            parts.append("moments of the tokens")
        if "frozen" in ways:
            parts.append("the potential of frozen tokens")
        if "pairs" in ways:
            held = "held at once" if small else "in tiles"
            parts.append(f"{queries * tokens} pairs, {held}")
        return way, ", ".join(parts)

    def sum(self, kernel, queries, tokens, weights):
        way, _ = self.choose(kernel, len(queries.points), len(tokens.points))
        return way.sum(kernel, queries, tokens, weights)
