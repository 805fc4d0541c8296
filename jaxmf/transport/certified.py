"""W₂ between any two measures with error bars that are theorems: lower ≤ W₂ ≤ upper.

Sinkhorn's iterations (ott-jax) run down a ladder of ε, each rung started from the last. The
potentials and the plan they leave are neither feasible nor optimal, but

- *below*: f(x) = −ε' log Σⱼ e^{(gⱼ − c(x, yⱼ))/ε'} ≤ min_j (c(x, yⱼ) − gⱼ) for every ε' > 0, so
  (f, g) is feasible for the dual problem and ∫f dμ + ∫g dν ≤ W₂²; with ε' tiny it is the
  c-transform, and taking that of f in turn only helps;
- *above*: the plan, its rows and then its columns scaled down where they exceed the marginals
  (Altschuler, Weed and Rigollet, 2017), moves all but a little mass; the rest is a transport
  problem again, solved the same way; what is left in the end goes by the product plan.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

from .._tracing import known
from ..measure import Measure
from ..tilt import AbstractTilt, Automatic
from ..tilt.base import NOTHING, log_weight
from .axis import root
from .costs import AbstractCost, Chordal
from .entropic import Clouds


class Interval(NamedTuple):
    """lower ≤ W₂(μ, ν) ≤ upper, each end certified to rounding.

    - `reached`: whether upper − lower ≤ width·upper, or both are rounding; if not, the time ran
      out, or iterations at the smallest ε no longer helped.
    - `potential`: g on the points of ν; with its c-transform, the witness of the lower end.
    - `epsilon`: the ε that g was found at.
    """

    lower: Float[Array, ""]
    upper: Float[Array, ""]
    reached: Bool[Array, ""]
    potential: Float[Array, " m"]
    epsilon: Float[Array, ""]


class Clock(eqx.Module):
    """Runs loops until it is late. Under `jax.jit` and the like there is no clock, and XLA does."""

    deadline: float | None = eqx.field(static=True)

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def loop(self, unfinished: Callable, body: Callable, state: PyTree) -> PyTree:
        """While `unfinished(state)`, and it is not late: state = body(state)."""
        if self.deadline is None:
            return lax.while_loop(unfinished, body, state)
        while unfinished(state) and not self.late():
            state = body(state)
        return state

    def when(self, condition: Bool[Array, ""], then: Callable, otherwise: Any) -> Any:
        """`then()` if the condition holds, else `otherwise`."""
        if self.deadline is None:
            return lax.cond(condition, then, lambda: otherwise)
        return then() if condition else otherwise


class Problem(eqx.Module):
    """Transport of the weights a on x to the weights b on y, all of it costing `offset` more."""

    x: Float[Array, "n d"]
    y: Float[Array, "m d"]
    a: Float[Array, " n"]
    b: Float[Array, " m"]
    offset: Float[Array, ""]
    cost: AbstractCost
    tilt: AbstractTilt

    def between(self, a: Float[Array, " n"], b: Float[Array, " m"]) -> "Problem":
        """The same points with other weights."""
        return eqx.tree_at(lambda problem: (problem.a, problem.b), self, (a, b))

    def rows(self, log_weights: Float[Array, " m"], epsilon: Float[Array, ""]):
        """log Σⱼ e^{log wⱼ − c(xᵢ, yⱼ)/ε}, and the mean cost of xᵢ under its summands."""
        return self.cost.soften(self.x, self.y, log_weights, epsilon, self.tilt)

    def columns(self, log_weights: Float[Array, " n"], epsilon: Float[Array, ""]):
        """log Σᵢ e^{log wᵢ − c(xᵢ, yⱼ)/ε}."""
        return self.cost.soften(self.y, self.x, log_weights, epsilon, self.tilt)[0]


def interval(
    mu: Measure,
    nu: Measure,
    cost: AbstractCost = Chordal(),
    *,
    width: float | int = 0.02,
    seconds: float | int = 60.0,
    start: Interval | None = None,
    tilt: AbstractTilt = Automatic(),
) -> Interval:
    """Tighten lower ≤ W₂(μ, ν) ≤ upper until they are within `width`·upper, or time is up.

    Below 1e-7 (1e-5 in float32) an upper end is nothing but rounding, and reaches any width.

    Any weights and sizes, memory O(n + m). If both have the same weights token by token, their
    `coupling` is an upper end at once; a `start` from a problem close by saves iterations. Time is
    looked at between passes over all pairs, at most ten iterations apart. The ends are computed in
    float64 and rounded outwards to the precision of the points.

    Traced by `jax.jit`, `jax.vmap` or the like it cannot look at a clock or at values: `seconds`
    and the coupling are not heeded then, and the precision is that of the points.
    """
    arrays = mu.points, nu.points, mu.weights, nu.weights
    dtype = mu.points.dtype
    values = [known(array) for array in arrays]
    if any(value is None for value in values):
        arrays = lax.stop_gradient(arrays)
        problem = Problem(*arrays, jnp.zeros((), dtype), cost, tilt)
        return _tighten(problem, width, start, Clock(None))
    deadline = time.monotonic() + seconds
    # Concrete also while JAX traces what surrounds this.
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        full, y, a, b = (np.asarray(value, np.float64) for value in values)
        x, y, margin = _reduced(full, y, 64 * np.finfo(dtype).eps, cost)
        a, b = a / a.sum(), b / b.sum()
        left_out = np.sum(full**2, axis=1) - np.sum(x**2, axis=1)
        problem = Problem(*map(jnp.asarray, (x, y, a, b, a @ left_out)), cost, tilt)
        rounding = max(64 * float(np.finfo(dtype).eps), _ROUNDING)
        found = _tighten(problem, width, start, Clock(deadline), rounding)
        low, high = np.maximum(found.lower - margin, 0), found.upper + margin
    if dtype != np.float64:
        low = np.nextafter(np.asarray(low, dtype), dtype.type(0))
        high = np.nextafter(np.asarray(high, dtype), dtype.type(np.inf))
    reached = bool(found.reached) or bool(high - low <= width * high)
    rest = (np.asarray(value, dtype) for value in (found.potential, found.epsilon))
    return Interval(*map(jnp.asarray, (low, high, reached, *rest)))


_LARGEST, _SMALLEST = 0.25, 1e-4  # ε; the iterations run in float32, whose logits c/ε need digits
_LEVELS = 4  # of residual problems; each leaves a few per cent of the mass it is given
_ROUNDING = 64**0.5 * 2.0**-26  # of W₂, whose square is known to 64 units in float64
_LOOK = 2**32  # pairs between two looks at the clock


class _State(NamedTuple):
    """Where the ladder stands: the last ε and its g, and the best of both ends so far."""

    epsilon: Float[Array, ""]
    potential: Float[Array, " m"]
    lower: Float[Array, ""]
    upper: Float[Array, ""]
    witness: Float[Array, " m"]
    sharpness: Float[Array, ""]
    stuck: Bool[Array, ""]


def _tighten(problem, width, start, clock, rounding=0.0):
    if start is None:
        epsilon, potential = 2 * _LARGEST, jnp.zeros_like(problem.b)
    else:
        epsilon = jnp.clip(8 * start.epsilon, 8 * _SMALLEST, 2 * _LARGEST)
        potential = start.potential
    potential = jnp.asarray(potential, problem.b.dtype)
    epsilon = jnp.asarray(epsilon, problem.b.dtype)

    def apart(state):
        # W₂ = 0 reaches no relative width.
        return state.upper - state.lower > jnp.maximum(width * state.upper, rounding)

    def unfinished(state):
        return apart(state) & ~state.stuck

    def rung(state):
        epsilon = jnp.maximum(state.epsilon / 2, _SMALLEST)
        potential = _descend(problem, state.potential, epsilon, clock)
        new = _lower(problem, potential), potential, epsilon
        old = state.lower, state.witness, state.sharpness
        lower, witness, sharpness = (
            jnp.where(new[0] > old[0], *ends) for ends in zip(new, old, strict=True)
        )
        moved = _round(problem, potential, epsilon)
        # The residual problems cost as much as all before; what the plan has moved already bounds
        # from below what they can give.
        lowest = epsilon <= _SMALLEST
        least = root(moved[0] + problem.offset)
        promising = (least - lower <= 0.8 * width * state.upper) | lowest | clock.late()
        upper = clock.when(
            (state.upper - lower > width * state.upper) & promising,
            lambda: jnp.minimum(state.upper, _finish(problem, moved, epsilon, clock)),
            state.upper,
        )
        # At the last rung iterations go on for as long as they help.
        stuck = lowest & (upper - lower > 0.95 * (state.upper - state.lower))
        return _State(epsilon, potential, lower, upper, witness, sharpness, stuck)

    lower, upper = _cheap(problem, clock)
    begin = _State(epsilon, potential, lower, upper, potential, epsilon, jnp.asarray(False))
    end = clock.loop(unfinished, rung, begin)
    return Interval(end.lower, end.upper, ~apart(end), end.witness, end.sharpness)


def _cheap(problem, clock):
    """Both ends in O(n): the distance of the means, and the product plan or the coupling."""
    x, y, a, b = problem.x, problem.y, problem.a, problem.b
    lower = root(jnp.sum((a @ x - b @ y) ** 2) + problem.offset)
    upper = _product(problem, a, b)
    if clock.deadline is not None and x.shape == y.shape and jnp.array_equal(a, b):
        upper = jnp.minimum(upper, jnp.dot(a, problem.cost.between(x, y)))
    return lower, root(upper + problem.offset)


def _product(problem, a, b):
    """The cost of the product plan of a and b, or a bound of it: ∠(x, y) ≤ π/2·|x − y|."""
    x, y = problem.x, problem.y
    mass = jnp.where(jnp.sum(a) > 0, jnp.sum(a), 1)
    squares = jnp.dot(a, jnp.sum(x**2, axis=1)) + jnp.dot(b, jnp.sum(y**2, axis=1))
    return problem.cost.largest / 4 * (squares - 2 * jnp.dot(a @ x, b @ y) / mass)


def _descend(problem, potential, epsilon, clock):
    """g after Sinkhorn's iterations at ε, started from g, until the marginals are right to 1e-3."""
    pairs = problem.a.size * problem.b.size
    most = min(max(2**28 // pairs, 80), 2000)  # more where they are cheap
    few = min(max(_LOOK // (2 * pairs), 1), 10)

    def body(state):
        potential, _, count = state
        return *_iterate(problem, potential, epsilon, few), count + few

    def unfinished(state):
        return (state[1] > 1e-3) & (state[2] < most)

    return clock.loop(unfinished, body, (potential, jnp.ones((), jnp.float32), jnp.asarray(0)))[0]


def _finish(problem, moved, epsilon, clock):
    """√ of the cost of a plan with exactly the marginals a and b, `moved` being its beginning."""

    def body(state):
        (total, a, b), level = state
        mass = jnp.minimum(jnp.sum(a), jnp.sum(b))
        rest = problem.between(a / jnp.sum(a), b / jnp.sum(b))
        potential = jnp.zeros_like(b)
        for coarse in (16, 4, 1):
            potential = _descend(rest, potential, coarse * epsilon, clock)
        cost, a, b = _round(rest, potential, epsilon)
        return (total + mass * cost, mass * a, mass * b), level + 1

    def unfinished(state):
        (_, a, b), level = state
        rounding = 8 * jnp.finfo(a.dtype).eps
        return (jnp.minimum(jnp.sum(a), jnp.sum(b)) > rounding) & (level < _LEVELS)

    total, a, b = clock.loop(unfinished, body, (moved, jnp.asarray(0)))[0]
    return root(total + _product(problem, a, b) + problem.offset)


@eqx.filter_jit
def _iterate(problem, potential, epsilon, count):
    """(g, error of the marginals) after `count` of Sinkhorn's iterations at ε from g, in float32.

    Per unit of weight: the plan is e^{(fᵢ + gⱼ − c(xᵢ, yⱼ))/ε} aᵢ bⱼ.
    """
    dtype = potential.dtype
    problem, g, epsilon = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32), (problem, potential, epsilon)
    )
    a, b = problem.a, problem.b
    geometry = Clouds(problem.x, problem.y, problem.cost, problem.tilt, epsilon=epsilon)
    solve = sinkhorn.Sinkhorn(threshold=0.0, inner_iterations=count, max_iterations=count)
    # ott's potentials carry the weights: e^{(fᵢ + gⱼ − c(xᵢ, yⱼ))/ε} is the whole plan.
    # They start from f, since g is what ott updates first.
    f = epsilon * (log_weight(a) - problem.rows(g / epsilon + log_weight(b), epsilon)[0])
    out = solve(linear_problem.LinearProblem(geometry, a=a, b=b), init=(f, g))
    g = jnp.where(b > 0, out.g - epsilon * log_weight(b), 0)
    return g.astype(dtype), out.errors[-1].astype(jnp.float32)


@eqx.filter_jit
def _lower(problem, potential):
    """√ of the dual value of (f, g'), f the c-transform of g and g' that of f."""
    sharp = jnp.asarray(64 * jnp.finfo(potential.dtype).eps, potential.dtype)

    def absent(weights):  # a token of weight zero constrains nothing
        return jnp.where(weights > 0, 0, NOTHING)

    f = -sharp * problem.rows(absent(problem.b) + potential / sharp, sharp)[0]
    g = -sharp * problem.columns(absent(problem.a) + f / sharp, sharp)
    return root(jnp.dot(problem.a, f) + jnp.dot(problem.b, g) + problem.offset)


@eqx.filter_jit
def _round(problem, potential, epsilon):
    """(cost, a', b'): what the plan of g moves within the marginals, and what they lack then."""
    a, b, g = problem.a, problem.b, potential
    to_b = log_weight(b) + g / epsilon
    f = -epsilon * problem.rows(to_b, epsilon)[0]  # the rows then have the mass a exactly
    log_column = g / epsilon + problem.columns(log_weight(a) + f / epsilon, epsilon)
    # Columns may have more than b, and are scaled down to it then.
    log_row, mean = problem.rows(to_b + jnp.minimum(-log_column, 0), epsilon)
    row = a * jnp.exp(log_row + f / epsilon)
    column = b * jnp.exp(jnp.minimum(log_column, 0))
    return jnp.dot(row, mean), jnp.maximum(a - row, 0), jnp.maximum(b - column, 0)


def _reduced(x, y, tolerance, cost):
    """(x', y', margin): coordinates in the span of y, where all of a chordal problem lives.

    |x − y|² = |x − Px|² + |Px − y|² for y in the subspace that P projects to. The margin is how far
    off it rounding has put a y.
    """
    if isinstance(cost, Chordal):
        values, vectors = np.linalg.eigh(y.T @ y / len(y))
        basis = vectors[:, values > tolerance**2]
        off = np.linalg.norm(y - (y @ basis) @ basis.T, axis=1).max()
        if basis.shape[1] < y.shape[1] and off <= tolerance:
            return x @ basis, y @ basis, off
    return x, y, 0.0
