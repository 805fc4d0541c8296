"""Wasserstein distances against linear programming, POT, SciPy and ott's own Sinkhorn."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
import scipy.optimize
from hypothesis import given
from oracles import DTYPES, call, eps, seeds, simplex, sphere_points
from ott.geometry import pointcloud
from ott.solvers import linear

from jaxmf import InputError, Measure, coupling, eigenspaces, wasserstein
from jaxmf.tilt import Dense, Streamed
from jaxmf.transport import assignment, sinkhorn, to_axis
from jaxmf.transport.axis import on_axis


def random_measure(rng, n, d=3):
    return Measure(sphere_points(rng, n, d), simplex(rng, n))


def axis_measure(rng, p, d=3, atoms=1):
    """p δ_e + (1 − p) δ_{−e} with each atom listed `atoms` times over."""
    e = sphere_points(rng, d)
    share = simplex(rng, atoms)
    points = np.concatenate([np.tile(e, (atoms, 1)), np.tile(-e, (atoms, 1))])
    return Measure(points, np.concatenate([p * share, (1 - p) * share]))


def pot(mu, nu) -> float:
    """W₂ by POT's network simplex."""
    cost = np.sum((np.asarray(mu.points)[:, None] - np.asarray(nu.points)) ** 2, axis=2)
    return float(np.sqrt(ot.emd2(np.asarray(mu.weights), np.asarray(nu.weights), cost)))


# To two antipodal points


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("d", [2, 3, 384])
def test_to_axis_is_optimal(rng, d, p):
    mu, nu = random_measure(rng, 40, d), axis_measure(rng, p, d, atoms=3)
    assert on_axis(nu)
    np.testing.assert_allclose(call(to_axis, mu, nu), pot(mu, nu), rtol=1e-12)


def test_to_axis_equals_the_linear_program(rng):
    mu, nu = random_measure(rng, 12), axis_measure(rng, 0.3)
    cost = np.sum((np.asarray(mu.points)[:, None] - np.asarray(nu.points)) ** 2, axis=2)
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
def test_assignment_is_optimal(rng, n):
    mu, nu = Measure(sphere_points(rng, n, 5)), Measure(sphere_points(rng, n, 5))
    cost = np.sum((np.asarray(mu.points)[:, None] - np.asarray(nu.points)) ** 2, axis=2)
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    value = assignment(mu, nu)
    np.testing.assert_allclose(value, np.sqrt(cost[rows, columns].mean()), rtol=1e-13)
    np.testing.assert_allclose(value, pot(mu, nu), rtol=1e-12)


def test_assignment_differentiates_with_the_assignment_held_fixed(rng):
    x, nu = sphere_points(rng, 7, 3), Measure(sphere_points(rng, 7, 3))
    v, h = jnp.asarray(rng.normal(size=(7, 3))), 1e-5

    @jax.jit
    def f(x):
        return assignment(Measure(x), nu)

    slope = (f(x + h * v) - f(x - h * v)) / (2 * h)
    np.testing.assert_allclose(jnp.vdot(jax.grad(f)(jnp.asarray(x)), v), slope, rtol=1e-8)
    assert not np.any(jax.grad(lambda x: assignment(Measure(x), nu))(nu.points))


# Sinkhorn


@pytest.mark.parametrize("tilt", [Dense(), Streamed((7, 5))], ids=["dense", "7x5"])
def test_sinkhorn_equals_the_dense_one_of_ott(rng, tilt):
    mu, nu, epsilon = random_measure(rng, 23), random_measure(rng, 17), 0.1
    ours = sinkhorn(mu, nu, epsilon, threshold=1e-9, max_iterations=5000, tilt=tilt)
    geometry = pointcloud.PointCloud(mu.points, nu.points, epsilon=epsilon)
    theirs = linear.solve(geometry, mu.weights, nu.weights, threshold=1e-9, max_iterations=5000)
    # Both stop at marginals that are right to 10⁻⁹.
    expected = np.sqrt(np.sum(theirs.matrix * geometry.cost_matrix))
    np.testing.assert_allclose(ours.value, expected, rtol=1e-8)
    # f + c and g − c are as good as f and g.
    potentials = np.add.outer(*ours.potentials)
    np.testing.assert_allclose(potentials, np.add.outer(theirs.f, theirs.g), atol=1e-7)
    assert ours.converged and ours.error < 1e-9 and ours.epsilon == epsilon
    assert ours.iterations == theirs.n_iters


