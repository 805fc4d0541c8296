"""Laws of the initial tokens: where ρ₀ comes from, as samples or as quadrature nodes.

Samples carry an error of order n^{−1/2}. Nodes spread evenly over the sphere and weighted by the
density approximate the same mean field with far fewer tokens, and leave none of the sphere empty,
which is what the low-temperature limit needs.
"""

import abc
import math
import os
import zipfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from scipy import special

from . import sphere
from ._typing import ArrayLike
from .errors import InputError
from .measure import Measure


class AbstractLaw(eqx.Module):
    """A probability law ρ₀ on S^{d−1}."""

    dimension: eqx.AbstractVar[int]

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, count: int) -> Measure:
        """`count` independent tokens of equal weight."""

    @abc.abstractmethod
    def quadrature(self, count: int, axis: ArrayLike | None = None) -> Measure:
        """`count` weighted nodes with ∫ f dμ → ∫ f dρ₀: on S¹ and S², where such nodes are known.

        On S¹ the nodes may be graded towards an `axis` e (see `graded_nodes`), so that a flow that
        draws tokens to ±e leaves no gaps between them.

        **Raises:** `InputError` for d > 3, an axis with d > 2, or if the nodes do not resolve the
        density.
        """

    @abc.abstractmethod
    def log_density(self, x: Float[Array, "*n d"]) -> Float[Array, "*n"]:
        """log of the density with respect to surface area.

        **Raises:** `InputError` for a law without a density.
        """

    @abc.abstractmethod
    def density_bounds(self) -> tuple[float, float] | None:
        """A lower bound of the density and an upper bound of its Lipschitz constant, or None.

        The density here is relative to the uniform law, whose own is 1. A law with a density has a
        positive and Lipschitz one, though its bounds may be past the smallest or largest float.
        """

    @abc.abstractmethod
    def inverse_moment_limit(self, basis: Float[Array, "d k"]) -> float:
        """The supremum of the p for which E|P_E x|^{−p} is finite, E spanned by `basis`."""


class Uniform(AbstractLaw):
    """The uniform law on S^{d−1}."""

    dimension: int = eqx.field(static=True)

    def __check_init__(self):
        _check_dimension(self.dimension)

    def sample(self, key, count):
        return Measure(_uniform_points(key, count, self.dimension))

    def quadrature(self, count, axis=None):
        return _weighted_nodes(self, count, axis)

    def log_density(self, x):
        return jnp.full(x.shape[:-1], -_log_area(self.dimension))

    def density_bounds(self):
        return 1.0, 0.0

    def inverse_moment_limit(self, basis):
        return float(basis.shape[1])


