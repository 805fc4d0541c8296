"""The Laplace discrepancy against closed forms, and certificates against exact distances."""

import jax
import jax.numpy as jnp
import numpy as np
import ot
import pytest
from oracles import (
    DTYPES,
    call,
    eps,
    invertible,
    mean_resultant,
    rotation,
    simplex,
    sphere_points,
    uniform_rule,
)

from jaxmf import (
    RK4,
    Adaptive,
    Attention,
    InputError,
    Measure,
    SoftmaxAttention,
    Uniform,
    ZeroTemperature,
    certificate,
    discrepancy,
    flow,
    spectrum,
)
from jaxmf.tilt import Streamed
from jaxmf.transport import to_axis

TIMES = np.linspace(0, 5, 6)


def attention_with(rng, values):
    """Attention with a B without symmetry and a symmetric M of these eigenvalues."""
    r, b = rotation(rng, len(values)), invertible(rng, len(values))
    return Attention((r * values @ r.T) @ np.linalg.inv(b.T), b)


def zero_temperature_speed(attention, x):
    """|P_x V Bᵀx/|Bᵀx|| and |Bᵀx|, in NumPy."""
    u = x @ np.asarray(attention.key_query)
    length = np.linalg.norm(u, axis=1)
    v = u / length[:, None] @ np.asarray(attention.value).T
    return np.linalg.norm(v - np.sum(v * x, axis=1, keepdims=True) * x, axis=1), length


# The discrepancy


@pytest.mark.parametrize("d", [2, 3, 5])
def test_discrepancy_of_the_uniform_law_is_its_closed_form(rng, d):
    """v_β = A_d(β|Bᵀx|) v_∞ for the uniform law."""
    attention = Attention(rng.normal(size=(d, d)), invertible(rng, d))
    uniform = Measure(*uniform_rule(d, 40))
    x, w = sphere_points(rng, 20, d), simplex(rng, 20)
    speed, length = zero_temperature_speed(attention, x)
    for beta in (0.5, 4.0):
        missing = 1 - np.array([mean_resultant(d, beta * r) for r in length])
        expected = np.sqrt(w @ (missing * speed) ** 2)
        found = call(discrepancy, attention, jnp.array(beta), uniform, Measure(x, w))
        np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_discrepancy_of_a_quadrature_falls_like_one_over_beta():
    """1 − A_3(κ) = 1 − coth κ + 1/κ."""
    attention = Attention(np.diag([2.0, 1, 0.5]), np.eye(3))
    nodes = Uniform(3).quadrature(20_000)
    speed, _ = zero_temperature_speed(attention, np.asarray(nodes.points))
    for beta in (10.0, 100.0):
        expected = (1 - 1 / np.tanh(beta) + 1 / beta) * np.sqrt(np.mean(speed**2))
        few = discrepancy(attention, beta, nodes, Uniform(3).quadrature(500), Streamed())
        np.testing.assert_allclose(few, expected, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_discrepancy_averages_over_the_tokens_themselves_by_their_weights(rng, dtype):
    attention = Attention(
        rng.normal(size=(4, 4)).astype(dtype), key_query=invertible(rng, 4).astype(dtype)
    )
    mu = Measure(jnp.asarray(sphere_points(rng, 30, 4), dtype), simplex(rng, 30))
    hot = SoftmaxAttention(attention, jnp.asarray(3.0, dtype))(mu.points, mu)
    cold = ZeroTemperature(attention)(mu.points)
    found = discrepancy(attention, jnp.asarray(3.0, dtype), mu)
    expected = np.sqrt(np.sum(mu.weights[:, None] * (hot - cold) ** 2))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=20 * eps(dtype))
    np.testing.assert_allclose(discrepancy(attention, 3.0, mu, mu), found, rtol=20 * eps(dtype))


