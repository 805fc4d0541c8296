"""Wasserstein distances against linear programming, POT and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
import scipy.optimize
from hypothesis import given
from oracles import DTYPES, call, eps, seeds, simplex, sphere_points

from jaxmf import InputError, Measure, coupling, eigenspaces, wasserstein
from jaxmf.tilt import Streamed
from jaxmf.transport import Chordal, Geodesic, assignment, to_axis
from jaxmf.transport.axis import on_axis

COSTS = {"chordal": Chordal(), "geodesic": Geodesic()}
both = pytest.mark.parametrize("cost", COSTS)


def random_measure(rng, n, d=3):
    return Measure(sphere_points(rng, n, d), simplex(rng, n))


def axis_measure(rng, p, d=3, atoms=1):
    """p δ_e + (1 − p) δ_{−e} with each atom listed `atoms` times over."""
    e = sphere_points(rng, d)
    share = simplex(rng, atoms)
    points = np.concatenate([np.tile(e, (atoms, 1)), np.tile(-e, (atoms, 1))])
    return Measure(points, np.concatenate([p * share, (1 - p) * share]))


def costs(mu, nu, cost="chordal"):
    """All c(xᵢ, yⱼ), from differences."""
    chord = np.sqrt(np.sum((np.asarray(mu.points)[:, None] - np.asarray(nu.points)) ** 2, axis=2))
    return chord**2 if cost == "chordal" else (2 * np.arcsin(np.minimum(chord / 2, 1))) ** 2


def pot(mu, nu, cost="chordal") -> float:
    """W₂ by POT's network simplex."""
    weights = np.asarray(mu.weights), np.asarray(nu.weights)
    return float(np.sqrt(ot.emd2(*weights, costs(mu, nu, cost))))


# To two antipodal points


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("d", [2, 3, 384])
@both
def test_to_axis_is_optimal(rng, cost, d, p):
    mu, nu = random_measure(rng, 40, d), axis_measure(rng, p, d, atoms=3)
    assert on_axis(nu)
    value = call(to_axis, mu, nu, COSTS[cost])
    np.testing.assert_allclose(value, pot(mu, nu, cost), rtol=1e-12)


def test_to_axis_equals_the_linear_program(rng):
    mu, nu = random_measure(rng, 12), axis_measure(rng, 0.3)
    cost = costs(mu, nu)
    rows, columns = np.kron(np.eye(12), np.ones(2)), np.tile(np.eye(2), 12)
    program = scipy.optimize.linprog(
        cost.ravel(),
        A_eq=np.concatenate([rows, columns]),
        b_eq=np.concatenate([mu.weights, nu.weights]),
    )
    np.testing.assert_allclose(to_axis(mu, nu), np.sqrt(program.fun), rtol=1e-12)


@given(seeds)
def test_to_axis_splits_the_token_on_the_border_and_sees_no_other_splitting(seed):
    rng = np.random.default_rng(seed)
    mu, nu = random_measure(rng, 10), axis_measure(rng, rng.uniform(0.1, 0.9))
    i, order = rng.integers(10), rng.permutation(11)
    points = jnp.concatenate([mu.points, mu.points[i][None]])[order]
    weights = jnp.append(mu.weights, mu.weights[i] / 4).at[i].multiply(0.75)[order]
    value = call(to_axis, mu, nu)
    np.testing.assert_allclose(call(to_axis, Measure(points, weights), nu), value, rtol=1e-13)
    # Two tokens of which all mass above p goes down: in closed form.
    e, w, p = np.asarray(nu.points[0]), 0.6, float(nu.weights[0])
    high, low = 0.8 * e + 0.6 * np.cross(e, mu.points[0]), -e
    high /= np.linalg.norm(high)
    two = Measure(np.stack([high, low]), np.array([w, 1 - w]))
    up, down = np.sum((high - e) ** 2), np.sum((high + e) ** 2)
    square = min(p, w) * up + max(w - p, 0) * down + max(p - w, 0) * 4
    np.testing.assert_allclose(call(to_axis, two, nu), np.sqrt(square), rtol=1e-12)