class VonMisesFisher(AbstractLaw):
    """Density ∝ e^{κ⟨m,x⟩} on S^{d−1}: mean direction m (normalised here), concentration κ ≥ 0."""

    mean: Float[Array, " d"]
    kappa: float = eqx.field(static=True)
    dimension: int = eqx.field(static=True)

    def __init__(self, mean: ArrayLike, kappa: float):
        mean = np.asarray(mean, np.float64)
        if mean.ndim != 1:
            raise InputError(f"mean has shape {mean.shape}; it must be a vector")
        _check_dimension(len(mean))
        length = np.linalg.norm(mean)
        if not (np.isfinite(length) and length > 0):
            raise InputError(f"mean is {mean.tolist()}; it must be finite and not zero")
        if not (math.isfinite(kappa) and kappa >= 0):
            raise InputError(f"kappa is {kappa}; it must be finite and ≥ 0")
        self.mean = jnp.asarray(mean / length, dtype=float)
        self.kappa = float(kappa)
        self.dimension = len(mean)

    def sample(self, key, count):
        """By rejection on ⟨m, x⟩ (Wood, 1994): exact for every κ and d."""
        d, kappa = self.dimension, self.kappa
        b = (d - 1) / (2 * kappa + math.hypot(2 * kappa, d - 1))
        # Wood's acceptance ratio in terms of the drop 1 − ⟨m, x⟩ ~ 1/κ, divided by its value at the
        # proposal's mode: nothing of size κ cancels, so that float32 does for every κ.
        mode = 2 * b / (1 + b)

        def propose(state):
            key, drop, accepted = state
            key, beta_key, uniform_key = jax.random.split(key, 3)
            z = jax.random.beta(beta_key, (d - 1) / 2, (d - 1) / 2, (count,))
            new = 2 * b * z / (1 - (1 - b) * z)  # 1 − ⟨m, x⟩
            envelope = (1 + b) / 2 + (1 - b) * (1 + b) / (4 * b) * new
            log_ratio = kappa * (mode - new) + (d - 1) * jnp.log(envelope)
            accept = jnp.log(jax.random.uniform(uniform_key, (count,))) <= log_ratio
            return key, jnp.where(accepted, drop, new), accepted | accept

        def unfinished(state):
            return ~jnp.all(state[2])

        key, tangent_key = jax.random.split(key)
        start = (key, jnp.zeros(count), jnp.zeros(count, bool))
        drop = lax.while_loop(unfinished, propose, start)[1][:, None]
        noise = jax.random.normal(tangent_key, (count, d))
        direction = sphere.normalise(sphere.tangent(self.mean, noise))
        x = (1 - drop) * self.mean + jnp.sqrt(drop * (2 - drop)) * direction
        return Measure(sphere.normalise(x))

    def quadrature(self, count, axis=None):
        return _weighted_nodes(self, count, axis)

    def log_density(self, x):
        # −κ|x − m|²/2 is κ(⟨m, x⟩ − 1) without the cancellation.
        spread = -self.kappa * jnp.sum((x - self.mean) ** 2, axis=-1) / 2
        return spread + (self.kappa - self._log_normaliser())

    def density_bounds(self):
        kappa = self.kappa
        top = kappa - self._log_normaliser() + _log_area(self.dimension)
        # The slope κ e^{κ cos θ} sin θ is steepest where cos θ = κ sin² θ.
        cosine = 2 * kappa / (1 + math.sqrt(1 + 4 * kappa**2))
        slope = kappa * _exp(top + kappa * (cosine - 1)) * math.sqrt(1 - cosine**2)
        return _exp(top - 2 * kappa), slope

    def inverse_moment_limit(self, basis):
        return float(basis.shape[1])

    def _log_normaliser(self) -> float:
        """log ∫ e^{κ⟨m,x⟩} dx = log((2π)^{d/2} I_{d/2−1}(κ) κ^{1−d/2})."""
        v = self.dimension / 2 - 1
        if self.kappa == 0:
            return _log_area(self.dimension)
        log_power = v * math.log(self.kappa)
        return (v + 1) * math.log(2 * math.pi) + _log_bessel(v, self.kappa) - log_power


class Mixture(AbstractLaw):
    """Σ pₖ ρₖ for laws ρₖ of one dimension; equal proportions if `weights` is left out."""

    components: tuple[AbstractLaw, ...]
    weights: tuple[float, ...] = eqx.field(static=True)
    dimension: int = eqx.field(static=True)

    def __init__(self, components, weights=None):
        self.components = tuple(components)
        if not self.components:
            raise InputError("components is empty; a mixture needs at least one law")
        dimensions = {law.dimension for law in self.components}
        if len(dimensions) > 1:
            raise InputError(f"components have dimensions {sorted(dimensions)}; they must agree")
        count = len(self.components)
        p = np.full(count, 1 / count) if weights is None else np.asarray(weights, np.float64)
        if p.shape != (count,) or not np.all(np.isfinite(p)) or np.any(p < 0) or p.sum() <= 0:
            raise InputError(
                f"weights is {weights}; it must be {count} numbers ≥ 0, one a component, not all 0"
            )
        self.weights = tuple((p / p.sum()).tolist())
        self.dimension = dimensions.pop()

    def sample(self, key, count):
        choice_key, key = jax.random.split(key)
        choice = jax.random.choice(
            choice_key, len(self.components), (count,), p=jnp.asarray(self.weights)
        )
        keys = jax.random.split(key, len(self.components))
        drawn = [law.sample(k, count).points for law, k in zip(self.components, keys, strict=True)]
        return Measure(jnp.stack(drawn)[choice, jnp.arange(count)])

    def quadrature(self, count, axis=None):
        return _weighted_nodes(self, count, axis)

    def log_density(self, x):
        parts = [
            law.log_density(x) + math.log(p)
            for law, p in zip(self.components, self.weights, strict=True)
            if p > 0
        ]
        return jax.nn.logsumexp(jnp.stack(parts), axis=0)

    def density_bounds(self):
        bounds = [law.density_bounds() for law in self.components]
        if any(bound is None for bound in bounds):
            return None
        least, slope = np.asarray(self.weights) @ np.asarray(bounds)
        return float(least), float(slope)

    def inverse_moment_limit(self, basis):
        return min(
            law.inverse_moment_limit(basis)
            for law, p in zip(self.components, self.weights, strict=True)
            if p > 0
        )