def test_sinkhorn_comes_down_to_the_distance_as_epsilon_does(rng):
    mu, nu = random_measure(rng, 23), random_measure(rng, 17)
    exact = pot(mu, nu)
    solve = jax.jit(
        lambda epsilon: sinkhorn(mu, nu, epsilon, threshold=1e-6, max_iterations=50_000)
    )
    found = [solve(epsilon) for epsilon in (1.0, 0.1, 0.01, 0.002)]
    assert all(out.converged for out in found)
    values = np.array([out.value for out in found])
    assert np.all(np.diff(values) < 0) and values[0] > 1.5 * exact
    # The marginals are right to 10⁻⁶, the value therefore to 10⁻⁵.
    assert exact * (1 - 1e-5) <= values[-1] <= exact * 1.01


def test_sinkhorn_says_when_it_has_not_converged(rng):
    mu, nu = random_measure(rng, 23), random_measure(rng, 17)
    out = sinkhorn(mu, nu, 0.01, threshold=1e-9, max_iterations=20)
    assert not out.converged and out.error > 1e-9 and out.iterations <= 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinkhorn_survives_a_small_epsilon(rng, dtype):
    x, y = sphere_points(rng, 2, 20, 3)
    mu, nu = (Measure(jnp.asarray(z, dtype)) for z in (x, y))
    out = sinkhorn(mu, nu, 1e-3, threshold=1e-3, max_iterations=20_000)
    assert out.value.dtype == dtype
    np.testing.assert_allclose(out.value, assignment(mu, nu), rtol=0.01)


# One call


def test_wasserstein_is_exact_where_it_can_be_and_says_how(rng):
    mu = random_measure(rng, 23)
    nu = axis_measure(rng, 0.3)
    found = wasserstein(mu, nu)
    assert (found.method, found.epsilon) == ("axis", None)
    np.testing.assert_allclose(found.value, pot(mu, nu), rtol=1e-12)

    x, y = (Measure(sphere_points(rng, 23, 3)) for _ in range(2))
    found = wasserstein(x, y)
    assert (found.method, found.epsilon) == ("assignment", None)
    np.testing.assert_allclose(found.value, pot(x, y), rtol=1e-12)

    for other in (random_measure(rng, 23), Measure(sphere_points(rng, 17, 3))):
        found = wasserstein(mu, other, epsilon=0.02)
        assert (found.method, found.epsilon) == ("sinkhorn", 0.02)
        exact = pot(mu, other)
        # Up to the marginal error 10⁻³ of its iterations the value is above the distance.
        assert exact * (1 - 1e-3) <= found.value <= 1.2 * exact
    assert wasserstein(mu, other).epsilon == 0.01


@pytest.mark.parametrize("n", [2, 1025])
def test_wasserstein_leaves_large_problems_to_sinkhorn(rng, n):
    x, y = sphere_points(rng, n, 3), sphere_points(rng, n, 3)
    y = np.concatenate([y[1:], y[:1]])
    found = wasserstein(Measure(x), Measure(y), epsilon=0.5)
    assert found.method == ("sinkhorn" if n > 1024 else "assignment")


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
    traced = jax.jit(lambda mu, nu: wasserstein(mu, nu).value)(mu, nu)  # by assignment or Sinkhorn
    closed = jax.jit(lambda mu: wasserstein(mu, nu).value)(mu)
    np.testing.assert_allclose(closed, there.value, rtol=1e-14)
    assert traced >= there.value - 1e-12


def test_coupling_refuses_different_weights(rng):
    x = sphere_points(rng, 2, 3)
    with pytest.raises(InputError, match=r"weights differ by up to 0\.1"):
        coupling(Measure(x, [0.5, 0.5]), Measure(x, [0.4, 0.6]))
