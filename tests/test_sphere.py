"""The sphere: projections, geodesics and their ends, where formulas lose digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from oracles import DTYPES, eps, seeds, sphere_points

from jaxmf import sphere

DIMENSIONS = (2, 3, 5, 384)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalise_is_the_nearest_point(rng, d, dtype):
    x = jnp.asarray(rng.normal(size=(4, 6, d)) * 10.0 ** rng.uniform(-8, 8, (4, 6, 1)), dtype)
    y = sphere.normalise(x)
    assert y.dtype == dtype
    # |x|² is a sum of d terms, so |y| is right to d/2 roundings at worst, √d as a rule.
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), 1, atol=8 * eps(dtype))
    np.testing.assert_allclose(y * sphere.norm(x)[..., None], x, rtol=8 * eps(dtype))


def test_norm_has_derivative_zero_at_the_origin():
    assert not np.any(jax.grad(sphere.norm)(jnp.zeros(3)))
    assert not np.any(jax.jacobian(sphere.normalise)(jnp.zeros(3)) - jnp.eye(3))
    np.testing.assert_allclose(jax.grad(sphere.norm)(jnp.array([3.0, 4.0])), [0.6, 0.8])


@given(seeds)
def test_tangent_is_the_orthogonal_projector(seed):
    rng = np.random.default_rng(seed)
    x, v = sphere_points(rng, 5, 3), rng.normal(size=(5, 3))
    p = np.eye(3) - x[:, :, None] * x[:, None, :]
    np.testing.assert_allclose(
        sphere.tangent(jnp.asarray(x), jnp.asarray(v)), np.einsum("nij,nj->ni", p, v), atol=1e-14
    )


@given(seeds)
def test_log_inverts_exp_and_measures_the_distance(seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(sphere_points(rng, 8, 3))
    direction = sphere.normalise(sphere.tangent(x, jnp.asarray(rng.normal(size=(8, 3)))))
    # From hardly moving to hardly missing the antipode; there P_x y is of size π − θ, and its
    # direction is known to ε/(π − θ) only.
    angle = jnp.asarray([0, 1e-12, 1e-6, 0.1, 1, 2, 3, np.pi - 1e-3])
    v = angle[:, None] * direction
    y = sphere.exp(x, v)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), 1, atol=1e-15)
    np.testing.assert_allclose(sphere.log(x, y), v, atol=1e-12)
    np.testing.assert_allclose(sphere.distance(x, y), angle, atol=1e-15, rtol=1e-3)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_vanishes_at_the_point_itself_and_at_its_antipode(rng, d, dtype):
    x = jnp.asarray(sphere_points(rng, 20, d), dtype)
    assert not np.any(sphere.log(x, x))
    assert not np.any(sphere.log(x, -x))


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 1.0, np.pi - 1e-4, np.pi - 1e-9])
def test_distance_is_accurate_at_both_ends(angle):
    x, y = jnp.array([1.0, 0.0]), jnp.array([np.cos(angle), np.sin(angle)])
    # arccos⟨x, y⟩ would lose half the digits: 1e-9 would become 0.
    np.testing.assert_allclose(sphere.distance(x, y), angle, rtol=1e-15)
    np.testing.assert_allclose(np.pi - sphere.distance(x, y), np.pi - angle, rtol=1e-6)


def test_exp_is_smooth_where_it_starts():
    x, v = jnp.array([1.0, 0.0, 0.0]), jnp.array([0.0, 0.6, 0.8])
    at_rest = jnp.zeros(3)
    position, velocity = jax.jvp(lambda v: sphere.exp(x, v), (at_rest,), (v,))
    np.testing.assert_array_equal(position, x)
    np.testing.assert_array_equal(velocity, v)