class Tokens(AbstractLaw):
    """The law of given tokens: Σ wᵢ δ_(xᵢ, ξᵢ) itself, as its only quadrature."""

    measure: Measure
    dimension: int = eqx.field(static=True)

    def __init__(self, points, weights=None, labels=None):
        self.measure = Measure(points, weights, labels)
        if self.measure.points.ndim != 2:
            raise InputError(f"points have shape {self.measure.points.shape}; they must be (n, d)")
        self.dimension = self.measure.dimension

    def sample(self, key, count):
        """`count` tokens drawn with replacement, their labels with them."""
        mu = self.measure
        index = jax.random.choice(key, mu.size, (count,), p=mu.weights)
        return Measure(mu.points[index], labels=None if mu.labels is None else mu.labels[index])

    def quadrature(self, count=None, axis=None):
        """The tokens themselves; `count`, if given, must be their number."""
        if axis is not None:
            raise InputError("given tokens are their own quadrature, which has no axis")
        if count not in (None, self.measure.size):
            raise InputError(
                f"the law is {self.measure.size} given tokens, so its quadrature has "
                f"{self.measure.size} nodes, not {count}; leave the count out, or sample"
            )
        return self.measure

    def log_density(self, x):
        raise InputError("a law of given tokens has no density")

    def density_bounds(self):
        return None

    def inverse_moment_limit(self, basis):
        shadow = sphere.norm(jnp.matmul(self.measure.points, basis, precision="highest"))
        present = self.measure.weights > 0
        return math.inf if bool(jnp.all((shadow > 0) | ~present)) else 0.0


def load_tokens(path: str | os.PathLike) -> Tokens:
    """The law of the tokens in a file, each row normalised to the sphere.

    A `.npy` file holds the rows (n, d); a `.npz` file holds them as `points`, and may hold
    `weights` (normalised here) and `labels`.

    **Raises:** `InputError` for a file that is missing, not of this form, or with rows that are not
    finite or are zero.
    """
    path = Path(path)
    try:
        content = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"token file {path} does not exist") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        raise InputError(f"token file {path} is not a .npy or .npz file of numbers") from None
    if isinstance(content, np.ndarray):
        arrays = {"points": content}
    else:
        with content:
            arrays = dict(content)
    if "points" not in arrays:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise InputError(f"token file {path} has no array `points` (it has {found})")
    points = arrays["points"]
    if points.dtype.kind not in "fiu":
        raise InputError(f"token file {path} holds {points.dtype}, not real numbers")
    if points.ndim != 2 or points.shape[0] < 1 or points.shape[1] < 2:
        raise InputError(
            f"token file {path} has shape {points.shape}; it must be (n, d) with d ≥ 2"
        )
    points = points.astype(np.float64)
    # Scaled by the largest entry first, so that the length neither overflows nor underflows.
    largest = np.max(np.abs(points), axis=1, keepdims=True)
    for bad, what in ((~np.isfinite(largest), "not finite"), (largest == 0, "zero")):
        if np.any(bad):
            raise InputError(f"token file {path}: row {np.flatnonzero(bad)[0]} is {what}")
    points = points / largest
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    weights = arrays.get("weights")
    if weights is not None:
        weights = np.asarray(weights, np.float64)
        if weights.shape != points.shape[:1] or not np.all(weights >= 0) or not weights.sum() > 0:
            raise InputError(
                f"token file {path}: weights must be {len(points)} numbers ≥ 0, not all zero"
            )
        weights = weights / weights.sum()
    try:
        return Tokens(jnp.asarray(points, dtype=float), weights, arrays.get("labels"))
    except InputError as error:
        raise InputError(f"token file {path}: {error}") from None


