"""A kernel written out as a sum of monomials, to show the structure that fast sums and bounds use.

    h = Σ scale · k₁(ξ, ζ)⋯ · g₁((U_ξx, ξ), (U_ζy, ζ))⋯,

label kernels, all other kernels, and one gauge.
"""

from functools import reduce
from operator import mul
from typing import Any, NamedTuple

from .algebra import (
    AbstractGauge,
    AbstractKernel,
    AbstractLabelKernel,
    Composed,
    Gauged,
    Product,
    Scaled,
    Sum,
)
from .labels import Constant


class Monomial(NamedTuple):
    """scale · Π labels · Π content, the content seen through a gauge."""

    scale: Any
    labels: tuple[AbstractLabelKernel, ...] = ()
    content: tuple[AbstractKernel, ...] = ()
    gauge: AbstractGauge | None = None

    def kernel(self) -> AbstractKernel:
        """The monomial as a kernel, without its gauge."""
        factors = (*self.labels, *self.content)
        return Scaled(reduce(mul, factors) if factors else Constant(1.0), self.scale)


def expand(kernel: AbstractKernel) -> list[Monomial]:
    """The kernel as a sum of monomials."""
    match kernel:
        case Sum(first=first, second=second):
            return expand(first) + expand(second)
        case Scaled(kernel=inner, scale=scale):
            return [m._replace(scale=scale * m.scale) for m in expand(inner)]
        case Gauged(kernel=inner, by=gauge):
            return [
                m._replace(gauge=gauge if m.gauge is None else Composed(m.gauge, gauge))
                for m in expand(inner)
            ]
        case Product(first=first, second=second):
            return [_times(a, b) for a in expand(first) for b in expand(second)]
        case AbstractLabelKernel():
            return [Monomial(1.0, labels=(kernel,))]
        case _:
            return [Monomial(1.0, content=(kernel,))]


def _times(a: Monomial, b: Monomial) -> Monomial:
    both = Monomial(a.scale * b.scale, a.labels + b.labels)
    if not a.content or not b.content or a.gauge is b.gauge:
        gauge = a.gauge if a.content else b.gauge
        return both._replace(content=a.content + b.content, gauge=gauge)
    # Two gauges in one product: no turn of the tokens serves both.
    seen = [g if m.gauge is None else Gauged(g, m.gauge) for m in (a, b) for g in m.content]
    return both._replace(content=tuple(seen))
