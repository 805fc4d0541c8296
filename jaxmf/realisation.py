"""Exact realisation: kernels whose maximisers have a content marginal of one's choice.

(arXiv:2605.30229, Theorems 2 and 4.) For a gauge U the kernel e^{β⟨U_ξx, U_ζy⟩}/β is at most
e^β/β, and x*(ξ) = U_ξᵀu has that value at every pair of labels: it maximises the energy, whatever
the gauge and the law ρ of the labels. Its content marginal is the law of U_ξᵀu for ξ ~ ρ, so that a
target law is a matter of choosing the gauge.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from . import sphere
from ._tracing import known
from ._typing import ArrayLike
from .errors import InputError
from .interaction import Automatic
from .kernels import AbstractGauge, AbstractKernel, Exponential, Householder, Rotation
from .kernels.labels import as_function
from .label_laws import AbstractLabelLaw, Atoms, Interval
from .laws import AbstractLaw, Tokens, nodes
from .measure import Measure
from .orbits import Orbit
from .quantiles import InverseCdf, Steps, check_quantile
from .temperature import inverse_temperature
from .transport import Distance, wasserstein


class Certificate(eqx.Module):
    """That a measure maximises its energy, and has the target as its content marginal.

    - `energy`: E of the maximiser.
    - `bound`: e^{β(1 − offset)}/(2β), which no measure exceeds.
    - `gap`: (bound − energy)/bound; zero up to rounding, which is of the size of β·ε.
    - `gradient_norm`: √(Σ wᵢ|∇ᵢ|²)/e^{β(1 − offset)}; zero up to rounding.
    - `distance`: W₂, with both ends, between the content marginal and the target, each by as many
      atoms. For a sample (or atoms of labels) both are exact, and so is the distance, zero. A
      target without atoms is discretised apart from the maximiser, a quarter of a piece of ρ to
      the left: the distance is then that of two discretisations and falls like 1/count where the
      target has no gaps (a gap costs up to its width times count^{−1/2}).
    """

    energy: Float[Array, ""]
    bound: Float[Array, ""]
    gap: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    distance: Distance


class Realisation(eqx.Module):
    """A kernel, the maximiser x*(ξ) = U_ξᵀu of its energy, and the proof in numbers.

    - `kernel`: e^{β(⟨U_ξx, U_ζy⟩ − offset)}/β; the offset is 0, or 1 where e^β is too large.
    - `u`: the unit vector that every token has in the gauge.
    - `maximiser`: the law of (x*(ξ), ξ), discretised in ξ.
    """

    kernel: AbstractKernel
    u: Float[Array, " d"]
    maximiser: Measure
    certificate: Certificate

    def tokens(self, labels: ArrayLike) -> Float[Array, "... d"]:
        """x*(ξ) = U_ξᵀu at any labels, whose leading axes the result has."""
        labels = jnp.asarray(labels)
        shape = self.maximiser.labels.shape[1:]
        batch = labels.shape[: labels.ndim - len(shape)]
        if labels.shape != (*batch, *shape):
            raise InputError(
                f"labels have shape {labels.shape}; those of this kernel have shape {shape} each"
            )
        return _tokens(self.kernel.by, self.u, labels.reshape(-1, *shape)).reshape(*batch, -1)


class Phase(eqx.Module):
    """φ = Q ∘ F_ρ: with ξ ~ ρ without atoms, φ(ξ) has the law whose quantile function is Q."""

    quantile: Callable = eqx.field(converter=as_function)
    labels: AbstractLabelLaw

    def __call__(self, xi: ArrayLike) -> Array:
        return self.quantile(self.labels.rank(xi))


def realise_on_orbit(
    generator: ArrayLike,
    u: ArrayLike,
    *,
    density: Callable | None = None,
    quantile: Callable | None = None,
    sample: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    law: AbstractLaw | None = None,
    span: tuple[float | int, float | int] | None = None,
    beta: ArrayLike = 1.0,
    labels: AbstractLabelLaw = Interval(),
    count: int = 1024,
    seconds: float | int = 10.0,
) -> Realisation:
    """The kernel whose maximiser has a chosen law on the orbit {e^{θG}u} as its content marginal.

    Theorem 2 of arXiv:2605.30229. The gauge is U_ξ = e^{−φ(ξ)G}, and so x*(ξ) = e^{φ(ξ)G}u, with
    the phase map φ = Q ∘ F_ρ of the quantile function Q of θ and the distribution function F_ρ of
    the labels. It is at `kernel.by.phase`.

    **Arguments:**

    - `generator`: G, skew (d, d); `u`: a unit vector (d,) that it turns.
    - One target: `density`, a function ≥ 0 of θ (need not be normalised); `quantile`, increasing
      from [0, 1] to θ; `sample`, angles (n,) or points (n, d) of the orbit, with `weights`; or
      `law`, a law on the sphere, its density restricted to the orbit (given tokens are a sample).
    - `span`: the angles (a, b) of the law; (0, T) by default, T the orbit's period.
    - `beta`, `labels` (a law without atoms, or one whose atoms fit those of a sample).
    - `count`: the number of labels of the discretised maximiser. A sample has at least one for each
      of its atoms, in proportion to their weights.
    - `seconds`: how long the certificate may look for W₂ where it is not exact.

    Values are looked at, so not under `jax.jit`. Derivatives in β, in the angles of a sample and in
    what densities and quantiles depend on go through `tokens` and the kernel.

    **Raises:** `InputError` for a generator that is not skew, a u that is not a unit vector or does
    not turn, an orbit without a period and no span, not exactly one target, or a target that is not
    a law on the orbit or does not fit the atoms of the labels.
    """
    _check_target({"density": density, "quantile": quantile, "sample": sample, "law": law})
    rotation = Rotation(-jnp.asarray(generator, jnp.result_type(float)))
    u = _unit(u)
    orbit = Orbit(generator, u)
    _check_law(law, len(u))
    if isinstance(law, Tokens):
        sample, weights, law = law.measure.points, law.measure.weights, None
    _check_sample(sample, weights, labels, count)

    if sample is not None:
        theta = _angles(orbit, sample, span)
        order = jnp.argsort(theta)
        theta = theta[order]
        mass = _weights(weights, orbit.curve(known(theta)))[order]
        nodes, node_weights, index = _spread(labels, mass, count)
        q = Steps(theta, mass)
        target = orbit.curve(np.asarray(known(theta), np.float64))[index]
    else:
        a, b = _span(orbit, span)
        nodes, node_weights = labels.nodes(count)
        ranks = (np.arange(count) + 0.25) / count
        if quantile is not None:
            q = as_function(quantile)
            check_quantile(q, (a, b))
            theta = np.asarray(known(jax.vmap(q)(jnp.asarray(ranks))), np.float64)
        else:
            f = density if law is None else _restricted(law, orbit.curve, (a, b))
            q = InverseCdf(f, (a, b))
            theta = _by_sums(f, (a, b), ranks)
        target = orbit.curve(theta)
    gauge = rotation.along(Phase(q, labels))
    return _realise(gauge, u, beta, nodes, node_weights, target, seconds)


def realise_by_gauge(
    map: Callable | None = None,
    *,
    sample: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    law: AbstractLaw | None = None,
    key: PRNGKeyArray | None = None,
    u: ArrayLike | None = None,
    beta: ArrayLike = 1.0,
    labels: AbstractLabelLaw | ArrayLike = Interval(),
    count: int = 1024,
    seconds: float | int = 10.0,
) -> Realisation:
    """The kernel whose maximiser is x*(ξ) = T(ξ) for a map T of the labels, content marginal T♯ρ.

    Theorem 4 of arXiv:2605.30229. The gauge U_ξ is the reflection that swaps u and T(ξ), the
    identity where they are the same.

    **Arguments:**

    - One target: `map`, T from one label to a unit vector (d,); `sample`, points (n, d) with
      `weights`: T is then constant on pieces of the labels with those masses, in their order; or
      `law`, a law on the sphere. On the circle T inverts its distribution function in the angle; on
      S² the law is first replaced by `count` quadrature nodes, above by `count` samples (`key`).
    - `u`: any unit vector; the last basis vector by default.
    - `beta`, `count`, `seconds` as for `realise_on_orbit`; `labels` likewise, and for a map any
      labels: an array (n, …) of them has equal weights.

    **Raises:** `InputError` for a map without unit vectors as values, not exactly one target, a law
    on S³ or above without a key, or a target that does not fit the atoms of the labels.
    """
    _check_target({"map": map, "sample": sample, "law": law})
    if not isinstance(labels, AbstractLabelLaw):
        labels = Atoms(labels)
    if isinstance(law, Tokens):
        sample, weights, law = law.measure.points, law.measure.weights, None
    _check_sample(sample, weights, labels if map is None else None, count)

    target_weights = None
    if law is not None and law.dimension == 2:
        turn = (0.0, 2 * np.pi)
        f = _restricted(law, _circle, turn)
        map = Phase(OnCircle(InverseCdf(f, turn)), labels)
        target = _circle(_by_sums(f, turn, (np.arange(count) + 0.25) / count))
        nodes, node_weights = labels.nodes(count)
    elif law is not None:
        drawn, other = _two_discretisations(law, count, key)
        sample, weights = drawn.points, drawn.weights
        target, target_weights = other.points, other.weights
    elif map is not None:
        map = as_function(map)
        nodes, node_weights = labels.nodes() if labels.atomic else labels.nodes(count)
        shifted = nodes if labels.atomic else labels.quantile((np.arange(count) + 0.25) / count)
        target = _values(map, shifted)
    if sample is not None:
        points = jnp.asarray(sample)
        mass = _weights(weights, points)
        nodes, node_weights, index = _spread(labels, mass, count)
        map = Phase(Steps(points, mass), labels)
        target = points[index] if law is None else target
    u = jnp.eye(target.shape[-1])[-1] if u is None else u
    u = _unit(u, _values(map, nodes))
    gauge = Householder(Swap(u, map))
    return _realise(gauge, u, beta, nodes, node_weights, target, seconds, target_weights)


class Swap(eqx.Module):
    """v(ξ) ∥ u − T(ξ), whose reflection swaps u and T(ξ)."""

    u: Float[Array, " d"]
    map: Callable

    def __call__(self, xi: Array) -> Float[Array, " d"]:
        w = self.map(xi) - self.u
        # For unit vectors ⟨u, w⟩ is −|w|²/2: said so, the reflection stays right to rounding where
        # T(ξ) is close to u and that inner product is nothing but rounding.
        return jnp.sum(w * w) / 2 * self.u - sphere.tangent(self.u, w)


class OnCircle(eqx.Module):
    """p ↦ (cos Q(p), sin Q(p))."""

    quantile: Callable

    def __call__(self, p: ArrayLike) -> Float[Array, "*n 2"]:
        return _circle(self.quantile(p))


def _realise(gauge, u, beta, labels, weights, target, seconds, target_weights=None):
    beta = inverse_temperature(beta)
    value = known(beta)
    # A quarter of the range of floats leaves room for squares and sums.
    largest = float(jnp.log(jnp.finfo(u.dtype).max)) / 4
    offset = 0.0 if value is not None and value < largest else 1.0
    kernel = Exponential(beta, offset).gauge(gauge)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.astype(u.dtype)
    points = _tokens(gauge, u, labels)
    mu = Measure(points, weights, labels)
    target = Measure(
        jnp.asarray(target, u.dtype), weights if target_weights is None else target_weights
    )
    scale = jnp.exp(beta * (1 - offset)).astype(u.dtype)
    bound = scale / (2 * beta).astype(u.dtype)
    found, dissipated = _climb(kernel, mu)
    return Realisation(
        kernel,
        u,
        mu,
        Certificate(
            energy=found,
            bound=bound,
            gap=(bound - found) / bound,
            gradient_norm=jnp.sqrt(dissipated) / scale,
            distance=wasserstein(Measure(points, weights), target, seconds=seconds),
        ),
    )


@eqx.filter_jit
def _climb(kernel, mu):
    """`mf.energy` and `mf.dissipation`, compiled together."""
    value, gradient = Automatic()(kernel, mu.points, mu, mu.labels)
    square = jnp.sum(sphere.tangent(mu.points, gradient) ** 2, axis=-1)
    return mu.integrate(value) / 2, mu.integrate(square)


@eqx.filter_jit
def _tokens(gauge: AbstractGauge, u: Float[Array, " d"], labels: Shaped[Array, "n ..."]):
    return jax.vmap(gauge.undo, (0, None))(labels, u).astype(u.dtype)


# Targets


def _check_target(targets: dict) -> None:
    given = [name for name, value in targets.items() if value is not None]
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        raise InputError(f"give exactly one target of {', '.join(targets)}; there is {what}")


def _check_law(law: AbstractLaw | None, d: int) -> None:
    if law is not None and law.dimension != d:
        raise InputError(f"the law has dimension {law.dimension} and u {d}; they must agree")


def _check_sample(sample, weights, labels: AbstractLabelLaw | None, count: int) -> None:
    if count < 1:
        raise InputError(f"count is {count}; the maximiser needs at least one label")
    if sample is None and weights is not None:
        raise InputError("weights are given without a sample; they are those of its points")
    if sample is None and labels is not None and labels.atomic:
        raise InputError(
            "the law of the labels has atoms and the target has none; an atom would have to be "
            "split: give labels without atoms, such as mf.Interval()"
        )


def _span(orbit: Orbit, span) -> tuple[float, float]:
    if span is None:
        period = orbit.period
        if period is None:
            several = ", ".join(f"{w:.6g}" for w in sorted(set(orbit.frequencies.round(12))))
            raise InputError(
                f"the orbit never closes: its frequencies {several} have no common period; give "
                "span=(a, b), the angles of the law"
            )
        return 0.0, period
    a, b = (float(end) for end in span)
    if not -np.inf < a < b < np.inf:
        raise InputError(f"span is ({a}, {b}); it must be two finite angles, the first smaller")
    return a, b


def _angles(orbit: Orbit, sample: ArrayLike, span) -> Float[Array, " n"]:
    sample = jnp.asarray(sample)
    if sample.ndim == 2:
        values = known(sample)
        if values is None or sample.shape[1] != orbit.dimension:
            raise InputError(
                f"sample has shape {sample.shape}; points must be (n, {orbit.dimension}) and not "
                "traced"
            )
        return jnp.asarray(orbit.angles(values, _span(orbit, span)))
    sample = sample.astype(jnp.result_type(float))
    values = known(sample)
    if sample.ndim != 1 or not len(sample):
        raise InputError(
            f"sample has shape {sample.shape}; it must be angles (n,) or points (n, d)"
        )
    a, b = (-np.inf, np.inf) if span is None else _span(orbit, span)
    outside = ~(np.isfinite(values) & (values >= a) & (values <= b))
    if outside.any():
        i = int(np.argmax(outside))
        where = "not finite" if span is None else f"outside the span [{a:.6g}, {b:.6g}]"
        raise InputError(f"sample[{i}] is {values[i]:.6g}, {where}")
    return sample


def _weights(weights: ArrayLike | None, points: ArrayLike) -> Float[Array, " n"]:
    """The weights of a sample, in full precision; a measure checks both."""
    mu = Measure(points, weights)
    if weights is None:
        return jnp.full(mu.size, 1 / mu.size)
    return jnp.asarray(weights, jnp.result_type(float))


def _spread(
    labels: AbstractLabelLaw, weights: Float[Array, " k"], count: int
) -> tuple[Shaped[Array, " n"], Float[Array, " n"], np.ndarray]:
    """Labels and weights for a target of atoms, and the atom that each label has."""
    w = known(weights).astype(np.float64)
    w = w / w.sum()
    if labels.atomic:
        nodes, mass = labels.nodes()
        return nodes, mass, _match(labels, w)
    copies = np.where(w > 0, np.maximum(np.rint(count * w), 1), 0).astype(int)
    index = np.repeat(np.arange(len(w)), copies)
    piece = np.arange(len(index)) - (np.cumsum(copies) - copies)[index]
    mass = (w / np.maximum(copies, 1))[index]
    ranks = (np.cumsum(w) - w)[index] + mass * (piece + 0.5)
    return labels.quantile(ranks), jnp.asarray(mass), index


def _match(labels: AbstractLabelLaw, w: np.ndarray) -> np.ndarray:
    """The atom of the target that the quantile coupling gives each atom of the labels.

    **Raises:** `InputError` if it would have to split one.
    """
    values, mass = (known(a) for a in labels.nodes())
    above = known(labels.cdf(values)).astype(np.float64)
    below = above - mass
    ends = np.cumsum(w)
    index = np.minimum(np.searchsorted(ends, (above + below) / 2), len(w) - 1)
    slack = max(1e-9, 16 * float(np.finfo(mass.dtype).eps))
    split = (below < (ends - w)[index] - slack) | (above > ends[index] + slack)
    if split.any():
        k = min(np.flatnonzero(split), key=lambda k: values[k])
        raise InputError(
            f"the label {values[k]} has mass {mass[k]:.6g}, from rank {below[k]:.6g} to "
            f"{above[k]:.6g}, and would have to be split between atoms of the target, which end at "
            f"{', '.join(f'{end:.6g}' for end in ends[:8])}{', …' if len(ends) > 8 else ''}; each "
            "label must lie within one"
        )
    return index


def _values(map: Callable, labels: Shaped[Array, "n ..."]) -> Float[Array, "n d"]:
    """T at the labels. **Raises:** `InputError` unless they are unit vectors."""
    found = jax.vmap(map)(labels)
    if found.ndim != 2 or found.shape[1] < 2:
        raise InputError(
            f"the map returns shape {found.shape[1:]} for one label; it must be a unit vector of "
            "shape (d,), d ≥ 2"
        )
    values = known(found)
    if values is not None:
        length = np.linalg.norm(values.astype(np.float64), axis=1)
        off = ~(np.abs(length - 1) <= 1e3 * float(jnp.finfo(found.dtype).eps))
        if off.any():
            i = int(np.argmax(off))
            raise InputError(
                f"the map has length {length[i]:.6g} at the label {known(labels)[i]}; it must "
                "return unit vectors (see jaxmf.sphere.normalise)"
            )
    return found


def _unit(u: ArrayLike, like: Float[Array, "n d"] | None = None) -> Float[Array, " d"]:
    u = jnp.asarray(u)
    u = u.astype(jnp.result_type(float, u) if like is None else like.dtype)
    if u.ndim != 1 or len(u) < 2 or (like is not None and len(u) != like.shape[1]):
        d = "d" if like is None else like.shape[1]
        raise InputError(f"u has shape {u.shape}; it must be a unit vector of shape ({d},)")
    values = known(u)
    if values is not None:
        length = float(np.linalg.norm(values.astype(np.float64)))
        if not abs(length - 1) <= 1e3 * float(jnp.finfo(u.dtype).eps):
            raise InputError(f"u has length {length:.6g}; it must be a unit vector")
    return u


def _circle(angles):
    xp = np if isinstance(angles, np.ndarray) else jnp
    return xp.stack([xp.cos(angles), xp.sin(angles)], axis=-1)


def _restricted(law: AbstractLaw, curve: Callable, span: tuple[float, float]) -> Callable:
    """The density of a law along a curve, its largest value about 1, so that none is lost."""
    seen = law.log_density(curve(jnp.linspace(*span, 4097)))
    top = jnp.max(seen)
    return lambda theta: jnp.exp(law.log_density(curve(theta)) - top)


def _by_sums(density: Callable, span: tuple[float, float], ranks: np.ndarray) -> np.ndarray:
    """Quantiles by running sums over a fine grid: another road than that of `InverseCdf`."""
    edges = np.linspace(*span, 2**18 + 1)
    middle = jnp.asarray((edges[1:] + edges[:-1]) / 2)
    sums = np.cumsum(np.asarray(known(jax.jit(jax.vmap(density))(middle)), np.float64))
    return np.interp(ranks * sums[-1], np.concatenate([[0], sums]), edges)


def _two_discretisations(
    law: AbstractLaw, count: int, key: PRNGKeyArray | None
) -> tuple[Measure, Measure]:
    """A law above the circle as `count` tokens, in two ways that know nothing of each other."""
    if law.dimension == 3:
        axes = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
        turned = sphere.normalise(jnp.matmul(nodes(3, count), axes, precision="highest"))
        return law.quadrature(count), Measure(turned, jax.nn.softmax(law.log_density(turned)))
    if key is None:
        raise InputError(
            f"a law on S^{law.dimension - 1} is realised through a sample; give a key to draw it"
        )
    one, other = jax.random.split(key)
    return law.sample(one, count), law.sample(other, count)
