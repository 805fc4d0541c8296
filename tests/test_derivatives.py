"""Derivatives through a flow and a distance, against central differences to 1e-5."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import call

import jaxmf as mf
from jaxmf.transport import to_axis

V, B = np.diag([2.0, 1.0, 0.5]), np.diag([0.3, 1.0, 1.0])
TIMES = np.linspace(0, 10, 21)
BETA = jnp.asarray(40.0)


@pytest.fixture(scope="module")
def mu0():
    return mf.VonMisesFisher([1.0, 2.0, 2.0], 1.0).quadrature(200)


def curve(mu0, beta, value=V, key_query=B):
    """W₂(ρₜ^β, Π♯ρ₀) at the saved times; Π moves with V and B."""
    attention = mf.Attention(value, key_query=key_query)
    target = mf.spectrum(attention, multiplicities=(1, 1, 1)).project(mu0)
    field = mf.SoftmaxAttention(attention, beta)
    return mf.flow(field, mu0, TIMES, mf.RK4(steps=3), observe=lambda mu: to_axis(mu, target))


def central(f, x, h):  # tokens that leave E amplify every change: h must be small
    return (f(x + h) - f(x - h)) / (2 * h)


def test_distance_along_a_run_in_beta(mu0):
    w2 = jax.jit(lambda beta: curve(mu0, beta))
    value, slope = jax.jvp(w2, (BETA,), (jnp.ones(()),))
    assert value.shape == slope.shape == TIMES.shape
    # Both signs: higher β keeps tokens longer, and has not moved them at t = 0.
    assert slope[0] == 0 and np.min(slope) < -1e-3
    np.testing.assert_allclose(slope, central(w2, BETA, 1e-5), rtol=1e-5, atol=1e-9)


def test_entry_and_exit_in_beta(mu0):
    @jax.jit
    def ends(beta):
        return jnp.stack(mf.window(TIMES, curve(mu0, beta), 0.5))

    value, slope = jax.jvp(ends, (BETA,), (jnp.ones(()),))
    assert np.all(np.isfinite(value)) and slope[1] > 0.001  # the window closes later
    np.testing.assert_allclose(slope, central(ends, BETA, 1e-5), rtol=1e-5)


def test_distance_in_value_key_query_and_time_backwards(mu0, rng):
    def distance(value, key_query, t):
        attention = mf.Attention(value, key_query=key_query)
        target = mf.spectrum(attention, multiplicities=(1, 1, 1)).project(mu0)
        mu = mf.flow(mf.SoftmaxAttention(attention, BETA), mu0, t, mf.RK4(steps=20))
        return to_axis(mu, target)

    at = jnp.asarray(V), jnp.asarray(B), jnp.asarray(3.0)
    gradients = call(jax.grad(distance, argnums=(0, 1, 2)), *at)
    distance = jax.jit(distance)
    for i, gradient in enumerate(gradients):
        v = jnp.asarray(rng.normal(size=at[i].shape))

        def along(h, i=i, v=v):
            return distance(*(x + h * v if j == i else x for j, x in enumerate(at)))

        slope = central(along, 0.0, 1e-7)
        assert abs(slope) > 1e-3
        np.testing.assert_allclose(jnp.vdot(gradient, v), slope, rtol=1e-5)


def test_the_time_of_the_best_bound_and_the_bound_itself():
    bound = mf.ConcentrationBound(K1=0.7, C1=0.2, K2=1.1, c=0.4)
    s = np.sqrt(np.log1p(BETA) / BETA)
    ds = (1 / (BETA * (1 + BETA)) - np.log1p(BETA) / BETA**2) / (2 * s)
    np.testing.assert_allclose(jax.grad(bound.optimal_time)(BETA), -ds / (s * 0.6), rtol=1e-13)
    np.testing.assert_allclose(jax.grad(bound)(BETA, 2.0), 0.7 * ds * np.exp(0.2 * 2.0), rtol=1e-13)


@pytest.mark.parametrize("method", ["assignment", "interval"])
def test_distances_that_are_not_to_an_axis(mu0, method):
    attention = mf.Attention(np.diag([2.0, 1.0, 0.5]), key_query=np.diag([0.45, 1.0, 0.4]))
    x = mf.Uniform(3).sample(jax.random.key(0), 30)
    mu = x if method == "assignment" else mu0.move(mu0.points[:, ::-1])

    def distance(beta):
        end = mf.flow(mf.SoftmaxAttention(attention, beta), mu, 2.0, mf.RK4(steps=10))
        found = mf.wasserstein(end, mf.Measure(x.points[::-1]), width=0.005)
        assert found.method == method
        return found.value**2

    slope = jax.jvp(distance, (BETA,), (jnp.ones(()),))[1]
    if method == "assignment":
        np.testing.assert_allclose(slope, central(distance, BETA, 1e-3), rtol=1e-5)
        return
    # An interval is no closer than its width; its plan is, so the yardstick is another library's.
    import ot

    def exact(beta):
        end = mf.flow(mf.SoftmaxAttention(attention, beta), mu, 2.0, mf.RK4(steps=10))
        cost = ot.dist(np.asarray(end.points), np.asarray(x.points))
        return ot.emd2(np.asarray(mu.weights), np.full(30, 1 / 30), cost)

    np.testing.assert_allclose(slope, central(exact, BETA, 1e-2), rtol=0.05)