def test_an_absent_token_costs_nothing(rng):
    mu, nu = random_measure(rng, 10), axis_measure(rng, 0.4)
    points = jnp.concatenate([mu.points, sphere_points(rng, 1, 3)])
    more = Measure(points, jnp.append(mu.weights, 0))
    np.testing.assert_allclose(to_axis(more, nu), to_axis(mu, nu), rtol=1e-14)


def test_to_axis_of_a_measure_at_its_target_is_zero_in_single_precision(rng):
    """Running sums of 10⁴ float32 weights are off by 1e-6, which would cost 2e-3 in W₂."""
    n = 10_000
    e = sphere_points(rng, 3)
    sign = np.where(rng.random(n) < 0.3, 1, -1)
    order = rng.permutation(n)
    points = jnp.asarray(sign[:, None] * e, jnp.float32)
    mu = Measure(points, simplex(rng, n))
    nu = Measure(points[order], mu.weights[order])
    value = call(to_axis, mu, nu)
    assert value.dtype == jnp.float32 and value < 1e-6


@pytest.mark.parametrize("angle", [1e-3, 1e-5])
def test_to_axis_keeps_its_digits_close_to_the_target(rng, angle):
    e = np.array([0.6, 0.8, 0.0])
    x = np.cos(angle) * e + np.sin(angle) * np.array([0, 0, 1.0])
    mu, nu = (Measure(jnp.asarray(y, jnp.float32)[None]) for y in (x, e))
    # 2 − 2⟨x, e⟩ would be 0 in float32 at an angle of 10⁻⁴ already.
    np.testing.assert_allclose(to_axis(mu, nu), 2 * np.sin(angle / 2), rtol=1e-3, atol=2e-8)


def test_to_axis_differentiates_in_points_and_weights(rng):
    mu, nu = random_measure(rng, 12), axis_measure(rng, 0.37)
    v, dw = jnp.asarray(rng.normal(size=(12, 3))), rng.normal(size=12)
    dw = jnp.asarray(dw - dw.mean())

    def f(points, weights):
        return to_axis(Measure(points, weights), nu)

    at = (mu.points, mu.weights)
    by_points, by_weights = jax.jit(jax.grad(f, argnums=(0, 1)))(*at)
    f, h = jax.jit(f), 1e-6
    slope = (f(at[0] + h * v, at[1]) - f(at[0] - h * v, at[1])) / (2 * h)
    np.testing.assert_allclose(jnp.vdot(by_points, v), slope, rtol=1e-8)
    slope = (f(at[0], at[1] + h * dw) - f(at[0], at[1] - h * dw)) / (2 * h)
    np.testing.assert_allclose(jnp.vdot(by_weights, dw), slope, rtol=1e-8)


def test_derivatives_at_distance_zero_are_zero(rng):
    nu = axis_measure(rng, 0.37)
    for distance in (to_axis, coupling):
        gradient = jax.grad(lambda x, f=distance: f(nu.move(x), nu))(nu.points)
        np.testing.assert_array_equal(gradient, 0)


