"""Intervals for W₂: both ends against exact optimal transport."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
from oracles import DTYPES, rotation, simplex, sphere_points

from jaxmf import Measure, Uniform, coupling
from jaxmf.tilt import Automatic, Streamed
from jaxmf.transport import Chordal, Geodesic, assignment
from jaxmf.transport.certified import Clock, Problem, _finish, _round, interval


def exact(mu, nu):
    """W₂ by POT's network simplex."""
    cost = ot.dist(np.asarray(mu.points, np.float64), np.asarray(nu.points, np.float64))
    a, b = (np.asarray(m.weights, np.float64) for m in (mu, nu))
    return np.sqrt(ot.emd2(a / a.sum(), b / b.sum(), cost))


@pytest.mark.parametrize(("n", "m", "d"), [(40, 60, 3), (30, 30, 2), (50, 20, 5), (1, 30, 3)])
def test_holds_the_exact_distance_for_weighted_measures(rng, n, m, d):
    mu = Measure(sphere_points(rng, n, d), simplex(rng, n))
    nu = Measure(sphere_points(rng, m, d), simplex(rng, m))
    found = interval(mu, nu, width=0.05, tilt=Streamed((16, 16)))
    w = exact(mu, nu)
    # The ends are certified to rounding, 1e-12 in W₂².
    assert found.lower <= w + 1e-10 and w - 1e-10 <= found.upper
    assert found.reached and found.upper - found.lower <= 0.05 * found.upper
    # A bound that held by being useless would not be this close.
    assert found.lower >= 0.95 * w and found.upper <= 1.05 * w


def test_the_hard_case_of_independent_samples():
    # 1,024 pairs on S²: W₂ is 0.11 where the diameter is 2.
    mu, nu = (Uniform(3).sample(jax.random.key(seed), 1024) for seed in (0, 1))
    w = assignment(mu, nu)
    found = interval(mu, nu, width=0.05)
    assert found.reached and found.lower <= w <= found.upper
    assert found.lower >= 0.995 * w and found.upper <= 1.05 * w


def test_the_witness_proves_the_lower_end(rng):
    mu, nu = (Measure(sphere_points(rng, 50, 3), simplex(rng, 50)) for _ in range(2))
    found = interval(mu, nu)
    cost = ot.dist(np.asarray(mu.points), np.asarray(nu.points))
    f = np.min(cost - found.potential, axis=1)
    g = np.min(cost - f[:, None], axis=0)
    assert found.lower == pytest.approx(np.sqrt(mu.weights @ f + nu.weights @ g), abs=1e-9)


def test_tokens_of_weight_zero_are_absent(rng):
    x, y = sphere_points(rng, 2, 30, 3)
    w = np.append(simplex(rng, 25), np.zeros(5))
    mu, nu = Measure(x, w), Measure(y, w[::-1])
    found = interval(mu, nu)
    clean = interval(Measure(x[:25], w[:25]), Measure(y[5:], w[::-1][5:]))
    assert float(found.lower) == pytest.approx(float(clean.lower), rel=1e-5)
    assert float(found.upper) == pytest.approx(float(clean.upper), rel=1e-5)


def test_single_precision(rng):
    x, y = (jnp.asarray(p, jnp.float32) for p in sphere_points(rng, 2, 100, 3))
    found = interval(Measure(x), Measure(y))
    assert found.lower.dtype == found.upper.dtype == jnp.float32
    w = exact(Measure(x), Measure(y))
    # The ends are computed in float64; float32 tokens are off the sphere by 6e-8.
    assert found.lower <= w + 2e-7 and w <= found.upper + 2e-7


def test_what_cannot_be_reached_is_flagged_and_still_true(rng):
    mu, nu = (Measure(sphere_points(rng, 40, 3), simplex(rng, 40)) for _ in range(2))
    w = exact(mu, nu)
    for seconds in (1e-9, 0.5):
        hurried = interval(mu, nu, width=1e-9, seconds=seconds)
        assert not hurried.reached and hurried.lower <= w <= hurried.upper
        assert hurried.lower > 0 and hurried.upper < 2
    # The same tokens in another order: a plan at the smallest ε still spreads them by about √ε.
    same = interval(mu, mu.move(mu.points[::-1]).reweight(mu.weights[::-1]))
    assert not same.reached and same.lower < 1e-7 and same.upper < 0.02


def test_the_coupling_is_an_upper_end_where_tokens_correspond(rng):
    x = sphere_points(rng, 60, 3)
    y = x + 0.01 * sphere_points(rng, 60, 3)
    mu, nu = Measure(x), Measure(y / np.linalg.norm(y, axis=1, keepdims=True))
    found = interval(mu, nu)
    # It is optimal here, every token's own image being by far its nearest.
    assert float(found.upper) == pytest.approx(float(coupling(mu, nu)), rel=1e-12)
    assert found.reached and found.lower <= exact(mu, nu) <= found.upper + 1e-12
    assert interval(mu, mu).upper == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plane", [False, True])
