"""The exponential tilt: every way of summing against closed forms, mpmath and the symmetries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from oracles import (
    DTYPES,
    MEAN_RESULTANT,
    call,
    eps,
    log_uniform_mass,
    rotation,
    seeds,
    simplex,
    sphere_points,
    tilt_truth,
    uniform_rule,
    zonal_rule,
)

from jaxmf import InputError, Measure
from jaxmf.tilt import Automatic, Dense, Streamed

# Tiles that divide nothing, a tile of one token, a choice that must stream.
WAYS = {
    "dense": Dense(),
    "7x5": Streamed((7, 5)),
    "64x1": Streamed((64, 1)),
    "automatic": Automatic(largest_dense=1),
}
ways = pytest.mark.parametrize("tilt", WAYS.values(), ids=WAYS)
streams = pytest.mark.parametrize("tilt", [Streamed((7, 5)), Streamed((2, 64))], ids=str)


def logit_error(dtype, u):
    """A logit ⟨u, y⟩ is right to a few roundings of |u|, and log F and m inherit its error."""
    return 16 * eps(dtype) * (1 + np.linalg.norm(np.asarray(u, np.float64), axis=-1).max())


def check_against_truth(tilt, u, mu):
    log_mass, mean = call(tilt, u, mu)
    assert log_mass.dtype == mean.dtype == mu.points.dtype
    true_log_mass, true_mean = tilt_truth(np.asarray(u), np.asarray(mu.points), mu.weights)
    tolerance = logit_error(u.dtype, u)
    np.testing.assert_allclose(log_mass, true_log_mass, atol=tolerance)
    np.testing.assert_allclose(mean, true_mean, atol=tolerance)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 384])
def test_equals_the_sum_in_fifty_digits(rng, tilt, dtype, d):
    mu = Measure(jnp.asarray(sphere_points(rng, 23, d), dtype), simplex(rng, 23))
    for scale in (0.0, 1.0, 30.0, 1e3):
        check_against_truth(tilt, jnp.asarray(scale * sphere_points(rng, 9, d), dtype), mu)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [2e3, 1e6])
def test_survives_large_beta_with_no_token_near_the_query(rng, tilt, dtype, beta):
    # Every token lies far from u/|u|, so that each e^{⟨u,y⟩ − |u|} underflows: only the running
    # maximum is a safe shift.
    x = sphere_points(rng, 23, 3) * 0.3 - np.array([1.0, 0, 0])
    mu = Measure(jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), dtype))
    u = jnp.asarray(beta * np.array([[1.0, 0, 0], [0.6, 0.8, 0]]), dtype)
    log_mass, mean = call(tilt, u, mu)
    exact, true_mean = tilt_truth(np.asarray(u), np.asarray(mu.points), mu.weights)
    np.testing.assert_allclose(log_mass, exact, rtol=8 * eps(dtype))
    assert np.all(np.linalg.norm(mean, axis=1) <= 1 + 8 * eps(dtype))
    if dtype == jnp.float64:  # in float32 a logit of 10⁶ is known to 0.1 and the mean is not
        np.testing.assert_allclose(mean, true_mean, atol=logit_error(dtype, u))


@ways
def test_one_token_is_its_own_mean(rng, tilt):
    y, u = sphere_points(rng, 1, 5), 1e6 * sphere_points(rng, 9, 5)
    log_mass, mean = call(tilt, jnp.asarray(u), Measure(y))
    np.testing.assert_allclose(log_mass, u @ y[0], rtol=0, atol=1e-9)  # 10⁶ to 15 digits
    np.testing.assert_allclose(mean, np.broadcast_to(y, u.shape), atol=2e-16)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [50, 1e6])
def test_coincident_tokens_are_one(rng, tilt, dtype, beta):
    y, u = sphere_points(rng, 1, 3), jnp.asarray(beta * sphere_points(rng, 9, 3), dtype)
    mu = Measure(jnp.asarray(np.repeat(y, 12, axis=0), dtype))
    log_mass, mean = call(tilt, u, mu)
    exact = np.asarray(u, np.float64) @ np.asarray(mu.points[0], np.float64)
    np.testing.assert_allclose(log_mass, exact, atol=logit_error(dtype, u))
    # However badly log F is known: a mean that is divided by e^{log F} has length 1 ± β ε.
    np.testing.assert_allclose(mean, np.broadcast_to(y, u.shape), atol=4 * eps(dtype))


@ways
def test_antipodal_tokens_give_the_hyperbolic_tangent(rng, tilt):
    y, u = sphere_points(rng, 1, 3), 3 * sphere_points(rng, 9, 3)
    log_mass, mean = call(tilt, jnp.asarray(u), Measure(np.concatenate([y, -y])))
    np.testing.assert_allclose(log_mass, np.log(np.cosh(u @ y[0])), atol=1e-14)
    np.testing.assert_allclose(mean, np.tanh(u @ y[0])[:, None] * y, atol=1e-14)


@ways
def test_keeps_the_shape_of_the_queries(rng, tilt):
    mu = Measure(sphere_points(rng, 23, 3))
    u = jnp.asarray(rng.normal(size=(2, 3, 3)))
    log_mass, mean = call(tilt, u, mu)
    assert log_mass.shape == (2, 3) and mean.shape == (2, 3, 3)
    one = call(tilt, u[1, 2], mu)
    np.testing.assert_allclose(one.log_mass, log_mass[1, 2], atol=1e-15)
    np.testing.assert_allclose(one.mean, mean[1, 2], atol=1e-15)


# The uniform law


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "kappa"), MEAN_RESULTANT)
def test_uniform_law_is_a_ratio_of_bessel_functions(rng, d, kappa, dtype):
    """m(u) = A_d(|u|) u/|u| and F(u) = Γ(d/2)(2/|u|)^{d/2−1} I_{d/2−1}(|u|)."""
    e = sphere_points(rng, d)
    if d == 384:
        points, weights = zonal_rule(e, 200)
    else:
        points, weights = uniform_rule(d, degree=40 if d == 5 else 80)
    mu = Measure(jnp.asarray(points, dtype), weights)
    log_mass, mean = call(Streamed(), jnp.asarray(kappa * e, dtype), mu)
    # The rules are exact to rounding; a float32 logit of 100 is off by 6e-6, its node by 6e-8·κ.
    tolerance = 1e-9 if dtype == jnp.float64 else 1e-5 * max(1, kappa / 10)
    np.testing.assert_allclose(mean, MEAN_RESULTANT[d, kappa] * e, atol=tolerance, rtol=0)
    np.testing.assert_allclose(log_mass, log_uniform_mass(d, kappa), atol=tolerance)


# Symmetries


def problem(seed, n=23, q=9, d=3, scale=10):
    rng = np.random.default_rng(seed)
    u = scale * rng.normal(size=(q, d))
    return rng, jnp.asarray(u), jnp.asarray(sphere_points(rng, n, d)), jnp.asarray(simplex(rng, n))


def assert_same(a, b):
    # Two orders of summation of logits of size 10 to 40.
    np.testing.assert_allclose(a.log_mass, b.log_mass, atol=1e-13, rtol=1e-14)
    np.testing.assert_allclose(a.mean, b.mean, atol=1e-13)


@ways
@given(seed=seeds)
def test_order_of_tokens_does_not_matter(tilt, seed):
    rng, u, y, w = problem(seed)
    order = rng.permutation(len(y))
    assert_same(call(tilt, u, Measure(y[order], w[order])), call(tilt, u, Measure(y, w)))


@ways
@given(seed=seeds)
def test_a_token_split_in_two_changes_nothing(tilt, seed):
    rng, u, y, w = problem(seed)
    i = rng.integers(len(y))
    split = Measure(jnp.concatenate([y, y[i : i + 1]]), jnp.append(w, w[i] / 2).at[i].divide(2))
    assert_same(call(tilt, u, split), call(tilt, u, Measure(y, w)))


@ways
@given(seed=seeds)
def test_a_token_of_weight_zero_is_absent(tilt, seed):
    rng, u, y, w = problem(seed, scale=1e3)
    i = rng.integers(len(y))
    without = jnp.delete(y, i, axis=0), jnp.delete(w, i)
    w = w.at[i].set(0) / jnp.sum(without[1])
    # The absent token sits exactly at the query, where it would win were it there.
    y = y.at[i].set(u[0] / jnp.linalg.norm(u[0]))
    expected = call(Dense(), u, Measure(without[0], without[1] / jnp.sum(without[1])))
    tilted = call(tilt, u, Measure(y, w))
    np.testing.assert_allclose(tilted.log_mass, expected.log_mass, rtol=1e-14, atol=1e-11)
    np.testing.assert_allclose(tilted.mean, expected.mean, atol=1e-11)


@ways
@given(seed=seeds)
def test_rotates_with_its_arguments(tilt, seed):
    """F(Ru; R♯μ) = F(u; μ) and m(Ru; R♯μ) = R m(u; μ)."""
    rng, u, y, w = problem(seed)
    r = rotation(rng, 3)
    log_mass, mean = call(tilt, u @ r.T, Measure(y @ r.T, w))
    expected = call(tilt, u, Measure(y, w))
    assert_same(type(expected)(log_mass, mean @ r), expected)


# Derivatives


def scalar(tilt, u, points, weights):
    """A function of everything the tilt returns, whose derivatives see all of its arguments."""
    log_mass, mean = tilt(u, Measure(points, weights))
    return jnp.sum(jnp.sin(log_mass)) + jnp.sum(jnp.cos(3 * mean))


gradient = eqx.filter_jit(lambda tilt, *args: jax.grad(scalar, argnums=(1, 2, 3))(tilt, *args))


@eqx.filter_jit
def pushforward(tilt, args, tangents):
    return jax.jvp(lambda *args: scalar(tilt, *args), args, tangents)[1]


def tangents(rng, args):
    return tuple(jnp.asarray(rng.normal(size=a.shape)) for a in args)


@ways
def test_mean_is_the_gradient_of_log_mass(tilt):
    _, u, y, w = problem(0)
    mu = Measure(y, w)
    slope = eqx.filter_jit(jax.grad(lambda u: jnp.sum(tilt(u, mu).log_mass)))(u)
    np.testing.assert_allclose(slope, call(tilt, u, mu).mean, atol=1e-14)


@ways
def test_hessian_of_log_mass_is_the_covariance_of_the_tilted_measure(tilt):
    _, u, y, w = problem(1, scale=2)
    mu = Measure(y, w)
    hessian = eqx.filter_jit(jax.hessian(lambda u: tilt(u, mu).log_mass))(u[0])
    p = np.exp(y @ u[0]) * w
    p /= p.sum()
    m = p @ y
    np.testing.assert_allclose(hessian, (y - m).T * p @ (y - m), atol=1e-14)


@streams
def test_streamed_derivatives_equal_dense_ones(tilt):
    rng, *args = problem(2, scale=3)
    streamed, dense = gradient(tilt, *args), gradient(Dense(), *args)
    for one, other in zip(streamed, dense, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13 * np.abs(other).max())
    # Forward mode is the transpose of reverse mode.
    v = tangents(rng, args)
    forward = pushforward(tilt, tuple(args), v)
    reverse = sum(jnp.vdot(g, t) for g, t in zip(streamed, v, strict=True))
    np.testing.assert_allclose(forward, reverse, rtol=1e-12)


@streams
def test_streamed_derivatives_survive_large_beta(tilt):
    """log F near −10³ and e^{−log F} = ∞: tokens that only fill up a tile must not meet it."""
    _, _, y, w = problem(7)
    y = y.at[:, 0].set(-1 - jnp.abs(y[:, 0]))
    y = y / jnp.linalg.norm(y, axis=1, keepdims=True)
    u = jnp.asarray([[2e3, 0.0, 0.0], [1.6e3, 1.2e3, 0.0]])
    streamed, dense = gradient(tilt, u, y, w), gradient(Dense(), u, y, w)
    for one, other in zip(streamed, dense, strict=True):
        # Logits of 2,000 are known to 10⁻¹², and derivatives in the points are as large.
        np.testing.assert_allclose(one, other, atol=1e-10 * np.abs(other).max())


@ways
@pytest.mark.parametrize("argument", ["u", "points", "weights"])
def test_derivatives_equal_difference_quotients(tilt, argument):
    rng, *args = problem(3, scale=3)
    index = ["u", "points", "weights"].index(argument)
    v = tuple(t if i == index else 0 * t for i, t in enumerate(tangents(rng, args)))
    v = tuple(0.01 * t for t in v)
    h = 1e-4
    ahead, behind = ([a + s * h * t for a, t in zip(args, v, strict=True)] for s in (1, -1))
    # Points leave the sphere and weights stop summing to one here, so the checks, which see values
    # and not tracers, must not be in the way.
    f = eqx.filter_jit(scalar)
    quotient = (f(tilt, *ahead) - f(tilt, *behind)) / (2 * h)
    # Truncation h²·10⁻⁴, rounding ε/h ~ 10⁻¹¹ for a sum of size 10.
    np.testing.assert_allclose(pushforward(tilt, tuple(args), v), quotient, atol=1e-9, rtol=1e-8)


@streams
@pytest.mark.parametrize("order", ["forward over reverse", "reverse over reverse", "forward twice"])
def test_second_derivatives_through_tiles(tilt, order):
    rng, *args = problem(4, scale=2)
    v = tangents(rng, args)

    def first(tilt, *args):
        return jax.grad(scalar, argnums=(1, 2, 3))(tilt, *args)

    def second(tilt):
        if order == "forward over reverse":
            return jax.jvp(lambda *a: first(tilt, *a), tuple(args), v)[1]
        if order == "reverse over reverse":

            def along(*a):
                return sum(jnp.vdot(g, t) for g, t in zip(first(tilt, *a), v, strict=True))

            return jax.grad(along, argnums=(0, 1, 2))(*args)

        def slope(*a):
            return jax.jvp(lambda *a: scalar(tilt, *a), a, v)[1]

        return jax.jvp(slope, tuple(args), v)[1]

    streamed, dense = eqx.filter_jit(second)(tilt), eqx.filter_jit(second)(Dense())
    for one, other in zip(jax.tree.leaves(streamed), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12 * np.abs(other).max())


@ways
def test_the_weight_of_an_absent_token_has_derivative_zero(tilt):
    _, u, y, w = problem(5)
    w = w.at[4].set(0)
    du, dy, dw = gradient(tilt, u, y, w / jnp.sum(w))
    assert dw[4] == 0 and not np.any(dy[4])
    assert all(np.all(np.isfinite(a)) for a in (du, dy, dw)) and np.all(dw[:4] != 0)


@ways
def test_vmaps_over_beta_and_over_measures(tilt):
    rng, u, y, w = problem(6)
    mu = Measure(y, w)
    betas = jnp.asarray([0.1, 1.0, 100.0])
    batch = eqx.filter_jit(jax.vmap(lambda beta: tilt(beta * u, mu)))(betas)
    points = jnp.asarray(sphere_points(rng, 3, 23, 3))
    several = eqx.filter_jit(jax.vmap(lambda x: tilt(u, mu.move(x))))(points)
    for i in range(3):
        one = call(tilt, betas[i] * u, mu)
        # A logit of 4,000 is known to 10⁻¹².
        np.testing.assert_allclose(batch.log_mass[i], one.log_mass, rtol=1e-14, atol=1e-12)
        np.testing.assert_allclose(batch.mean[i], one.mean, atol=1e-11)
        assert_same(
            type(one)(several.log_mass[i], several.mean[i]), call(tilt, u, mu.move(points[i]))
        )


def test_streamed_gradient_holds_no_square_array():
    n = 8192

    def total(x):
        log_mass, mean = Streamed()(10 * x, Measure(x))
        return jnp.sum(log_mass) + jnp.sum(mean**2)

    x = jax.ShapeDtypeStruct((n, 3), jnp.float64)
    compiled = jax.jit(jax.grad(total)).lower(x).compile()
    # A handful of tiles of 1024 × 1024, where the square alone would be 64 of them.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * n**2 / 8


# The exposed face


def face(tilt, u, mu, tolerance=1e-12):
    return eqx.filter_jit(tilt.exposed)(u, mu, tolerance)


@ways
@given(seed=seeds)
def test_exposed_is_the_limit_of_the_mean(tilt, seed):
    _, u, y, w = problem(seed)
    mu = Measure(y, w)
    # No two logits are closer than 10⁻⁶ here, so that at 10⁸ the second has weight e^{−100}.
    np.testing.assert_allclose(face(tilt, u, mu), call(tilt, 1e8 * u, mu).mean, atol=1e-13)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
def test_exposed_shares_ties_by_weight_and_ignores_the_absent(rng, tilt, dtype):
    e = sphere_points(rng, 3)
    ring = np.cross(e, sphere_points(rng, 2, 3))
    ring /= np.linalg.norm(ring, axis=1, keepdims=True)
    # Two tokens level at height 0.6 up to rounding, others below, an absent one on top.
    points = np.stack([0.6 * e + 0.8 * ring[0], 0.6 * e + 0.8 * ring[1], ring[0], -e, -ring[1], e])
    weights = np.array([0.3, 0.1, 0.2, 0.2, 0.2, 0.0])
    mu = Measure(jnp.asarray(points, dtype), weights)
    mean = face(tilt, jnp.asarray(7 * e, dtype), mu, 32 * eps(dtype))
    assert mean.dtype == dtype
    np.testing.assert_allclose(mean, 0.75 * points[0] + 0.25 * points[1], atol=8 * eps(dtype))
    # At u = 0 every token attains the maximum.
    np.testing.assert_allclose(
        face(tilt, jnp.zeros(3, dtype), mu), weights @ points, atol=8 * eps(dtype)
    )


@ways
def test_exposed_tolerance_is_relative_to_the_length_of_u(tilt):
    angle = np.array([0.0, 0.1, 1.0])  # heights 1, 0.995, 0.54
    mu = Measure(np.stack([np.cos(angle), np.sin(angle)], 1))
    for scale in (1e-3, 1e3):
        u = jnp.asarray([[scale, 0.0]])
        np.testing.assert_allclose(face(tilt, u, mu, 1e-3), mu.points[:1], atol=1e-15)
        np.testing.assert_allclose(face(tilt, u, mu, 1e-2)[0], mu.points[:2].mean(0), atol=1e-15)


# What is refused, and what is chosen


@ways
def test_refuses_what_does_not_fit(tilt):
    mu = Measure(np.eye(3))
    for f in (tilt, lambda u, mu: tilt.exposed(u, mu, 0.0)):
        with pytest.raises(InputError, match="queries have dimension 2 and tokens 3"):
            f(jnp.ones((4, 2)), mu)
        with pytest.raises(InputError, match=r"not a batch of shape \(2, 3, 3\); use jax.vmap"):
            f(jnp.ones((4, 3)), mu.move(jnp.stack([mu.points, mu.points])))


def test_streamed_refuses_an_empty_tile():
    with pytest.raises(InputError, match=r"tile is \(0, 5\); it must be two positive integers"):
        Streamed((0, 5))


def test_automatic_says_what_it_chose_and_why():
    way, why = Automatic(largest_dense=100).choose(10, 10)
    assert way == Dense() and "100 logits, at most 100" in why
    way, why = Automatic(largest_dense=100).choose(10, 11)
    assert way == Streamed() and "110 logits, more than 100" in why
