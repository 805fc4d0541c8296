"""The spectral dichotomy: energies in closed form, searches that find nothing better, bounds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rotation, sphere_points

import jaxmf as mf
from jaxmf import InputError
from jaxmf.kernels import FourierToeplitz, Linear, Toeplitz

CIRCLE = 2 * np.pi * np.arange(32) / 32


def direct(k, points, labels, weights=None):
    """½ Σ wᵢwⱼ⟨xᵢ, xⱼ⟩ k(ξᵢ − ξⱼ), in NumPy."""
    x, xi = np.asarray(points), np.asarray(labels)
    w = np.full(len(x), 1 / len(x)) if weights is None else weights
    return w @ (x @ x.T * k(xi[:, None] - xi)) @ w / 2


def test_cosine_has_a_great_circle_with_energy_a_quarter():
    found = mf.dichotomy(jnp.cos)
    assert not found.collapses and found.mode == 1
    assert float(found.energy) == pytest.approx(1 / 4, rel=1e-12)
    mu = found.state(CIRCLE, 4)
    assert mu.dimension == 4
    assert direct(np.cos, mu.points, CIRCLE) == pytest.approx(1 / 4, rel=1e-12)
    h = Linear() * FourierToeplitz({1: 1.0})
    assert float(mf.energy(h, mu)) == pytest.approx(1 / 4, rel=1e-12)
    # The best on one axis, sign(cos ξ)u, comes to 2/π²; the constant to nothing.
    labels = 2 * np.pi * (np.arange(1024) + 0.5) / 1024
    axis = np.sign(np.cos(labels))[:, None] * np.array([0.6, 0.8])
    assert direct(np.cos, axis, labels) == pytest.approx(2 / np.pi**2, rel=1e-5)
    assert direct(np.cos, np.tile([0.6, 0.8], (1024, 1)), labels) == pytest.approx(0, abs=1e-15)


def test_parseval_for_any_state(rng):
    """E = ½ Σ k̂_m |x̂_m|² by NumPy's FFT, with the coefficients that are reported."""
    amplitudes = {m: rng.normal() for m in (0, 1, 2, 5)}
    k = FourierToeplitz(amplitudes)
    coefficients = mf.dichotomy(k).coefficients
    x = sphere_points(rng, 32, 3)
    hat = np.sum(np.abs(np.fft.fft(x, axis=0) / 32) ** 2, axis=1)
    energy = sum(float(c) * (hat[m] + (hat[-m] if m else 0)) for m, c in coefficients.items()) / 2
    mu = mf.Measure(x, labels=CIRCLE)
    assert float(mf.energy(Linear() * k, mu)) == pytest.approx(energy, rel=1e-12)


@partial(jax.jit, static_argnames="steps")
def climb(matrix, x, steps=3000):
    """Projected gradient ascent of ½⟨x, Mx⟩ from many starts (s, n, d)."""

    def step(x, _):
        x = x + jnp.einsum("ij,sjd->sid", matrix, x)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True), None

    x = jax.lax.scan(step, x, length=steps)[0]
    return jnp.einsum("sid,ij,sjd->s", x, matrix, x) / 2


@pytest.mark.parametrize("winner", [0, 3])
@pytest.mark.parametrize("d", [2, 3])
def test_a_search_from_many_starts_finds_the_prediction_and_nothing_better(rng, winner, d):
    """Random spectra on 16 labels, where mode 0 wins and where mode 3 does."""
    amplitudes = {m: rng.uniform(-1, 0.8) * (1 if m == 0 else 2) for m in range(6)}
    amplitudes[winner] = 1.0 if winner == 0 else 2.0
    k = FourierToeplitz(amplitudes)
    found = mf.dichotomy(k)
    assert found.mode == winner and found.collapses == (winner == 0)
    labels = 2 * np.pi * np.arange(16) / 16
    difference = labels[:, None] - labels
    matrix = sum(a * np.cos(m * difference) for m, a in amplitudes.items()) / 16**2
    # Shifting the diagonal changes the energy by a constant, and makes each step an ascent.
    shift = max(0, -np.linalg.eigvalsh(matrix)[0])
    scale = 16 / 2
    shifted = scale * (matrix + shift * np.eye(16))
    energies = np.asarray(climb(shifted, sphere_points(rng, 64, 16, d))) / scale - shift * 16 / 2
    predicted = float(found.energy)
    assert energies.max() <= predicted + 1e-12
    assert energies.max() == pytest.approx(predicted, rel=1e-6)
    state = found.state(labels, d)
    assert float(mf.energy(Linear() * k, state)) == pytest.approx(predicted, rel=1e-12)


