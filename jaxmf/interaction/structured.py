"""Kernels with structure: what the algebra shows of it, and the few exponential tilts it leaves.

Φ is linear in the kernel, so a kernel is summed by its monomials (`kernels.expansion`). A gauge
moves into the tokens: with q = U_ξx the gradient is U_ξᵀ∇_qΦ (conjugation). Of what is then left,

- exponentials are one tilt at u = βq, and with label kernels of R separable features Σ sᵣfᵣ(ξ)fᵣ(ζ)
  they are one tilt for each, by the weights w(1 + fᵣ) ≥ 0, less the tilt by w;
- ⟨x, y⟩ and constants need only moments of the tokens: O(n);
- frozen tokens are a potential of their own;
- everything else is summed over pairs, together.
"""

from functools import reduce
from operator import add, mul

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..kernels import AbstractGauge, Constant, Exponential, FourierToeplitz, Frozen, Linear
from ..kernels.expansion import Monomial, expand
from ..tilt import AbstractTilt
from ..tilt.base import log_weight
from .base import AbstractInteraction, States


def tilts(monomial: Monomial) -> int:
    """The number of tilts that a monomial summed by tilts takes."""
    modes = [(0,) if isinstance(k, Constant) else k.modes for k in monomial.labels]
    if all(m == (0,) for m in modes):
        return 1
    return 1 + reduce(mul, (sum(2 if m else 1 for m in each) for each in modes))


class Structured(AbstractInteraction):
    """By conjugation, tilts and moments where the kernel allows, by pairs where not.

    **Arguments:** `most_tilts`: what would take more of them is summed over pairs.
    """

    tilt: AbstractTilt
    pairs: AbstractInteraction
    most_tilts: int = eqx.field(static=True, default=32)

    def way(self, monomial: Monomial) -> str:
        """How a monomial is summed: by "tilts", "moments", as "frozen" tokens, or by "pairs"."""
        kinds = [type(g) for g in monomial.content]
        if kinds == [Frozen] and not monomial.labels:
            return "frozen"
        if all(isinstance(k, (Constant, FourierToeplitz)) for k in monomial.labels):
            if kinds in ([], [Linear]):
                return "moments"
            exponential = all(kind is Exponential for kind in kinds)
            if exponential and tilts(monomial) <= self.most_tilts:
                return "tilts"
        return "pairs"

    def sum(self, kernel, queries, tokens, weights):
        groups: dict[int, tuple[AbstractGauge | None, list[Monomial]]] = {}
        for monomial in expand(kernel):
            gauge = monomial.gauge
            groups.setdefault(id(gauge), (gauge, []))[1].append(monomial)
        parts = []
        for gauge, monomials in groups.values():
            turned = queries, tokens
            if gauge is not None:
                turned = tuple(
                    s._replace(points=jax.vmap(gauge.apply)(s.labels, s.points)) for s in turned
                )
            value, gradient = self._sum(monomials, *turned, weights)
            if gauge is not None:
                gradient = jax.vmap(gauge.undo)(queries.labels, gradient)
            parts.append((value, gradient))
        return jax.tree.map(lambda *each: reduce(add, each), *parts)

    def _sum(self, monomials, queries, tokens, weights):
        """Monomials of one gauge, which the tokens have been turned by."""
        parts, rest = [], []
        for monomial in monomials:
            if self.way(monomial) == "pairs":
                rest.append(monomial.kernel())
            else:
                sums = {"tilts": self._tilts, "moments": _moments, "frozen": self._frozen}
                parts.append(sums[self.way(monomial)](monomial, queries, tokens, weights))
        if rest:
            parts.append(self.pairs.sum(reduce(add, rest), queries, tokens, weights))
        return jax.tree.map(lambda *each: reduce(add, each), *parts)

    def _tilts(self, monomial, queries, tokens, weights):
        beta = reduce(add, [g.beta for g in monomial.content])
        shift = reduce(add, [g.beta * g.offset for g in monomial.content])
        scale = monomial.scale / reduce(mul, [g.beta for g in monomial.content])
        signs, here, there = _features(monomial, queries, tokens)
        u = (beta * queries.points).astype(queries.points.dtype)

        def summed(weights):
            log_mass, mean = self.tilt.sum(u, tokens.points, log_weight(weights))
            mass = jnp.exp(log_mass - shift)
            return mass, mass[:, None] * mean

        if tilts(monomial) == 1:
            mass, moment = summed(weights)
            scale = scale * jnp.sum(signs)
        else:
            base = summed(weights)
            lifted = lax.map(summed, weights * (1 + there))
            factors = signs[:, None] * here
            mass, moment = (
                jnp.einsum("rq,rq...->q...", factors, each - one, precision="highest")
                for each, one in zip(lifted, base, strict=True)
            )
        return scale * mass, scale * beta * moment

    def _frozen(self, monomial, queries, tokens, weights):
        (frozen,) = monomial.content
        nu = frozen.tokens
        by = States(nu.points, nu.labels)
        value, gradient = self.sum(frozen.kernel, queries, by, nu.weights)
        theirs, _ = self.sum(frozen.kernel, tokens, by, nu.weights)
        scale, total = monomial.scale, jnp.sum(weights)
        return scale * (value * total + jnp.dot(weights, theirs)), scale * total * gradient


def _features(
    monomial: Monomial, queries: States, tokens: States
) -> tuple[Float[Array, " r"], Float[Array, "r q"], Float[Array, "r n"]]:
    """Signs s and functions f with Π k(ξ, ζ) = Σᵣ sᵣ fᵣ(ξ) fᵣ(ζ), at the queries and tokens."""
    found = []
    for states in (queries, tokens):
        n, dtype = len(states.points), states.points.dtype
        signs, f = jnp.ones(1, dtype), jnp.ones((1, n), dtype)
        for k in monomial.labels:
            if isinstance(k, Constant):
                signs = signs * k.value
            else:
                new_signs, new = k.features(states.labels)
                signs = (signs[:, None] * new_signs).reshape(-1)
                f = (f[:, None] * new).reshape(-1, n)
        found.append((signs.astype(dtype), f.astype(dtype)))
    return (*found[0], found[1][1])


def _moments(monomial, queries, tokens, weights):
    signs, here, there = _features(monomial, queries, tokens)
    factors = (monomial.scale * signs)[:, None] * here
    if not monomial.content:
        value = jnp.einsum("rq,r->q", factors, there @ weights, precision="highest")
        return value, jnp.zeros_like(queries.points)
    moment = jnp.matmul(weights * there, tokens.points, precision="highest")
    gradient = jnp.einsum("rq,rd->qd", factors, moment, precision="highest")
    return jnp.sum(gradient * queries.points, axis=-1), gradient
