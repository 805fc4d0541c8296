"""Intervals for W₂: both ends against exact optimal transport."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
from oracles import simplex, sphere_points

from jaxmf import InputError, Measure, Uniform, coupling
from jaxmf.tilt import Streamed
from jaxmf.transport import assignment, interval


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
    # 1e-6 in W₂² at W₂ ≈ 0.3.
    assert found.lower <= w + 2e-6 and w <= found.upper + 2e-6


def test_what_cannot_be_reached_is_flagged_and_still_true(rng):
    mu, nu = (Measure(sphere_points(rng, 40, 3)) for _ in range(2))
    hurried = interval(mu, nu, width=1e-9, seconds=1e-9)
    w = exact(mu, nu)
    assert not hurried.reached and hurried.lower <= w <= hurried.upper
    same = interval(mu, mu)
    # A plan at the smallest ε = 1e-4 still spreads each token by about √ε.
    assert not same.reached and same.lower < 1e-7 and same.upper < 0.02


def test_a_known_upper_end_is_used_and_kept(rng):
    x = sphere_points(rng, 60, 3)
    y = x + 0.01 * sphere_points(rng, 60, 3)
    mu, nu = Measure(x), Measure(y / np.linalg.norm(y, axis=1, keepdims=True))
    known = coupling(mu, nu)  # optimal here: every token's own image is by far its nearest
    found = interval(mu, nu, width=0.02, upper=known)
    assert found.upper == known and found.reached
    assert found.lower <= exact(mu, nu) <= found.upper + 1e-12


def test_refuses(rng):
    mu, nu = Measure(sphere_points(rng, 3, 3)), Measure(sphere_points(rng, 3, 4))
    with pytest.raises(InputError, match="dimensions 3 and 4"):
        interval(mu, nu)
    with pytest.raises(InputError, match=r"width is 0\.0; it must be finite and positive"):
        interval(mu, mu, width=0.0)
    with pytest.raises(InputError, match="seconds is nan"):
        interval(mu, mu, seconds=float("nan"))