def test_discrepancy_is_differentiable_in_beta(rng):
    attention = attention_with(rng, np.array([2.0, 1, 0.5]))
    mu = Measure(sphere_points(rng, 40, 3), simplex(rng, 40))
    queries = Measure(sphere_points(rng, 10, 3), simplex(rng, 10))

    @jax.jit
    def f(beta):
        return discrepancy(attention, beta, mu, queries)

    numeric = (f(7 + 1e-4) - f(7 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(f)(7.0), numeric, rtol=1e-7)
    np.testing.assert_allclose(jax.jvp(f, (7.0,), (1.0,))[1], numeric, rtol=1e-7)


def test_discrepancy_needs_an_invertible_b_and_a_positive_beta():
    mu = Measure(np.eye(3))
    with pytest.raises(InputError, match="its rank is 2 of 3"):
        discrepancy(Attention(np.eye(3), np.diag([1.0, 1, 0])), 1.0, mu)
    with pytest.raises(InputError, match=r"beta is -1.0; it must be finite and positive"):
        discrepancy(Attention(np.eye(3), np.eye(3)), -1.0, mu)


# The certificate


def cases(rng):
    """Attention and weighted tokens: dim E = 1 and 2, symmetric M or not, an even law or not."""
    tilted = sphere_points(rng, 80, 3) + np.array([0.7, 0.3, 0])
    tilted /= np.linalg.norm(tilted, axis=1, keepdims=True)
    return {
        "nodes": (Attention(np.diag([2, 1, 0.5]), np.diag([0.3, 1, 1])), Uniform(3).quadrature(90)),
        "asymmetric": (
            Attention(rng.normal(size=(3, 3)), invertible(rng, 3)),
            Measure(tilted, simplex(rng, 80)),
        ),
        "plane": (
            attention_with(rng, np.array([2.0, 2, 1, 0.5])),
            Measure(sphere_points(rng, 50, 4), simplex(rng, 50)),
        ),
    }


@pytest.mark.parametrize("case", ["nodes", "asymmetric", "plane"])
def test_certificate_is_above_the_exact_distance(rng, case):
    attention, mu0 = cases(rng)[case]
    spaces = spectrum(attention)
    target = spaces.project(mu0)
    method = RK4(step=0.1)

    def run(beta):
        tokens = flow(SoftmaxAttention(attention, beta), mu0, TIMES, method)
        still = flow(ZeroTemperature(attention), mu0, TIMES, method)
        return certificate(attention, beta, mu0, TIMES, method), tokens.points, still.points

    w = np.asarray(mu0.weights)
    for beta in (1.0, 10.0, 100.0, 1e4):
        found, hot, cold = jax.tree.map(np.asarray, call(run, jnp.array(beta)))
        if spaces.multiplicities[0] == 1:
            exact = np.asarray(call(to_axis, mu0.move(jnp.asarray(hot)), target))
        else:
            costs = np.sum((hot[:, :, None] - np.asarray(target.points)) ** 2, axis=-1)
            exact = np.sqrt([ot.emd2(w, w, cost) for cost in costs])
        assert np.all(exact <= found.upper + 1e-9)
        # Every part by its definition.
        np.testing.assert_array_equal(found.times, TIMES)
        parts = (
            np.sqrt(np.sum((hot - cold) ** 2, axis=-1) @ w),
            np.sqrt(np.sum((cold - np.asarray(target.points)) ** 2, axis=-1) @ w),
        )
        np.testing.assert_allclose(found.coupled, parts[0], atol=1e-9)
        np.testing.assert_allclose(found.zero_temperature, parts[1], atol=1e-9)
        np.testing.assert_allclose(found.upper, sum(parts), atol=1e-9)
        assert found.coupled[0] == 0
        for i in (0, 3):
            now = call(discrepancy, attention, jnp.array(beta), mu0.move(jnp.asarray(hot[i])))
            np.testing.assert_allclose(found.discrepancy[i], now, rtol=1e-7)


def test_certificate_is_sharp_where_the_coupling_is_optimal():
    """At zero temperature every token goes to the pole of its side, as the optimal plan does."""
    attention = Attention(np.diag([1.8, 1, 1]), np.eye(3))
    nodes = Uniform(3).quadrature(1000)
    times = np.arange(3.0)
    found = jax.jit(lambda beta: certificate(attention, beta, nodes, times, RK4(step=0.1)))(1e4)
    exact = np.sqrt(2 / (1 + np.exp(0.8 * found.times)))
    np.testing.assert_allclose(found.zero_temperature, exact, rtol=2e-3)
    assert np.all(found.upper >= exact - 2e-3) and np.all(found.coupled < 0.1)


def test_certificate_is_differentiable_in_beta():
    attention = Attention(np.diag([2, 1, 0.5]), np.diag([0.3, 1, 1]))
    nodes = Uniform(3).quadrature(60)

    @jax.jit
    def run(beta):
        return certificate(attention, beta, nodes, TIMES, RK4(step=0.1))[1:]

    along = jax.jit(lambda beta: jax.jvp(run, (beta,), (1.0,))[1])
    for beta in (5.0, 200.0):
        slopes, h = along(beta), 1e-4 * beta
        for slope, right, left in zip(slopes, run(beta + h), run(beta - h), strict=True):
            np.testing.assert_allclose(slope, (right - left) / (2 * h), rtol=1e-5, atol=1e-9)
        assert np.all(np.abs(slopes[0]) > 0) and slopes[1][0] == 0 and np.all(slopes[2] == 0)


def test_certificate_by_adaptive_steps_and_at_one_time():
    attention = Attention(np.diag([2, 1, 0.5]), np.diag([0.3, 1, 1]))
    nodes = Uniform(3).quadrature(60)
    fine = certificate(attention, 20.0, nodes, [0.0, 2.0], RK4(step=0.02))
    method = Adaptive(rtol=1e-9, atol=1e-9)
    adaptive = jax.jit(lambda beta: certificate(attention, beta, nodes, 2.0, method))(20.0)
    assert adaptive.upper.shape == ()
    for a, b in zip(adaptive, fine, strict=True):
        np.testing.assert_allclose(a, b[1], rtol=1e-6)


def test_certificate_names_tokens_without_a_projection():
    attention = Attention(np.diag([2, 1, 0.5]), np.eye(3))
    with pytest.raises(InputError, match="2 tokens are orthogonal to E"):
        certificate(attention, 10.0, Measure(np.eye(3)), [0.0, 1.0])
