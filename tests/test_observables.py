import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from oracles import rotation, seeds, simplex, sphere_points

from jaxmf import InputError, Measure, window
from jaxmf.observables import (
    conditional_variance,
    cosine_histogram,
    count_clusters,
    effective_rank,
    resultant_length,
)


def test_resultant_length_of_two_weighted_points():
    # |p e₁ + (1 − p) e₂|² = p² + (1 − p)², also along a batch axis.
    points = np.stack([np.eye(3)[:2], np.eye(3)[[0, 0]]])
    mu = Measure(points, [0.3, 0.7])
    np.testing.assert_allclose(resultant_length(mu), [np.sqrt(0.3**2 + 0.7**2), 1], rtol=1e-15)


def test_effective_rank_counts_directions(rng):
    """k orthogonal directions in equal parts give k; in parts p, Π p^{−p}."""
    q = rotation(rng, 5)
    for k in (1, 2, 5):
        mu = Measure(np.concatenate([q[:k], -q[:k]]))  # a direction has no sign
        np.testing.assert_allclose(effective_rank(mu), k, rtol=1e-12)
    p = simplex(rng, 5)
    np.testing.assert_allclose(effective_rank(Measure(q, p)), np.prod(p**-p), rtol=1e-12)
    batch = Measure(np.stack([q, q[[0] * 5]]), p)
    np.testing.assert_allclose(effective_rank(batch), [np.prod(p**-p), 1], rtol=1e-12)


def test_effective_rank_has_a_derivative_at_collapse():
    slope = jax.grad(lambda x: effective_rank(Measure(x)))(jnp.asarray(np.eye(3)[[0] * 4]))
    assert np.all(np.isfinite(slope))


def test_conditional_variance_is_the_variance_left_when_labels_are_known(rng):
    x, w, labels = sphere_points(rng, 3, 40, 3), simplex(rng, 40), rng.integers(0, 5, 40)
    expected = np.zeros(3)
    for label in range(5):
        here = labels == label
        mean = np.einsum("n,tnd->td", w[here], x[:, here]) / w[here].sum()
        expected += w[here].sum() * (1 - np.sum(mean**2, axis=1))
    for named in (labels, np.stack([labels, -labels], 1) / 7):  # labels may be any array
        found = jax.jit(conditional_variance)(Measure(x, w, named))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(
        conditional_variance(Measure(x, w)), 1 - resultant_length(Measure(x, w)) ** 2, rtol=1e-12
    )
    same = x[0][labels]
    assert conditional_variance(Measure(same, w, labels)) < 1e-30


def test_clusters_are_counted_with_and_without_sign(rng):
    e = np.eye(3)
    points = np.concatenate([e[[0]] * 5, -e[[0]] * 3, e[[1]]])
    points += 1e-3 * rng.normal(size=points.shape)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    assert count_clusters(points) == 3
    assert count_clusters(points, up_to_sign=True) == 2
    assert count_clusters(points, reach=1.5) == 1  # e₂ is √2 from both ±e₁


def test_cosine_histogram_counts_pairs_of_different_tokens_with_their_weights():
    # Cosines: e₁·e₂ = 0, e₁·(−e₁) = −1, e₂·(−e₁) = 0.
    mu = Measure(np.array([[1.0, 0], [0, 1], [-1, 0]]), [0.5, 0.3, 0.2])
    edges = jnp.array([-1, -0.5, 0.5, 1.0])
    opposite, orthogonal = 2 * 0.5 * 0.2, 2 * 0.3 * (0.5 + 0.2)
    total = opposite + orthogonal
    expected = [opposite / total, orthogonal / total, 0]
    np.testing.assert_allclose(cosine_histogram(mu, edges), expected, rtol=1e-14)


def test_cosines_of_coincident_tokens_fall_into_the_last_bin():
    x = np.full((5, 7), 7**-0.5)  # its square rounds to a little more than one
    histogram = cosine_histogram(Measure(x), jnp.linspace(-1, 1, 11))
    np.testing.assert_allclose(histogram, np.eye(10)[-1], rtol=1e-14)


# The window of a curve


