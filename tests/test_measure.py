"""Measures: what they hold, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import DTYPES, simplex, sphere_points

from jaxmf import InputError, Measure


@pytest.mark.parametrize("dtype", DTYPES)
def test_holds_points_weights_and_labels(rng, dtype):
    x, w = sphere_points(rng, 7, 3), simplex(rng, 7)
    labels = rng.integers(0, 5, (7, 2))
    mu = Measure(jnp.asarray(x, dtype), w, labels)
    assert (mu.size, mu.dimension) == (7, 3)
    assert mu.points.dtype == mu.weights.dtype == dtype
    np.testing.assert_array_equal(mu.weights, w.astype(dtype))
    np.testing.assert_array_equal(mu.labels, labels)
    np.testing.assert_array_equal(Measure(x).weights, np.full(7, 1 / 7))


def test_takes_lists_and_integers():
    mu = Measure([[1, 0], [0, -1]], [0.25, 0.75], [3, 4])
    assert mu.points.dtype == jnp.float64
    np.testing.assert_array_equal(mu.labels, [3, 4])


def test_pushforward_moves_points_and_nothing_else(rng):
    mu = Measure(sphere_points(rng, 7, 3), simplex(rng, 7), np.arange(7))
    nu = mu.pushforward(lambda x: -x)
    np.testing.assert_array_equal(nu.points, -mu.points)
    np.testing.assert_array_equal(nu.weights, mu.weights)
    np.testing.assert_array_equal(nu.labels, mu.labels)
    np.testing.assert_array_equal(nu.move(mu.points).points, mu.points)


def test_integrates_a_batch_against_shared_weights(rng):
    x, w = sphere_points(rng, 4, 2, 7, 3), simplex(rng, 7)
    mu = Measure(x, w)
    assert (mu.size, mu.dimension) == (7, 3)
    values = rng.normal(size=(4, 2, 7))
    np.testing.assert_allclose(mu.integrate(jnp.asarray(values)), values @ w, rtol=1e-14)


def test_is_a_pytree_whose_checks_stay_out_of_the_way_of_tracing(rng):
    x, w = sphere_points(rng, 7, 3), simplex(rng, 7)
    mean = jax.jit(lambda x, w: Measure(x, w).integrate(x[:, 0]))(x, w)
    np.testing.assert_allclose(mean, w @ x[:, 0], rtol=1e-14)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, Measure(x, w))
    np.testing.assert_array_equal(doubled.points, 2 * x)


NORTH = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": NORTH[0]}, r"points have shape \(2,\); they must be \(n, d\)"),
        ({"points": np.ones((3, 1))}, r"points have shape \(3, 1\).* dimension d ≥ 2"),
        ({"points": np.ones((0, 2))}, "needs at least one token; points is empty"),
        ({"points": NORTH * [[1], [np.nan], [1]]}, r"points\[1\] is not finite"),
        ({"points": NORTH * [[1], [1], [1.001]]}, r"points\[2\] has length 1.001; .*unit vector"),
        ({"points": np.stack([NORTH, 2 * NORTH])}, r"points\[1, 0\] has length 2"),
        ({"points": NORTH, "weights": np.ones(2) / 2}, r"weights have shape \(2,\).*be \(3,\)"),
        ({"points": NORTH, "weights": np.array([0.6, 0.6, -0.2])}, r"weights\[2\] is -0.2"),
        ({"points": NORTH, "weights": np.array([0.5, np.nan, 0.5])}, r"weights\[1\] is nan"),
        ({"points": NORTH, "weights": np.full(3, 0.3)}, "weights sum to 0.9; they must sum to one"),
        ({"points": NORTH, "labels": np.arange(2)}, r"labels have shape \(2,\).*the 3 tokens"),
        ({"points": NORTH, "labels": np.array(1)}, r"labels have shape \(\)"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        Measure(**arguments)