def test_measures_that_differ_by_rounding_are_seen_to_be_the_same(rng, plane, dtype):
    points = sphere_points(rng, 50, 2 if plane else 4)
    if plane:
        points = points @ rotation(rng, 4)[:2]
    turn = rotation(rng, 4)
    w = jnp.asarray(simplex(rng, 50), dtype)
    mu = Measure(jnp.asarray(points, dtype), w)
    nu = Measure(jnp.asarray(points @ turn @ turn.T, dtype), w)
    found = interval(mu, nu)
    # Iterations would not bring two ends of rounding within 2 % of each other.
    assert found.reached and found.lower <= found.upper < (1e-7, 1e-5)[dtype == jnp.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "k"), [(4, 2), (64, 2), (5, 3)])
def test_a_problem_that_lives_in_a_subspace(rng, d, k, dtype):
    basis = rotation(rng, d)[:, :k]
    x, y = sphere_points(rng, 50, d), sphere_points(rng, 40, k) @ basis.T
    mu, nu = (
        Measure(jnp.asarray(p, dtype), jnp.asarray(simplex(rng, len(p)), dtype)) for p in (x, y)
    )
    w = exact(mu, nu)
    for found in (interval(mu, nu), interval(nu, mu)):
        assert found.reached and found.lower <= w + 1e-6 and w <= found.upper + 1e-6


def test_a_start_close_by_saves_work_and_costs_no_truth(rng):
    mu, nu = (Measure(sphere_points(rng, 300, 3), simplex(rng, 300)) for _ in range(2))
    first = interval(mu, nu, width=0.05)
    again = interval(mu, nu, width=0.05, start=first)
    w = exact(mu, nu)
    assert again.reached and again.lower <= w <= again.upper


def explicit(problem, potential, epsilon):
    """The plan of g, scaled down to its marginals, as a matrix."""
    x, y, a, b, g = (np.asarray(v) for v in (problem.x, problem.y, problem.a, problem.b, potential))
    cost = ot.dist(x, y)
    kernel = b * np.exp((g - cost) / epsilon)
    plan = a[:, None] * kernel / kernel.sum(1, keepdims=True)
    return plan * np.minimum(1, b / plan.sum(0)), cost


@pytest.mark.parametrize("epsilon", [0.3, 0.02])
def test_what_a_rounded_plan_moves_and_what_it_lacks(rng, epsilon):
    x, y, a, b = (
        sphere_points(rng, 9, 3),
        sphere_points(rng, 7, 3),
        simplex(rng, 9),
        simplex(rng, 7),
    )
    nothing = jnp.zeros(())
    problem = Problem(*map(jnp.asarray, (x, y, a, b)), nothing, Chordal(), Automatic())
    potential, epsilon = jnp.asarray(rng.normal(size=7) / 10), jnp.asarray(epsilon)
    plan, cost = explicit(problem, potential, epsilon)
    moved = _round(problem, potential, epsilon)
    np.testing.assert_allclose(moved[0], np.sum(plan * cost), rtol=1e-12)
    np.testing.assert_allclose(moved[1], a - plan.sum(1), atol=1e-14)
    np.testing.assert_allclose(moved[2], b - plan.sum(0), atol=1e-14)
    # What is lacking goes by the product plan where time is up, and no dearer where it is not.
    late = _finish(problem, moved, epsilon, Clock(0.0))
    rest = np.outer(a - plan.sum(1), b - plan.sum(0)) / (1 - plan.sum())
    np.testing.assert_allclose(late**2, np.sum((plan + rest) * cost), rtol=1e-12)
    w2 = exact(Measure(x, a), Measure(y, b)) ** 2
    least = np.sum(plan * cost) + (1 - plan.sum()) * cost.min()
    for clock in (Clock(None), Clock(np.inf)):
        found = _finish(problem, moved, epsilon, clock)
        assert max(w2, least) <= found**2 <= late**2


def test_ends_known_at_once_hold_for_either_cost(rng):
    """Far apart, where the angle exceeds the chord, and with no time for a single iteration."""
    x, y = np.array([0.6, 0, 0.8]), np.array([-0.6, 0.1, -0.75])
    y = y / np.linalg.norm(y)
    mu, nu = (Measure(np.tile(p, (4, 1)), simplex(rng, 4)) for p in (x, y))
    chord = np.linalg.norm(x - y)
    for cost, w in ((Chordal(), chord), (Geodesic(), 2 * np.arcsin(chord / 2))):
        found = interval(mu, nu, cost, seconds=1e-9)
        assert found.lower <= w + 1e-12 and w <= found.upper + 1e-12
    np.testing.assert_allclose(interval(mu, nu, seconds=1e-9).upper, chord, rtol=1e-12)
