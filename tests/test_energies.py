"""Energy, ascent and dissipation: closed forms, conservation, orders, conjugation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from oracles import rotation, simplex, sphere_points

import jaxmf as mf
from jaxmf import InputError, Measure, kernels

COSINE = kernels.FourierToeplitz({1: 1.0})


def great_circle(n, d=3):
    angle = 2 * np.pi * np.arange(n) / n
    points = np.zeros((n, d))
    points[:, 0], points[:, 1] = np.cos(angle), np.sin(angle)
    return Measure(points, labels=angle)


# I₁(β)/(2β): h = cos(ξ − ζ)e^{β⟨x,y⟩}/β, tokens (cos ξ, sin ξ, 0).
@pytest.mark.parametrize("beta, value", [(1.0, 0.2825795519962425), (3.0, 0.6588950362337682)])
def test_the_great_circle_has_the_energy_of_its_closed_form(beta, value):
    kernel = COSINE * kernels.Exponential(beta)
    mu = great_circle(64)
    np.testing.assert_allclose(mf.energy(kernel, mu), value, rtol=1e-14)
    assert mf.dissipation(kernel, mu) < 1e-28
    np.testing.assert_allclose(mf.energy(COSINE * kernels.Linear(), mu), 0.25, rtol=1e-14)


def test_one_sign_of_a_line_has_less():
    # sign(cos ξ)u has energy (2/π)²/2 = 2/π² in the mean field; n labels see it to 1/n².
    n = 4096
    labels = 2 * np.pi * (np.arange(n) + 0.5) / n
    points = np.sign(np.cos(labels))[:, None] * np.array([0.6, 0.0, 0.8])
    energy = mf.energy(COSINE * kernels.Linear(), Measure(points, labels=labels))
    np.testing.assert_allclose(energy, 2 / np.pi**2, atol=1 / n**2)


def test_energy_never_falls_and_gains_what_the_dissipation_says(rng):
    n = 24
    labels = rng.uniform(0, 2 * np.pi, n)
    mu = Measure(sphere_points(rng, n, 3), simplex(rng, n), labels)
    kernel = (COSINE * kernels.Exponential(2.0)).gauge(kernels.RoPE(3, fix_last=True))
    errors = []
    for steps in (20, 40):
        times = jnp.linspace(0.0, 4.0, steps + 1)
        moved = mf.flow(mf.Ascent(kernel), mu, times, mf.RK4(steps=1))
        curve = mf.energy_curve(kernel, moved, times)
        assert curve.largest_drop == 0
        errors.append(float(curve.identity_error))
    assert errors[1] < 1e-4
    assert errors[0] / errors[1] > 12  # fourth order: 16 in the limit
    np.testing.assert_array_equal(moved.labels, labels)
    assert curve.energy[-1] > 1.2 * curve.energy[0]


def test_dissipation_is_the_derivative_of_the_energy(rng):
    mu = Measure(sphere_points(rng, 9, 4), simplex(rng, 9), rng.normal(size=9))
    kernel = kernels.Alibi(0.4) * kernels.Exponential(1.5).gauge(kernels.RoPE(4))
    velocity = mf.Ascent(kernel)(mu.points, mu, mu.labels)
    assert np.abs(jnp.sum(velocity * mu.points, axis=1)).max() < 1e-15
    _, slope = jax.jvp(lambda x: mf.energy(kernel, mu.move(x)), (mu.points,), (velocity,))
    np.testing.assert_allclose(slope, mf.dissipation(kernel, mu), rtol=1e-12)


def test_energies_of_a_batch_are_those_of_its_measures(rng):
    points = sphere_points(rng, 2, 3, 7, 3)
    mu = Measure(points, labels=rng.normal(size=7))
    kernel = COSINE * kernels.Exponential(1.0)
    for f in (mf.energy, mf.dissipation):
        found = f(kernel, mu)
        assert found.shape == (2, 3)
        for i, j in np.ndindex(2, 3):
            np.testing.assert_allclose(found[i, j], f(kernel, mu.move(mu.points[i, j])), rtol=1e-13)


def test_gauged_tokens_follow_the_plain_flow(rng):
    n, g = 12, rng.normal(size=(3, 3))
    g = g - g.T
    labels = rng.normal(size=n)
    u = np.stack([scipy.linalg.expm(xi * g) for xi in labels])
    q = sphere_points(rng, n, 3)
    x = np.einsum("nji,nj->ni", u, q)
    kernel = kernels.Exponential(2.0)
    plain = mf.flow(mf.Ascent(kernel), Measure(q), 1.5)
    gauged = mf.flow(mf.Ascent(kernel.gauge(kernels.Rotation(g))), Measure(x, labels=labels), 1.5)
    turned = np.einsum("nij,nj->ni", u, gauged.points)
    np.testing.assert_allclose(turned, plain.points, rtol=0, atol=1e-12)


def test_ascent_of_the_exponential_is_unnormalised_attention(rng):
    mu = Measure(sphere_points(rng, 11, 5), simplex(rng, 11))
    attention = mf.Attention(np.eye(5), np.eye(5))
    beta = 3.0
    kernel = kernels.Exponential(beta)
    expected = mf.UnnormalisedAttention(attention, beta, offset=0.0)(mu.points, mu)
    np.testing.assert_allclose(mf.Ascent(kernel)(mu.points, mu), expected, rtol=0, atol=1e-12)
    softmax = mf.SoftmaxAttention(attention, beta)(mu.points, mu)
    found = mf.NormalisedAscent(kernel)(mu.points, mu)
    np.testing.assert_allclose(found, beta * softmax, rtol=0, atol=1e-12)


def test_frozen_tokens_act_and_do_not_move(rng):
    prompt = Measure(sphere_points(rng, 3, 3), simplex(rng, 3))
    mu = Measure(sphere_points(rng, 5, 3), simplex(rng, 5))
    kernel = kernels.Exponential(2.0)
    both = kernel + 0.5 * kernels.Frozen(kernel, prompt)
    pull = (np.exp(2 * mu.points @ prompt.points.T) * prompt.weights) @ prompt.points
    pull -= np.sum(pull * mu.points, axis=1, keepdims=True) * mu.points
    found = mf.Ascent(both)(mu.points, mu) - mf.Ascent(kernel)(mu.points, mu)
    np.testing.assert_allclose(found, 0.5 * pull, rtol=0, atol=1e-13)
    potential = np.exp(2 * mu.points @ prompt.points.T) @ prompt.weights / 2
    gained = mf.energy(both, mu) - mf.energy(kernel, mu)
    np.testing.assert_allclose(gained, 0.5 * mu.weights @ potential, rtol=1e-12)


def test_bounds_hold_for_every_measure_and_are_reached_by_the_maximisers(rng):
    n, beta = 10, 2.0
    labels = rng.uniform(0, 2 * np.pi, n)
    w = simplex(rng, n)
    exponential = kernels.Exponential(beta)
    rope = kernels.RoPE(4)
    some = Measure(sphere_points(rng, 20, n, 4), w, labels)
    mixed = kernels.FourierToeplitz({0: -0.2, 1: 1.0, 2: -0.5})
    for kernel in (
        exponential.gauge(rope),
        kernels.Alibi(0.3) * exponential,
        mixed * exponential,
        mixed * kernels.Polynomial(2),
        mixed * kernels.Polynomial(3, 0.5) - exponential,
        -1.0 * kernels.Polynomial(2) * exponential.gauge(rope),
        -0.5 * kernels.Linear(),
    ):
        assert np.all(mf.energy(kernel, some) <= mf.energy_bound(kernel, some) + 1e-12)
    u = sphere_points(rng, 4)
    orbit = np.stack([rope.undo(jnp.asarray(xi), jnp.asarray(u)) for xi in labels])
    point = np.broadcast_to(u, (n, 4))
    bias = np.exp(-0.3 * np.abs(labels[:, None] - labels))
    for kernel, points, expected in (
        (exponential.gauge(rope), orbit, np.exp(beta) / (2 * beta)),
        (kernels.Alibi(0.3) * exponential, point, np.exp(beta) / (2 * beta) * (w @ bias @ w)),
    ):
        mu = Measure(points, w, labels)
        np.testing.assert_allclose(mf.energy_bound(kernel, mu), expected, rtol=1e-13)
        np.testing.assert_allclose(mf.energy(kernel, mu), expected, rtol=1e-13)
    np.testing.assert_allclose(
        mf.energy_bound(COSINE * kernels.Linear(), great_circle(32)), 0.25, rtol=1e-12
    )
    assert mf.energy_bound(kernels.Polynomial(2, -1.0), some) is None


def test_energy_is_that_of_the_law_not_of_how_it_is_split(rng):
    x, labels = sphere_points(rng, 6, 3) @ rotation(rng, 3), rng.normal(size=6)
    w = simplex(rng, 6)
    kernel = COSINE * kernels.Exponential(2.0)
    order = rng.permutation(12)
    split = Measure(
        np.repeat(x, 2, axis=0)[order], np.repeat(w / 2, 2)[order], np.repeat(labels, 2)[order]
    )
    np.testing.assert_allclose(
        mf.energy(kernel, split), mf.energy(kernel, Measure(x, w, labels)), rtol=1e-13
    )


def test_refuses_what_the_curve_and_the_normalised_ascent_cannot_use(rng):
    mu = Measure(sphere_points(rng, 5, 3))
    with pytest.raises(InputError, match="needs a kernel with positive values"):
        mf.NormalisedAscent(-1.0 * kernels.Exponential(1.0))(mu.points, mu)
    with pytest.raises(InputError, match="give the times of its leading axis"):
        mf.energy_curve(kernels.Linear(), mu, [0.0, 1.0])