@given(seeds)
def test_window_is_the_first_crossing_down_and_the_next_crossing_up(seed):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.uniform(0.1, 1, 12))
    values = rng.uniform(0, 2, (40, 12))
    for curve, entry, exit in zip(values, *window(times, values, 0.6), strict=True):
        expected = [np.nan, np.nan]
        for i in range(12):
            if np.isnan(expected[0]) and curve[i] <= 0.6:
                expected[0] = times[0]
                if i > 0:
                    expected[0] = np.interp(-0.6, -curve[i - 1 : i + 1], times[i - 1 : i + 1])
            elif not np.isnan(expected[0]) and np.isnan(expected[1]) and curve[i] > 0.6:
                expected[1] = np.interp(0.6, curve[i - 1 : i + 1], times[i - 1 : i + 1])
        np.testing.assert_allclose([entry, exit], expected, rtol=1e-13)


def test_window_of_curves_that_start_inside_never_enter_or_never_leave():
    times = np.array([1.0, 2, 3])
    curves = np.array([[0.0, 1, 2], [2, 2, 2], [2, 1, 0], [0, 0, 0], [1, 2, 0], [np.nan, 2, 0]])
    entry, exit = window(times, curves, 1.0)
    np.testing.assert_array_equal(entry, [1, np.nan, 2, 1, 1, 2.5])
    np.testing.assert_array_equal(exit, [2, np.nan, np.nan, np.nan, 1, np.nan])
    # One tolerance for each curve, or several for one.
    np.testing.assert_array_equal(window(times, curves[:2], np.array([0.5, 2]))[0], [1, 1])
    np.testing.assert_array_equal(window(times, curves[2], np.array([0.5, 1.5]))[0], [2.5, 1.5])
    assert np.shape(window([0, 1], [2, 0], 1)[0]) == () and window([0, 1], [2, 0], 1)[0] == 0.5


def bound(beta, t):
    return np.exp(0.5) * beta**-0.5 * jnp.exp(0.4 * t) + jnp.exp(-0.7 * t)


def test_window_moves_with_beta_by_the_implicit_function_theorem():
    """d exit/dβ = −(∂W/∂β)/(∂W/∂t), to first order in the distance of the times."""
    tolerance, errors = 0.5, []
    for count in (41, 2001):
        times = jnp.linspace(0, 8, count)

        def ends(beta, times=times):
            return jnp.stack(window(times, bound(beta, times), tolerance))

        t, slope = jax.jit(lambda beta, ends=ends: jax.jvp(ends, (beta,), (1.0,)))(200.0)
        by_beta, by_time = (jax.vmap(jax.grad(bound, i), (None, 0))(200.0, t) for i in (0, 1))
        np.testing.assert_allclose(slope, jax.jacrev(ends)(200.0), rtol=1e-10)
        np.testing.assert_allclose(bound(200.0, t), tolerance, atol=0.3 * (8 / count) ** 2)
        errors.append(np.abs(slope / (-by_beta / by_time) - 1))
    assert np.all(errors[-1] < 1e-2)
    assert np.all(np.max(errors[0]) > 10 * errors[-1])


def test_window_has_finite_derivatives_beside_what_is_not_seen():
    times = jnp.arange(3.0)
    curves = jnp.array([[0.0, 1, 2], [2, 2, 2], [2, 0, 0], [2, 0, 2]])

    def total(values, tolerance):
        entry, exit = jax.vmap(lambda v: window(times, v, tolerance))(values)
        return jnp.nansum(entry) + jnp.nansum(exit)

    by_values, by_tolerance = jax.jit(jax.grad(total, (0, 1)))(curves, 1.5)
    assert np.all(np.isfinite(by_values))
    np.testing.assert_allclose(by_values[0], [0, -0.5, -0.5])  # exit (1.5 − 1)/(2 − 1) after 1
    np.testing.assert_array_equal(by_values[1], 0)
    np.testing.assert_allclose(by_values[2], [0.375, 0.125, 0])
    # Slopes −1/2 of the entries, and 1 and 1/2 of the exits.
    np.testing.assert_allclose(by_tolerance, -0.5 - 0.5 + 1 + 0.5)


def test_window_says_what_is_wrong_with_its_times():
    with pytest.raises(InputError, match=r"shapes \(3,\) and \(4, 2\); the last axis of values"):
        window(np.arange(3), np.ones((4, 2)), 1.0)
    with pytest.raises(InputError, match=r"times\[2\] is not later than the time before it"):
        window([0.0, 1, 1], np.ones(3), 1.0)
