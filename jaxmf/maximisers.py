"""The search for maximisers of the energy E[μ] = ½∬ h dμ dμ at given labels (arXiv:2605.30229).

The energy has many local maxima, so a search is many starts: all of them, in one compiled program,
climb by Adam with a step that is large at first, which skips the shallow maxima, and are then
polished by a trust-region Newton method. Gradients and Hessians are those of the metric
Σ wᵢ⟨uᵢ, vᵢ⟩ on the product of spheres,

    ∇ᵢ = P_{xᵢ}∇ₓΦ(xᵢ, ξᵢ),      Hess[V]ᵢ = P_{xᵢ} D∇ᵢ[V],

so that neither depends on whether a token is split into two of half the weight which move alike.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.sparse.linalg import LinearOperator, eigsh

from . import sphere
from ._typing import ArrayLike
from .errors import InputError
from .interaction import AbstractInteraction, Automatic
from .kernels import AbstractKernel
from .kernels.bound import energy_bound
from .kernels.check import check
from .measure import Measure
from .observables import conditional_variance

LARGEST_SPECTRUM = 1024  # the Hessian's spectrum is taken whole up to so many tangent directions
PAIRS_AT_ONCE = 2**17  # starts climb together as far as they have no more pairs than this


class Maximum(eqx.Module):
    """One critical point that a search found, up to the symmetries of the kernel.

    - `measure`: its tokens x*(ξ), weights and labels.
    - `energy`; `reached`, how many starts ended there.
    - `gradient_norm`: √(Σ wᵢ|∇ᵢ|²).
    - `curvature`: the largest eigenvalue of the Riemannian Hessian; 0 along symmetries.
    - `flat`: the number of directions along which it is 0 up to rounding (None where the spectrum
      is too large to be taken whole).
    - `kind`: "maximum" if the curvature is at most rounding, "saddle" if it is positive,
      "unfinished" if the gradient is not small.
    - `conditional_variance`: Σ ρ(ξ)(1 − |mean of the tokens of label ξ|²); 0 for one a label.
    """

    measure: Measure
    energy: float
    reached: int
    gradient_norm: float
    curvature: float
    flat: int | None
    kind: str = eqx.field(static=True)
    conditional_variance: float

    @property
    def points(self) -> Float[Array, "n d"]:
        return self.measure.points


class Maxima(eqx.Module):
    """What a search found: distinct critical points, the highest first.

    - `found`: every distinct one, maxima, saddles and unfinished.
    - `energies`: where each start ended.
    - `bound`: an upper bound of the energy over all measures with these labels, or None.
    """

    found: tuple[Maximum, ...]
    energies: Float[np.ndarray, " starts"]
    bound: float | None

    @property
    def maxima(self) -> tuple[Maximum, ...]:
        """Those of kind "maximum"."""
        return tuple(m for m in self.found if m.kind == "maximum")

    @property
    def best(self) -> Maximum:
        """The highest maximum; if there is none, the highest point found."""
        return (self.maxima or self.found)[0]

    @property
    def energy(self) -> float:
        return self.best.energy

    @property
    def measure(self) -> Measure:
        return self.best.measure

    @property
    def points(self) -> Float[Array, "n d"]:
        return self.best.points

    @property
    def gap(self) -> float | None:
        """(bound − energy)/|bound|, or None without a bound."""
        if self.bound is None:
            return None
        return (self.bound - self.energy) / max(abs(self.bound), np.finfo(float).tiny)


def maximise(
    kernel: AbstractKernel,
    labels: ArrayLike,
    dimension: int,
    *,
    key: PRNGKeyArray,
    starts: int = 128,
    steps: int = 500,
    weights: ArrayLike | None = None,
    per_label: int = 1,
    initial: ArrayLike | None = None,
    interaction: AbstractInteraction = Automatic(),
) -> Maxima:
    """Search the maxima of E over tokens on S^{d−1} with these labels, from many random starts.

    **Arguments:**

    - `labels`: ξ, an array with leading axis n; their law is Σ wᵢ δ_ξᵢ. (For a kernel without
      labels any n numbers.)
    - `dimension`: d. `weights`: wᵢ > 0, uniform by default.
    - `starts`: how many uniformly random starts; `initial`, (starts, tokens, d), replaces them.
    - `steps`: of Adam, before the polish. Fewer will do for kernels that collapse or are gauged.
    - `per_label`: tokens of each label, to see whether conditional laws are Dirac.

    **Returns:** the distinct critical points, each with its energy, how many starts reached it and
    its gradient and curvature; and the bound, where one is known. Two are taken for one if their
    energies, their potentials Φ(xᵢ, ξᵢ) in order of size, and their Hessians' spectra agree: what
    every symmetry of the energy preserves, rotations, permutations and shifts of labels alike.

    **Raises:** `InputError` for labels that do not fit the kernel, a kernel that is not symmetric
    and the like (see `energy`), weights that are not positive, or counts below one.
    """
    mu = _tokens(labels, dimension, weights, per_label)
    for name, value in (("starts", starts), ("steps", steps)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if initial is None:
        shape = (starts, mu.size, dimension)
        first = sphere.normalise(jax.random.normal(key, shape, mu.points.dtype))
    else:
        first = jnp.asarray(initial, mu.points.dtype)
        if first.ndim != 3 or first.shape[1:] != (mu.size, dimension):
            raise InputError(
                f"initial has shape {first.shape}; it must be (starts, {mu.size}, {dimension})"
            )
        first = Measure(first).points
    check(kernel, mu.move(first[0]))
    points = _search(kernel, mu, first, steps, interaction)
    return report(kernel, mu, points, interaction)


def report(
    kernel: AbstractKernel,
    mu: Measure,
    points: Float[Array, "starts n d"],
    interaction: AbstractInteraction = Automatic(),
) -> Maxima:
    """The distinct critical points among `points`, with what there is to say of each."""
    ends = jax.tree.map(np.asarray, _ends(kernel, mu, points, interaction))
    each = [jax.tree.map(lambda a, i=i: a[i], ends) for i in range(len(points))]
    groups: list[list[int]] = []
    for i in np.argsort(-ends.energy):
        same = next((group for group in groups if _same(each[group[0]], each[i])), None)
        if same is None:
            groups.append([i])
        else:
            same.append(i)
    found = []
    for group in groups:
        best = min(group, key=lambda i: each[i].gradient_norm)
        found.append(_maximum(kernel, mu.move(points[best]), each[best], len(group), interaction))
    return Maxima(tuple(found), ends.energy, energy_bound(kernel, mu))


def _tokens(labels, dimension, weights, per_label) -> Measure:
    """The tokens of a search, `per_label` of each label side by side, at no place yet."""
    if labels is None:
        raise InputError("labels is None; give n labels (any n numbers for a kernel without)")
    labels = jnp.asarray(labels)
    if labels.ndim == 0 or not len(labels):
        raise InputError(f"labels have shape {labels.shape}; their first axis must be the n labels")
    if dimension < 2:
        raise InputError(f"dimension is {dimension}; tokens need d ≥ 2")
    if per_label < 1:
        raise InputError(f"per_label is {per_label}; it must be at least 1")
    nowhere = jnp.zeros((len(labels), dimension)).at[:, 0].set(1)
    mu = Measure(nowhere, weights, labels)
    if np.any(np.asarray(mu.weights) <= 0):
        index = int(np.flatnonzero(np.asarray(mu.weights) <= 0)[0])
        raise InputError(f"weights[{index}] is 0; leave that label out, or give it a weight")
    return Measure(
        *(jnp.repeat(a, per_label, axis=0) for a in (nowhere, mu.weights / per_label, labels))
    )


class _Energy(NamedTuple):
    """E, its gradient and Hessian, at points (n, d) with the weights and labels of a measure."""

    kernel: AbstractKernel
    mu: Measure
    interaction: AbstractInteraction

    def potential(self, x):
        return self.interaction(self.kernel, x, self.mu.move(x), self.mu.labels)

    def value(self, x):
        return jnp.dot(self.mu.weights, self.potential(x).value, precision="highest") / 2

    def gradient(self, x):
        return sphere.tangent(x, self.potential(x).gradient)

    def scale(self, x):
        """√(Σ wᵢ|∇ₓΦᵢ|²) before projection: what rounding in the gradient is relative to."""
        g = self.potential(x).gradient
        return jnp.sqrt(self.inner(g, g))

    def hessian(self, x, v):
        return sphere.tangent(x, jax.jvp(self.gradient, (x,), (v,))[1])

    def inner(self, u, v):
        return jnp.dot(self.mu.weights, jnp.sum(u * v, axis=-1), precision="highest")


def tolerance(scale: ArrayLike, dtype) -> Float[Array, ""]:
    """The gradient norm that a polish goes below: 10⁻¹² in float64 (5·10⁻⁴ in float32), times the
    scale of the gradient where that is large.
    """
    return 4500 * jnp.finfo(dtype).eps * jnp.maximum(scale, 1)


@eqx.filter_jit
def _search(kernel, mu, first, steps: int, interaction):
    energy = _Energy(kernel, mu, interaction)

    together = max(1, PAIRS_AT_ONCE // mu.size**2)
    climbed = lax.map(lambda x: _climb(energy, x, steps), first, batch_size=together)
    # Side by side, all would take as many steps as the slowest.
    return lax.map(lambda x: _polish(energy, x), climbed)


def _climb(energy: _Energy, x, steps: int):
    """Adam along the Riemannian gradient, its step falling from 1 to 0 like a cosine."""
    # Adam's steps do not depend on the size of the gradient, but for what guards against 0/0.
    optimiser = optax.adam(optax.cosine_decay_schedule(1.0, steps), eps=1e-10)
    scale = energy.scale(x)
    scale = jnp.where(scale > 0, scale, 1)

    def step(carry, _):
        x, state = carry
        updates, state = optimiser.update(-energy.gradient(x) / scale, state)
        return (sphere.normalise(optax.apply_updates(x, updates)), state), None

    return lax.scan(step, (x, optimiser.init(x)), length=steps)[0][0]


class _State(NamedTuple):
    x: Array
    energy: Array
    gradient: Array
    radius: Array
    iteration: Array


def _polish(energy: _Energy, x, iterations: int = 1000):
    """Newton's method in a trust region (Steihaug's conjugate gradients), to rounding."""
    scale = energy.scale(x)
    small = tolerance(scale, x.dtype) / 10  # a little below what is asked for
    scale = jnp.where(scale > 0, scale, 1)
    noise = 32 * jnp.finfo(x.dtype).eps

    def unfinished(state):
        norm = jnp.sqrt(energy.inner(state.gradient, state.gradient))
        return (norm > small) & (state.iteration < iterations) & (state.radius > noise)

    def step(state):
        x, g = state.x, state.gradient
        p, gain = _steihaug(energy, x, g, state.radius, scale)
        new = sphere.normalise(sphere.exp(x, p))
        value, gradient = energy.value(new), energy.gradient(new)
        # Where the gain drowns in rounding, a smaller gradient is the better sign.
        lost = gain <= noise * jnp.maximum(jnp.abs(value), jnp.abs(state.energy))
        ratio = (value - state.energy) / jnp.where(gain > 0, gain, 1)
        shrinks = energy.inner(gradient, gradient) < energy.inner(g, g)
        good = jnp.where(lost, shrinks, ratio > 0.1)
        length = jnp.sqrt(energy.inner(p, p))
        radius = jnp.where(
            good,
            jnp.where(lost | (ratio > 0.75), jnp.maximum(state.radius, 2 * length), state.radius),
            length / 4,
        )
        radius = jnp.minimum(radius, 1.0)
        return _State(
            jnp.where(good, new, x),
            jnp.where(good, value, state.energy),
            jnp.where(good, gradient, g),
            radius,
            state.iteration + 1,
        )

    start = _State(x, energy.value(x), energy.gradient(x), jnp.asarray(0.1, x.dtype), 0)
    end = lax.while_loop(unfinished, step, start)
    return end.x


def _steihaug(energy: _Energy, x, g, radius, scale):
    """The step p that maximises ⟨g, p⟩ + ½⟨Hp, p⟩ within the radius, and what it gains."""
    size = jnp.sqrt(energy.inner(g, g))
    # Superlinear: the smaller the gradient, the better the step.
    enough = size * jnp.minimum(0.1, jnp.sqrt(size / scale))
    limit = min(g.size, 200)

    def unfinished(carry):
        _, r, _, _, count, done = carry
        return ~done & (jnp.sqrt(energy.inner(r, r)) > enough) & (count < limit)

    def step(carry):
        p, r, direction, image, count, _ = carry
        h = -energy.hessian(x, direction)
        curvature = energy.inner(direction, h)
        square = energy.inner(r, r)
        alpha = square / jnp.where(curvature > 0, curvature, 1)
        pd, dd, pp = (
            energy.inner(a, b) for a, b in ((p, direction), (direction, direction), (p, p))
        )
        outside = (curvature <= 0) | (pp + 2 * alpha * pd + alpha**2 * dd >= radius**2)
        reach = (-pd + jnp.sqrt(pd**2 + dd * jnp.maximum(radius**2 - pp, 0))) / dd
        alpha = jnp.where(outside, reach, alpha)
        left = r - alpha * h
        beta = energy.inner(left, left) / square
        return (
            p + alpha * direction,
            left,
            sphere.tangent(x, left + beta * direction),
            image + alpha * h,
            count + 1,
            outside,
        )

    zero = jnp.zeros_like(g)
    p, _, _, image, _, _ = lax.while_loop(unfinished, step, (zero, g, g, zero, 0, size == 0))
    return p, energy.inner(g, p) - energy.inner(image, p) / 2


class _End(NamedTuple):
    """Where a start ended, with what no symmetry changes."""

    energy: Float[Array, "*starts"]
    gradient_norm: Float[Array, "*starts"]
    scale: Float[Array, "*starts"]
    potentials: Float[Array, "*starts n"]  # ascending
    spectrum: Float[Array, "*starts k"]  # of the Hessian, ascending; the largest alone if large


@eqx.filter_jit
def _ends(kernel, mu, points, interaction) -> _End:
    """What there is to say of each of the `points`."""
    energy = _Energy(kernel, mu, interaction)

    def one(x):
        g, potential = energy.gradient(x), energy.potential(x).value
        spectrum = jnp.linalg.eigvalsh(_hessian(energy, x)) if _whole(mu) else jnp.zeros(1)
        return _End(
            energy.value(x),
            jnp.sqrt(energy.inner(g, g)),
            energy.scale(x),
            jnp.sort(potential),
            spectrum,
        )

    return lax.map(one, points)


def _whole(mu: Measure) -> bool:
    return mu.size * (mu.dimension - 1) <= LARGEST_SPECTRUM


def _hessian(energy: _Energy, x):
    """The Hessian in coordinates in which it is symmetric: an orthonormal frame, scaled by √w."""
    frame, root = jax.vmap(_frame)(x), jnp.sqrt(energy.mu.weights)[:, None]

    def column(a):
        v = jnp.einsum("ndk,nk->nd", frame, a.reshape(len(x), -1), precision="highest") / root
        image = root * energy.hessian(x, v)
        return jnp.einsum("ndk,nd->nk", frame, image, precision="highest").reshape(-1)

    matrix = lax.map(column, jnp.eye(x.size - len(x), dtype=x.dtype), batch_size=8)
    return (matrix + matrix.T) / 2


def _frame(x):
    """An orthonormal basis of the tangent space at x, (d, d − 1)."""
    # The reflection that swaps x and ±e₁ takes the other axes to the tangent space of x.
    eye = jnp.eye(len(x), dtype=x.dtype)
    v = sphere.normalise(x + jnp.where(x[0] > 0, 1.0, -1.0) * eye[0])
    return (eye - 2 * jnp.outer(v, v))[:, 1:]


@eqx.filter_jit
def _hessian_product(kernel, mu, interaction, v):
    root = jnp.sqrt(mu.weights)[:, None]
    v = sphere.tangent(mu.points, v.reshape(mu.points.shape)) / root
    return (root * _Energy(kernel, mu, interaction).hessian(mu.points, v)).reshape(-1)


def _largest_eigenvalue(kernel, mu, interaction) -> float:
    """That of the Hessian, by Lanczos iterations (SciPy)."""

    def product(v):
        return np.asarray(_hessian_product(kernel, mu, interaction, jnp.asarray(v.ravel())))

    n, dtype = mu.points.size, np.asarray(mu.points).dtype
    operator = LinearOperator((n, n), matvec=product, dtype=dtype)
    start = np.random.default_rng(0).normal(size=n).astype(dtype)
    return float(eigsh(operator, 1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)[0])


def _same(one: _End, other: _End) -> bool:
    size = max(one.scale, 1e-300)
    reaches = (1e-8, 1e-5, 1e-4) if one.spectrum.dtype == np.float64 else (1e-5, 1e-3, 1e-2)
    pairs = zip(one[:1] + one[3:], other[:1] + other[3:], reaches, strict=True)
    return all(np.allclose(a, b, rtol=0, atol=reach * size) for a, b, reach in pairs)


def _maximum(kernel, mu: Measure, end: _End, reached: int, interaction) -> Maximum:
    dtype = mu.points.dtype
    flat = (1e-8 if dtype == jnp.float64 else 1e-3) * max(float(end.scale), 1e-300)
    whole = _whole(mu)
    curvature = float(end.spectrum[-1]) if whole else _largest_eigenvalue(kernel, mu, interaction)
    kind = "saddle" if curvature > flat else "maximum"
    if end.gradient_norm > tolerance(end.scale, dtype):
        kind = "unfinished"
    return Maximum(
        measure=mu,
        energy=float(end.energy),
        reached=reached,
        gradient_norm=float(end.gradient_norm),
        curvature=curvature,
        flat=int(np.sum(np.abs(end.spectrum) <= flat)) if whole else None,
        kind=kind,
        conditional_variance=float(conditional_variance(mu)),
    )