def test_takes_batches_of_measures(rng):
    mu, nu = Measure(sphere_points(rng, 4, 2, 12, 3), simplex(rng, 12)), axis_measure(rng, 0.37)
    image = mu.pushforward(lambda x: x[..., ::-1])
    distances, couplings = to_axis(mu, nu), coupling(mu, image)
    assert distances.shape == couplings.shape == (4, 2)
    for i in np.ndindex(4, 2):
        one = mu.move(mu.points[i])
        np.testing.assert_allclose(distances[i], to_axis(one, nu), rtol=1e-14)
        np.testing.assert_allclose(couplings[i], coupling(one, one.move(image.points[i])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_axis_tells_two_antipodal_points_from_anything_else(rng, dtype):
    e = sphere_points(rng, 3)
    nu = Measure(jnp.asarray(np.stack([e, -e, e]), dtype))
    assert on_axis(nu) and on_axis(nu.move(nu.points[:1]))
    tilted = e + 1e4 * eps(dtype) * np.cross(e, sphere_points(rng, 3))
    assert not on_axis(Measure(jnp.asarray(np.stack([e, tilted]), dtype)))


# Coupling and assignment


@given(seeds)
def test_coupling_is_an_upper_bound(seed):
    rng = np.random.default_rng(seed)
    mu = random_measure(rng, 12)
    nu = eigenspaces(np.diag([2.0, 2.0, 1.0])).project(mu)
    value = coupling(mu, nu)
    square = np.sum(mu.weights * np.sum((mu.points - nu.points) ** 2, axis=1))
    np.testing.assert_allclose(value, np.sqrt(square), rtol=1e-14)
    assert value >= pot(mu, nu) * (1 - 1e-12)
    # To a single point there is only one plan.
    point = mu.move(jnp.tile(sphere_points(rng, 3), (12, 1)))
    np.testing.assert_allclose(coupling(mu, point), call(to_axis, mu, point), rtol=1e-12)


@pytest.mark.parametrize("n", [1, 7, 60])
@both
def test_assignment_is_optimal(rng, cost, n):
    mu, nu = Measure(sphere_points(rng, n, 5)), Measure(sphere_points(rng, n, 5))
    value = assignment(mu, nu, COSTS[cost])
    np.testing.assert_allclose(value, pot(mu, nu, cost), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(assignment)(mu, nu, COSTS[cost]), value, rtol=1e-14)


def test_assignment_differentiates_with_the_assignment_held_fixed(rng):
    x, nu = sphere_points(rng, 7, 3), Measure(sphere_points(rng, 7, 3))
    v, h = jnp.asarray(rng.normal(size=(7, 3))), 1e-5

    @jax.jit
    def f(x):
        return assignment(Measure(x), nu)

    slope = (f(x + h * v) - f(x - h * v)) / (2 * h)
    np.testing.assert_allclose(jnp.vdot(jax.grad(f)(jnp.asarray(x)), v), slope, rtol=1e-8)
    assert not np.any(jax.grad(lambda x: assignment(Measure(x), nu))(nu.points))


# One call


@both
def test_wasserstein_is_exact_where_it_can_be_and_says_how(rng, cost):
    mu, nu = random_measure(rng, 23), axis_measure(rng, 0.3)
    x, y = (Measure(sphere_points(rng, 23, 3)) for _ in range(2))
    for source, target, method in ((mu, nu, "axis"), (nu, mu, "axis"), (x, y, "assignment")):
        found = wasserstein(source, target, cost=cost)
        assert found.method == method and found.reached
        assert found.lower == found.value == found.upper
        np.testing.assert_allclose(found.value, pot(source, target, cost), rtol=1e-12)


@both
def test_wasserstein_is_an_interval_elsewhere(rng, cost):
    mu = random_measure(rng, 23)
    for other in (random_measure(rng, 23), Measure(sphere_points(rng, 17, 3))):
        for source, target in ((mu, other), (other, mu)):
            found = wasserstein(source, target, cost=cost, width=0.05)
            exact = pot(source, target, cost)
            assert found.method == "interval" and found.reached
            assert found.lower - 1e-10 <= exact <= found.upper + 1e-10
            assert found.lower <= found.value <= found.upper
            assert found.upper - found.lower <= 0.05 * found.upper


@pytest.mark.parametrize("n", [2, 2049])
def test_wasserstein_leaves_large_assignments_to_the_interval(rng, n):
    x, y = sphere_points(rng, n, 3), sphere_points(rng, n, 3)
    y = np.concatenate([y[1:], y[:1]])
    found = wasserstein(Measure(x), Measure(y), width=0.9)
    assert found.method == ("interval" if n > 2048 else "assignment")


def test_a_method_can_be_asked_for(rng):
    mu, nu = (Measure(sphere_points(rng, 20, 3)) for _ in range(2))
    exact = wasserstein(mu, nu).value
    forced = wasserstein(mu, nu, method="interval", width=0.05)
    assert forced.method == "interval" and forced.lower <= exact <= forced.upper
    assert wasserstein(mu, nu, method="assignment").method == "assignment"
    with pytest.raises(InputError, match="method is axis, but neither"):
        wasserstein(mu, nu, method="axis")
    with pytest.raises(InputError, match="equally many tokens of equal weight"):
        wasserstein(mu, random_measure(rng, 20), method="assignment")


@pytest.mark.parametrize("method", ["axis", "assignment", "interval"])
@both
def test_a_batch_is_each_of_its_measures(rng, cost, method):
    x, y = sphere_points(rng, 2, 3, 9, 3), sphere_points(rng, 9, 3)
    if method == "axis":
        y = np.sign(y @ y[0])[:, None] * y[0]
    mu, nu = Measure(x), Measure(y)
    settings = {"cost": cost, "method": method, "width": 0.05}
    for pair in ((mu, nu), (nu, mu)):
        whole = wasserstein(*pair, **settings)
        assert whole.value.shape == whole.lower.shape == whole.reached.shape == (2, 3)
        for i in np.ndindex(2, 3):
            exact = pot(Measure(x[i], mu.weights), nu, cost)
            tolerance = {"rtol": 0.03} if method == "interval" else {"rtol": 1e-12}
            np.testing.assert_allclose(whole.value[i], exact, **tolerance)
            assert whole.lower[i] - 1e-10 <= exact <= whole.upper[i] + 1e-10
    # Batches on both sides go pair by pair.
    image = Measure(np.broadcast_to(y, x.shape)[:, ::-1])
    np.testing.assert_allclose(
        wasserstein(mu, image, **settings).value,
        wasserstein(mu, nu, **settings).value,
        rtol=0.03 if method == "interval" else 1e-12,
    )


@both
def test_derivatives_of_an_interval_are_those_of_the_optimal_plan(rng, cost):
    """POT's plan and potentials say what the derivatives of W₂² are."""
    n, m = 12, 9
    x, y, a, b = (
        sphere_points(rng, n, 3),
        sphere_points(rng, m, 3),
        simplex(rng, n),
        simplex(rng, m),
    )

    def square(x, y, a, b):
        distance = wasserstein(Measure(x, a), Measure(y, b), cost=cost, width=1e-3, seconds=20.0)
        assert distance.method == "interval"
        return distance.value**2

    def difference(i, direction, h=1e-5):
        def exact(h):
            at = [x, y, a, b]
            at[i] = at[i] + h * direction
            if i < 2:
                at[i] = at[i] / np.linalg.norm(at[i], axis=1, keepdims=True)
            return pot(Measure(at[0], at[2]), Measure(at[1], at[3]), cost) ** 2

        return (exact(h) - exact(-h)) / (2 * h)

    gradients = jax.grad(square, argnums=(0, 1, 2, 3))(*map(jnp.asarray, (x, y, a, b)))
    for i, (at, gradient) in enumerate(zip((x, y, a, b), gradients, strict=True)):
        v = rng.normal(size=at.shape)
        v = v - np.sum(v * at, axis=1, keepdims=True) * at if i < 2 else v - v.mean()
        # The plan is that of some ε ≈ 5e-4: its potentials are off by ε log n ≈ 1e-3.
        np.testing.assert_allclose(
            np.vdot(gradient, v), difference(i, v), rtol=0.01, atol=3e-3 * len(v) ** 0.5
        )
    # One argument at a time gives the same.
    for i in range(4):
        alone = jax.grad(square, argnums=i)(*map(jnp.asarray, (x, y, a, b)))
        np.testing.assert_allclose(alone, gradients[i], rtol=1e-12, atol=1e-15)
    tangent = jnp.asarray(rng.normal(size=x.shape))
    forward = jax.jvp(lambda x: square(x, y, a, b), (jnp.asarray(x),), (tangent,))[1]
    np.testing.assert_allclose(forward, np.vdot(gradients[0], tangent), rtol=1e-10)


def test_intervals_under_jit_and_vmap(rng):
    mu, nu = random_measure(rng, 14), random_measure(rng, 11)
    exact = pot(mu, nu)
    found = jax.jit(lambda mu, nu: wasserstein(mu, nu, width=0.05))(mu, nu)
    assert found.method == "interval" and found.reached
    assert found.lower - 1e-10 <= exact <= found.upper + 1e-10
    x = sphere_points(rng, 2, 14, 3)
    values = jax.vmap(lambda x: wasserstein(mu.move(x), nu, width=0.05).value)(jnp.asarray(x))
    for i in range(2):
        np.testing.assert_allclose(values[i], pot(Measure(x[i], mu.weights), nu), rtol=0.03)
    slope = jax.jit(jax.grad(lambda x: wasserstein(mu.move(x), nu, width=1e-3).value))(mu.points)
    eager = jax.grad(lambda x: wasserstein(mu.move(x), nu, width=1e-3).value)(mu.points)
    np.testing.assert_allclose(slope, eager, rtol=0.02, atol=2e-3)


def test_tiles_do_not_change_an_interval(rng):
    mu, nu = random_measure(rng, 40), random_measure(rng, 30)
    tiled, dense = (wasserstein(mu, nu, tilt=t) for t in (Streamed((16, 8)), Streamed((64, 64))))
    np.testing.assert_allclose(tiled.lower, dense.lower, rtol=1e-4)


def test_wasserstein_is_a_distance(rng):
    x, y, z = (Measure(sphere_points(rng, 12, 3)) for _ in range(3))
    xy, yz, xz = wasserstein(x, y).value, wasserstein(y, z).value, wasserstein(x, z).value
    assert xz <= xy + yz
    np.testing.assert_allclose(wasserstein(y, x).value, xy, rtol=1e-13)
    assert wasserstein(x, x).value == 0


# What is refused


def test_refuses_measures_that_do_not_fit(rng):
    mu = random_measure(rng, 5)
    with pytest.raises(InputError, match="measures have dimensions 3 and 2; they must agree"):
        wasserstein(mu, random_measure(rng, 5, 2))
    with pytest.raises(InputError, match=r"width is 0\.0; it must be finite and positive"):
        wasserstein(mu, mu, width=0.0)
    with pytest.raises(InputError, match="seconds is nan"):
        wasserstein(mu, mu, seconds=float("nan"))
    with pytest.raises(InputError, match=r"nu\.points\[2, 0\] is not finite"):
        wasserstein(mu, mu.move(mu.points.at[2, 0].set(jnp.nan)))
    with pytest.raises(InputError, match="cost is 'euclidean'; it must be one of: chordal, geod"):
        wasserstein.__wrapped__(mu, mu, cost="euclidean")
    for other in (random_measure(rng, 6), random_measure(rng, 5, 2)):
        with pytest.raises(
            InputError, match=r"shapes \(5, 3\) and .*the same tokens on both sides"
        ):
            coupling(mu, other)


def test_wasserstein_sees_an_axis_on_either_side_and_needs_none_under_jit(rng):
    mu = Measure(sphere_points(rng, 30, 3))
    e = jnp.asarray(sphere_points(rng, 1, 3)[0])
    nu = mu.move(jnp.sign(mu.points @ e)[:, None] * e)
    there, back = wasserstein(mu, nu), wasserstein(nu, mu)
    assert (there.method, back.method) == ("axis", "axis")
    assert float(there.value) == float(back.value)
    traced = jax.jit(lambda mu, nu: wasserstein(mu, nu).value)(mu, nu)
    closed = jax.jit(lambda mu: wasserstein(mu, nu).value)(mu)
    np.testing.assert_allclose(closed, there.value, rtol=1e-14)
    np.testing.assert_allclose(traced, there.value, rtol=0.02)


def test_coupling_refuses_different_weights(rng):
    x = sphere_points(rng, 2, 3)
    with pytest.raises(InputError, match=r"weights differ by up to 0\.1"):
        coupling(Measure(x, [0.5, 0.5]), Measure(x, [0.4, 0.6]))
