"""Upper bounds of the energy that hold for every measure with given labels.

For h = K(ξ, ζ) g(⟨U_ξx, U_ζy⟩) with g(s) = Σ cₚsᵖ, cₚ ≥ 0, tokens enter through unit vectors (the
p-th tensor powers of U_ξx), so with K_w = (√wᵢ K(ξᵢ, ξⱼ) √wⱼ)

    E ≤ ½ c₀ Σᵢⱼ wᵢwⱼK(ξᵢ, ξⱼ) + ½ (g(1) − c₀) λ_max(K_w)₊,

and, pair by pair, E ≤ ½ Σᵢⱼ wᵢwⱼ max over s of K(ξᵢ, ξⱼ) g(s). The lesser of the two is e^β/(2β)
for a gauged exponential kernel and (e^β/2β) Σᵢⱼ wᵢwⱼb(ξᵢ, ξⱼ) for one with a bias b ≥ 0, both
attained; and for ⟨x, y⟩ k(ξ − ζ) on a circle half the largest Fourier coefficient of k.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import eigsh

from ..measure import Measure
from .algebra import AbstractContentKernel, AbstractKernel, Gauged
from .content import Exponential, Linear, Polynomial
from .expansion import Monomial, expand

LARGEST = 8192  # so many labels at most, since their n × n matrix is held


def energy_bound(kernel: AbstractKernel, mu: Measure) -> float | None:
    """The least upper bound of E that is known for the labels and weights of μ, or None.

    It is known for sums of label kernels times products of exponential, linear and polynomial
    kernels (the last with a constant ≥ 0), gauged or not.
    """
    bounds = [_bound(monomial, mu) for monomial in expand(kernel)]
    return None if any(bound is None for bound in bounds) else float(sum(bounds))


def _bound(monomial: Monomial, mu: Measure) -> float | None:
    ends = [_ends(g) for g in monomial.content]
    if any(end is None for end in ends):
        return None
    # g(1), g(0) = c₀ and the least and largest of g on [−1, 1], of the product.
    top, constant = (math.prod(end[k] for end in ends) for k in (0, 1))
    least = -top if any(end[2] < 0 for end in ends) else math.prod(end[2] for end in ends)
    scale = float(monomial.scale)
    if not monomial.labels:
        return scale * (top if scale > 0 else max(constant, least)) / 2
    if mu.size > LARGEST:
        return None
    w = np.asarray(mu.weights, np.float64)
    k = scale * _matrix(monomial, mu)
    root = np.sqrt(w)
    weighted = root[:, None] * k * root
    largest = _largest_eigenvalue(weighted) if top > constant else 0.0
    by_spectrum = constant * (w @ k @ w) + (top - constant) * max(largest, 0.0)
    by_pairs = w @ np.maximum(k * top, k * least) @ w
    return float(min(by_spectrum, by_pairs)) / 2


def _ends(g: AbstractKernel) -> tuple[float, float, float] | None:
    """(g(1), g(0), a lower bound of g on [−1, 1]) if g is a power series with cₚ ≥ 0, else None."""
    while isinstance(g, Gauged):  # unit vectors stay unit vectors
        g = g.kernel
    if not isinstance(g, (Exponential, Linear)) and not (
        isinstance(g, Polynomial) and float(g.constant) >= 0
    ):
        return None
    assert isinstance(g, AbstractContentKernel)
    top, constant, low = (float(g.profile(jnp.asarray(s, float))) for s in (1.0, 0.0, -1.0))
    even = isinstance(g, Polynomial) and g.degree % 2 == 0
    return top, constant, (0.0 if even and float(g.constant) <= 1 else low)


def _matrix(monomial: Monomial, mu: Measure) -> np.ndarray:
    def pair(xi, zeta):
        return math.prod([k.factor(xi, zeta) for k in monomial.labels], start=jnp.ones(()))

    rows = jax.jit(jax.vmap(jax.vmap(pair, (None, 0)), (0, None)))
    return np.asarray(rows(mu.labels, mu.labels), np.float64)


def _largest_eigenvalue(matrix: np.ndarray) -> float:
    if len(matrix) <= 512:
        return float(np.linalg.eigvalsh(matrix)[-1])
    start = np.random.default_rng(0).normal(size=len(matrix))
    return float(eigsh(matrix, 1, which="LA", v0=start, return_eigenvectors=False)[0])
