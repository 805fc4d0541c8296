"""Flows: a measure carried by a field, ẋᵢ = v[μ](xᵢ), with weights and labels at rest.

The fixed-step methods are Runge–Kutta methods in R^d for the field extended by
v(y) := v[μ/|·|](y/|y|), followed by one projection to the sphere a step. The exact solution stays
on the sphere, so the projection costs no order (Hairer, Lubich and Wanner, *Geometric Numerical
Integration*, IV.4), and rotations, permutations and splittings of tokens commute with every step.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree, Real

from . import sphere
from ._typing import ArrayLike
from .errors import InputError
from .fields import AbstractField
from .measure import Measure


class AbstractMethod(eqx.Module):
    """A way of advancing a measure in time."""

    @abc.abstractmethod
    def resolve(self, intervals: Real[Array, " k"]) -> "AbstractMethod":
        """The method with everything static decided for these intervals."""

    @abc.abstractmethod
    def advance(self, field: AbstractField, mu: Measure, interval: Float[Array, ""]) -> Measure:
        """The measure after the time `interval`."""


class _FixedStep(AbstractMethod):
    """Explicit Runge–Kutta methods whose stages use only the stage before them."""

    step: float | None = eqx.field(static=True, default=0.05)
    steps: int | None = eqx.field(static=True, default=None)

    # Stage i is evaluated at x + aᵢ h kᵢ₋₁; the step is x + h Σ bᵢ kᵢ.
    a: eqx.AbstractClassVar[tuple[float, ...]]
    b: eqx.AbstractClassVar[tuple[float, ...]]
    order: eqx.AbstractClassVar[int]

    def __check_init__(self):
        if self.steps is not None:
            if self.steps < 1:
                raise InputError(f"steps is {self.steps}; it must be at least 1")
        elif self.step is None or not (np.isfinite(self.step) and self.step > 0):
            raise InputError(f"step is {self.step}; it must be finite and positive")

    def resolve(self, intervals):
        if self.steps is not None:
            return self
        if isinstance(intervals, jax.core.Tracer):
            raise InputError(
                "the number of steps must be known when compiling: under jax.jit or a derivative "
                "in time give the method `steps`, the number of steps between saved times"
            )
        longest = float(np.max(np.asarray(intervals), initial=0.0))
        return type(self)(steps=max(1, int(np.ceil(longest / self.step * (1 - 1e-6)))))

    def advance(self, field, mu, interval):
        h = interval / self.steps
        tableau = jnp.asarray(self.a, h.dtype), jnp.asarray(self.b, h.dtype)

        @jax.checkpoint  # reverse mode keeps the tokens of every step, and nothing from inside it
        def step(x, _):
            def stage(carry, coefficients):
                k, total = carry
                a, b = coefficients
                k = _velocity(field, mu, x + a * h * k)
                return (k, total + b * k), None

            zero = jnp.zeros_like(x)
            (_, total), _ = lax.scan(stage, (zero, zero), tableau)
            return sphere.normalise(x + h * total), None

        return mu.move(lax.scan(step, mu.points, length=self.steps)[0])


class Euler(_FixedStep):
    """Order 1: x + h v, normalised.

    **Arguments:** `step`, the longest step allowed, or `steps`, the number of steps between saved
    times (needed where the times are traced).
    """

    a: ClassVar[tuple[float, ...]] = (0.0,)
    b: ClassVar[tuple[float, ...]] = (1.0,)
    order: ClassVar[int] = 1


class Midpoint(_FixedStep):
    """Order 2: the explicit midpoint rule, normalised. Arguments as for `Euler`."""

    a: ClassVar[tuple[float, ...]] = (0.0, 1 / 2)
    b: ClassVar[tuple[float, ...]] = (0.0, 1.0)
    order: ClassVar[int] = 2


class RK4(_FixedStep):
    """Order 4: the classical Runge–Kutta method, normalised. Arguments as for `Euler`."""

    a: ClassVar[tuple[float, ...]] = (0.0, 1 / 2, 1 / 2, 1.0)
    b: ClassVar[tuple[float, ...]] = (1 / 6, 1 / 3, 1 / 3, 1 / 6)
    order: ClassVar[int] = 4


class Adaptive(AbstractMethod):
    """Adaptive steps through diffrax, normalised at saved times.

    A solve that needs more than `max_steps` steps between two saved times, or meets values that
    are not finite, yields NaN from there on. For forward-mode derivatives pass
    `adjoint=diffrax.DirectAdjoint()` or `diffrax.ForwardMode()`.
    """

    rtol: float = eqx.field(static=True, default=1e-6)
    atol: float = eqx.field(static=True, default=1e-8)
    max_steps: int = eqx.field(static=True, default=4096)
    solver: diffrax.AbstractSolver = diffrax.Tsit5()
    adjoint: diffrax.AbstractAdjoint = diffrax.RecursiveCheckpointAdjoint()

    def __check_init__(self):
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not (np.isfinite(value) and value > 0):
                raise InputError(f"{name} is {value}; it must be finite and positive")

    def resolve(self, intervals):
        return self

    def advance(self, field, mu, interval):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, x, args: _velocity(field, mu, x)),
            self.solver,
            t0=jnp.zeros_like(interval),
            t1=interval,
            dt0=None,
            y0=mu.points,
            stepsize_controller=diffrax.PIDController(rtol=self.rtol, atol=self.atol),
            max_steps=self.max_steps,
            adjoint=self.adjoint,
            throw=False,
        )
        done = solution.result == diffrax.RESULTS.successful
        return mu.move(jnp.where(done, sphere.normalise(solution.ys[0]), jnp.nan))


def flow(
    field: AbstractField,
    mu: Measure,
    times: ArrayLike,
    method: AbstractMethod = RK4(),
    observe: Callable[[Measure], PyTree] | None = None,
) -> Measure | PyTree[Any]:
    """Carry μ along the field and save it at chosen times.

    **Arguments:**

    - `times`: one time t, to go from 0 to t; or increasing times, at the first of which the
      tokens are those of `mu`. In the field's own scaling of time.
    - `method`: `Euler`, `Midpoint`, `RK4` with their step, or `Adaptive` with its tolerances.
    - `observe`: what to keep of the measure at each time, so that the tokens need not be.

    **Returns:** for one time the measure then; for several a measure whose points have a leading
    time axis, or what `observe` returned, stacked along it.

    **Raises:** `InputError` for times that are not finite or do not increase.
    """
    dtype = mu.points.dtype
    if np.ndim(times) > 1:
        raise InputError(f"times have shape {np.shape(times)}; give one time or a sequence")
    # The number of steps is decided from the numbers as given, before they are rounded or traced.
    times = times if isinstance(times, jax.Array) else np.asarray(times, np.float64)
    intervals = times[None] if np.ndim(times) == 0 else times[1:] - times[:-1]
    _check_intervals(intervals)
    method = method.resolve(intervals)
    intervals = jnp.asarray(intervals, dtype)
    if np.ndim(times) == 0:
        mu = method.advance(field, mu, intervals[0])
        return mu if observe is None else observe(mu)

    keep = (lambda mu: mu.points) if observe is None else observe

    def save(points, interval):
        moved = method.advance(field, mu.move(points), interval)
        return moved.points, keep(moved)

    first = jax.tree.map(lambda a: jnp.asarray(a)[None], keep(mu))
    later = lax.scan(save, mu.points, intervals)[1]
    saved = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, later)
    return mu.move(saved) if observe is None else saved


def _velocity(field: AbstractField, mu: Measure, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """The field at the tokens themselves, extended to points near the sphere."""
    mu = mu.move(sphere.normalise(x))
    # Matrices of a higher precision than the tokens must not raise that of the tokens.
    return field(mu.points, mu, mu.labels).astype(x.dtype)


def _check_intervals(intervals: Any) -> None:
    if isinstance(intervals, jax.core.Tracer):
        return
    intervals = np.asarray(intervals)
    if not (np.all(np.isfinite(intervals)) and np.all(intervals >= 0)):
        raise InputError("times must be finite and increasing, and one time must be ≥ 0")