def test_predicted_states_are_critical_and_rotations_of_them_as_good(rng):
    k = FourierToeplitz({0: 0.2, 2: 1.5, 3: -1.0}, period=5.0)
    found = mf.dichotomy(k)
    labels = 5 * np.arange(12) / 12
    mu = found.state(labels, 3)
    h = Linear() * k
    assert float(mf.energy(h, mu)) == pytest.approx(1.5 / 4, rel=1e-12)
    assert float(mf.dissipation(h, mu)) < 1e-28
    turned = mu.move(mu.points @ rotation(rng, 3).T)
    assert float(mf.energy(h, turned)) == pytest.approx(1.5 / 4, rel=1e-12)


def test_ties_are_said_and_every_tied_mode_attains():
    found = mf.dichotomy(FourierToeplitz({0: 0.5, 1: 1.0, 4: 1.0, 2: 0.3}))
    assert found.modes == (0, 1, 4) and found.collapses
    assert "tie" in found.verdict and "1, 4" in found.verdict
    h = Linear() * FourierToeplitz({0: 0.5, 1: 1.0, 4: 1.0, 2: 0.3})
    for mode in found.modes:
        mu = found.state(CIRCLE, 3, mode=mode)
        assert float(mf.energy(h, mu)) == pytest.approx(0.25, rel=1e-12)
    assert "tie" in mf.dichotomy(FourierToeplitz({1: 1.0, 4: 1.0})).verdict


@pytest.mark.parametrize(
    ("amplitudes", "modes"),
    [
        ({0: -0.5, 1: -1.0, 2: -0.2}, (3,)),  # nothing but modes that k lacks has energy 0
        ({1: -1.0}, (0, 2)),  # a single point has as well
        ({0: 0.0, 1: -1.0}, (0, 2)),
        ({0: -1.0, 2: 0.0}, (1, 2)),
        ({0: 0.0}, (0, 1)),
    ],
)
def test_where_no_coefficient_is_positive_the_best_energy_is_zero(rng, amplitudes, modes):
    k = FourierToeplitz(amplitudes)
    found = mf.dichotomy(k)
    assert found.modes == modes and found.energy == 0
    assert "no coefficient is positive" in found.verdict
    for mode in modes:
        mu = found.state(CIRCLE, 2, mode=mode)
        assert float(mf.energy(Linear() * k, mu)) == pytest.approx(0, abs=1e-15)
    anything = mf.Measure(sphere_points(rng, 32, 2), labels=CIRCLE)
    assert float(mf.energy(Linear() * k, anything)) <= 1e-15


def test_verdicts_in_words():
    assert mf.dichotomy(FourierToeplitz({0: 1.0})).verdict == "collapse: a single point, energy 0.5"
    assert mf.dichotomy(jnp.cos).verdict == "no collapse: a great circle of mode 1, energy 0.25"


def test_functions_kernels_and_series_agree():
    def k(tau):
        return 0.3 + jnp.cos(2 * jnp.pi * tau / 3) ** 3

    series = FourierToeplitz({0: 0.3, 1: 0.75, 3: 0.25}, period=3.0)
    for other in (k, Toeplitz(k)):
        found = mf.dichotomy(other, period=3.0)
        assert found.modes == mf.dichotomy(series).modes == (1,)
        assert float(found.energy) == pytest.approx(0.75 / 4, rel=1e-12)
        assert found.period == 3.0


def test_the_derivative_of_the_energy_is_in_the_winning_amplitude():
    def energy(a):
        return mf.dichotomy(FourierToeplitz({0: a[0], 1: a[1], 2: a[2]})).energy

    np.testing.assert_allclose(jax.grad(energy)(jnp.array([0.1, 0.9, 0.5])), [0, 1 / 4, 0])
    np.testing.assert_allclose(jax.grad(energy)(jnp.array([0.6, 0.9, 0.5])), [1 / 2, 0, 0])


def test_float32_states():
    mu = mf.dichotomy(jnp.cos).state(jnp.asarray(CIRCLE, jnp.float32), 3)
    assert mu.points.dtype == jnp.float32


def test_the_bound_for_finitely_many_labels_is_attained_by_the_predicted_state():
    k = FourierToeplitz({0: 0.1, 3: 1.0, 1: 0.4})
    found = mf.dichotomy(k)
    bound = mf.energy_bound(Linear() * k, found.state(CIRCLE, 2))
    assert bound == pytest.approx(float(found.energy), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: mf.dichotomy(jnp.sin), "not even"),
        (lambda: mf.dichotomy(lambda t: jnp.cos(40 * t)), "past mode 32"),
        (lambda: mf.dichotomy(FourierToeplitz({1: jnp.nan})), "traced or not finite"),
        (lambda: mf.dichotomy(jnp.cos).state(CIRCLE, 1), "d is 1"),
        (lambda: mf.dichotomy(jnp.cos).state(np.zeros((3, 2)), 3), r"shape \(3, 2\)"),
    ],
)
def test_what_is_wrong_is_said(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


def test_under_jit_it_says_that_it_needs_values():
    def energy(a):
        return mf.dichotomy(FourierToeplitz({1: a})).energy

    with pytest.raises(InputError, match="traced"):
        jax.jit(energy)(1.0)