def nodes(dimension: int, count: int) -> Float[Array, "count d"]:
    """Points spread evenly over S¹ (equispaced) or S² (a Fibonacci lattice), of equal weight.

    The circle is turned by an irrational fraction of a step, and the lattice is centred on the
    equator, where it is symmetric under the half turn diag(1, −1, −1): late times are sensitive to
    the balance between e and −e, which this keeps exactly for e = e₂ or e₃. For even counts no node
    lies on a coordinate axis or plane, where a projection Π would not be defined.
    """
    golden = (math.sqrt(5) - 1) / 2
    if count < 1:
        raise InputError(f"count is {count}; quadrature needs at least one node")
    i = np.arange(count)
    if dimension == 2:
        angle = 2 * math.pi * (i + golden) / count
        points = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    elif dimension == 3:
        z = 1 - (2 * i + 1) / count
        angle = 2 * math.pi * ((i - (count - 1) / 2) * golden % 1)
        radius = np.sqrt(1 - z**2)
        points = np.stack([radius * np.cos(angle), radius * np.sin(angle), z], axis=1)
    else:
        raise InputError(
            f"quadrature nodes are known on S¹ and S² (d = 2, 3), not for d = {dimension}; "
            "sample instead"
        )
    return jnp.asarray(points, dtype=float)


def graded_nodes(axis: ArrayLike, count: int) -> Measure:
    """Nodes of the uniform law on S¹, equispaced in log tan θ on each quarter, θ = ∠(x, ±e).

    Under the zero-temperature flow to E = span(e) log tan θ only shifts, and at a uniform pace near
    its ends, so these nodes stay spread over every scale where equispaced ones leave the
    neighbourhood of e's equator after a time log(count) and are alone there. They reach to within
    e^{−12} of the axis and of the equator. The rule is that of the trapezium, for an integrand that
    decays at both ends.

    **Raises:** `InputError` for an axis that is not a vector of the plane, or a count that is not a
    multiple of four.
    """
    axis = np.asarray(axis, np.float64)
    if axis.shape != (2,) or not (np.isfinite(axis).all() and axis.any()):
        raise InputError(
            f"axis is {axis.tolist()}; graded nodes lie on the circle (d = 2), about two finite "
            "numbers, not both zero"
        )
    if count < 4 or count % 4:
        raise InputError(f"count is {count}; graded nodes need a multiple of four")
    quarter = count // 4
    e = axis / np.linalg.norm(axis)
    normal = np.array([-e[1], e[0]])
    angle = np.arctan(np.exp(12 * ((2 * np.arange(quarter) + 1) / quarter - 1)))
    along, across = np.cos(angle)[:, None] * e, np.sin(angle)[:, None] * normal
    points = [along + across, across - along, -along - across, along - across]
    weights = np.tile(np.sin(2 * angle), 4)
    return Measure(jnp.asarray(np.concatenate(points), dtype=float), weights / weights.sum())


def _weighted_nodes(law: AbstractLaw, count: int, axis: ArrayLike | None) -> Measure:
    if axis is None:
        mu = Measure(nodes(law.dimension, count))
    elif law.dimension == 2:
        mu = graded_nodes(axis, count)
    else:
        raise InputError(f"nodes graded towards an axis are known for d = 2, not {law.dimension}")
    density = np.log(np.asarray(mu.weights, np.float64)) + np.asarray(
        law.log_density(mu.points), np.float64
    )
    mass = np.exp(density).sum() * math.exp(_log_area(law.dimension))
    if not abs(mass - 1) <= 0.01:
        raise InputError(
            f"{count} quadrature nodes do not resolve the law: they see a total mass of "
            f"{mass:.4g} instead of 1; use more tokens, or sample"
        )
    weights = np.exp(density - density.max())
    return mu.reweight(jnp.asarray(weights / weights.sum(), mu.points.dtype))


def _uniform_points(key: PRNGKeyArray, count: int, dimension: int) -> Float[Array, "count d"]:
    return sphere.normalise(jax.random.normal(key, (count, dimension)))


def _check_dimension(d: int) -> None:
    if d < 2:
        raise InputError(f"dimension is {d}; tokens need d ≥ 2")


def _exp(x: float) -> float:
    """e^x, infinite (not an OverflowError) where a density exceeds every float."""
    return math.exp(x) if x < 709 else math.inf


def _log_area(d: int) -> float:
    """log of the surface area of S^{d−1}, 2π^{d/2}/Γ(d/2)."""
    return math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)


def _log_bessel(v: float, x: float) -> float:
    """log I_v(x), also where I_v underflows (v ≫ x), by its power series there."""
    scaled = special.ive(v, x)
    if scaled > 1e-280:
        return math.log(scaled) + x
    k = np.arange(int(x) + 50)
    return float(
        special.logsumexp(
            (2 * k + v) * math.log(x / 2) - special.gammaln(k + 1) - special.gammaln(k + v + 1)
        )
    )
