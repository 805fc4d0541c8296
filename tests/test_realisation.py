"""Exact realisation: phase maps in closed form, certificates, marginals that are the target."""

import itertools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.optimize
import scipy.special
import scipy.stats
from oracles import DTYPES, eps, perpendicular, rotation, simplex, sphere_points

import jaxmf as mf
from jaxmf import InputError
from jaxmf.kernels import Rotation
from jaxmf.quantiles import InverseCdf
from jaxmf.realisation import Phase

TURN = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 0]])  # about e₃
U = np.array([0.6, 0, 0.8])  # a latitude circle of radius 0.6
COUNT = 128


def bumpy(theta):
    return 2 + jnp.cos(2 * theta)


def planes(rng, *frequencies):
    """(G, u) on R^{2k+1} that turns k planes at these frequencies, and u seen by all of them."""
    d = 2 * len(frequencies) + 1
    block = np.zeros((d, d))
    for k, w in enumerate(frequencies):
        block[2 * k + 1, 2 * k], block[2 * k, 2 * k + 1] = w, -w
    q = rotation(rng, d)
    return q @ block @ q.T, q @ np.full(d, d**-0.5)


def on_orbit(generator, u, theta):
    """e^{θG}u by SciPy."""
    return np.stack([scipy.linalg.expm(t * np.asarray(generator)) @ u for t in np.ravel(theta)])


def masses(mu, points):
    """The mass that a measure has within 1e-9 of each of some points."""
    near = np.linalg.norm(np.asarray(mu.points)[:, None] - points, axis=-1) < 1e-9
    return np.asarray(mu.weights) @ near


def assert_certified(made, within=1e-12):
    c = made.certificate
    assert abs(c.gap) <= within and c.gradient_norm <= within
    assert c.distance.lower <= c.distance.value <= c.distance.upper


# Quantile functions


def test_the_phase_of_a_density_is_its_quantile_to_nine_digits():
    """F(θ) = (2θ + sin(2θ)/2)/4π for 2 + cos 2θ on [0, 2π], inverted to 30 digits by mpmath."""
    q = InverseCdf(bumpy, (0.0, 2 * np.pi))
    for p in (1e-9, 0.003, 0.2, 0.25, 0.61, 0.999999):
        with mpmath.workdps(30):
            truth = mpmath.findroot(
                lambda t, p=p: (2 * t + mpmath.sin(2 * t) / 2) / (4 * mpmath.pi) - p, 6 * p
            )
        assert float(q(jnp.asarray(p))) == pytest.approx(float(truth), abs=1e-11)


@pytest.mark.parametrize("kappa", [0.5, 50.0, 1e6])
def test_the_phase_of_peaked_densities_and_their_tails(kappa):
    """Von Mises laws, down to a peak no wider than a cell of the span: ∫ from Q(p) to Q(p′), by
    SciPy's adaptive quadrature, is p′ − p."""

    def f(t):
        return np.exp(-2 * kappa * np.sin(t / 2) ** 2)

    q = InverseCdf(lambda t: jnp.exp(-2 * kappa * jnp.sin(t / 2) ** 2), (-np.pi, np.pi))
    p = np.array([1e-8, 1e-6, 0.01, 0.2, 0.5, 0.77, 0.999])
    theta = np.asarray(q(jnp.asarray(p)))
    total = 2 * np.pi * scipy.special.ive(0, kappa)
    ends = [max(-np.pi, -9 * kappa**-0.5), *theta]
    parts = [
        scipy.integrate.quad(f, a, b, epsabs=0, epsrel=1e-13)[0] / total
        for a, b in itertools.pairwise(ends)
    ]
    np.testing.assert_allclose(np.cumsum(parts), p, rtol=0, atol=1e-12)


def test_quantiles_increase_and_keep_clear_of_gaps(rng):
    """Two arcs, of mass 1/3 and 2/3, with a jump of the density at each of their ends."""

    def arcs(t):
        return jnp.where((t > 1) & (t < 2), 1.0, jnp.where((t > 3) & (t < 4), 2.0, 0.0))

    q = InverseCdf(arcs, (0.0, 5.0))
    p = np.sort(rng.uniform(size=2000))
    theta = np.asarray(q(jnp.asarray(p)))
    assert np.all(np.diff(theta) >= 0)
    truth = np.where(p < 1 / 3, 1 + 3 * p, 3 + 1.5 * (p - 1 / 3))
    away = np.abs(p - 1 / 3) > 1e-3
    np.testing.assert_allclose(theta[away], truth[away], atol=2e-3)  # two cells of the span


def test_quantiles_have_derivatives_in_rank_and_parameters():
    """Q′ = 1/f at Q, and ∂Q/∂a = −∂ₐF/f for f = (1 + a cos θ)/2π, F = (θ + a sin θ)/2π."""

    def q(a, p):
        return InverseCdf(lambda t: 1 + a * jnp.cos(t), (0.0, 2 * np.pi))(p)

    a, p = 0.4, 0.3
    theta = float(q(a, p))
    f = (1 + a * np.cos(theta)) / (2 * np.pi)
    for derivative in (jax.jacfwd, jax.jacrev):
        da, dp = jax.jit(derivative(q, (0, 1)))(a, p)
        assert float(dp) == pytest.approx(1 / f, rel=1e-9)
        assert float(da) == pytest.approx(-np.sin(theta) / (2 * np.pi) / f, rel=1e-7)


# Orbits


@pytest.mark.parametrize("beta", [1e-3, 2.0, 60.0, 1000.0])
def test_the_maximiser_is_certified_at_every_temperature(beta):
    made = mf.realise_on_orbit(TURN, U, density=bumpy, beta=beta, count=COUNT)
    assert_certified(made)
    c = made.certificate
    offset = made.kernel.kernel.offset
    assert float(c.bound) == pytest.approx(np.exp(beta * (1 - offset)) / (2 * beta), rel=1e-12)


def test_other_states_have_less_energy_and_their_gap_is_that_of_their_phases(rng):
    """Tokens turned by ψᵢ: the energy is that of e^{β(0.36 cos(ψᵢ − ψⱼ) + 0.64)}/β."""
    made = mf.realise_on_orbit(TURN, U, density=bumpy, beta=3.0, count=COUNT)
    own = float(mf.energy(made.kernel, made.maximiser))
    assert float(made.certificate.energy) == pytest.approx(own, rel=1e-13)
    psi = rng.uniform(0, 0.3, COUNT)
    turned = on_orbit(TURN, np.eye(3), psi)
    mu = made.maximiser.move(jnp.einsum("nij,nj->ni", turned, made.maximiser.points))
    cosine = 0.36 * np.cos(psi[:, None] - psi) + 0.64
    expected = np.exp(3.0 * cosine).mean() / 6.0
    assert float(mf.energy(made.kernel, mu)) == pytest.approx(expected, rel=1e-12)
    assert expected < own * (1 - 1e-3)


@pytest.mark.parametrize("case", ["d=2", "d=3", "d=5"])
def test_tokens_are_the_orbit_at_the_phase(rng, case):
    generator, u = {
        "d=2": (np.array([[0, -3.0], [3, 0]]), np.array([0.6, 0.8])),
        "d=3": (TURN, U),
        "d=5": planes(rng, 2.0, 3.0),
    }[case]
    period = {"d=2": 2 * np.pi / 3, "d=3": 2 * np.pi, "d=5": 2 * np.pi}[case]
    made = mf.realise_on_orbit(
        generator, u, density=lambda t: 1.5 + jnp.sin(2 * np.pi * t / period), count=COUNT
    )
    assert_certified(made)
    labels = jnp.asarray(rng.uniform(size=(2, 3)))
    # F(θ) = θ/T + (1 − cos(2πθ/T))/(3π) at θ = φ(ξ) is ξ, for the smallest period T.
    theta = np.asarray(jax.vmap(made.kernel.by.phase)(labels.ravel()))
    cdf = theta / period + (1 - np.cos(2 * np.pi * theta / period)) / (3 * np.pi)
    np.testing.assert_allclose(cdf, np.ravel(labels), atol=1e-11)
    truth = on_orbit(generator, u, theta).reshape(2, 3, -1)
    np.testing.assert_allclose(made.tokens(labels), truth, atol=1e-12)


def test_the_distance_is_that_of_two_discretisations_and_falls_like_one_over_count():
    """For the uniform law a quarter of an arc 2π/count on a circle of radius 0.6, exactly."""
    found = []
    for count in (64, 128, 256):
        made = mf.realise_on_orbit(TURN, U, density=lambda t: jnp.ones(()), count=count)
        distance = made.certificate.distance
        assert distance.method == "assignment" and distance.lower == distance.upper
        chord = 2 * 0.6 * np.sin(2 * np.pi / (4 * count) / 2)
        assert float(distance.value) == pytest.approx(chord, rel=1e-7)
        made = mf.realise_on_orbit(TURN, U, density=bumpy, count=count)
        found.append(float(made.certificate.distance.value))
    np.testing.assert_allclose(np.array(found[:-1]) / found[1:], 2, rtol=0.01)


def test_a_quantile_function_is_taken_as_it_is(rng):
    made = mf.realise_on_orbit(
        TURN, U, quantile=lambda p: -jnp.log1p(-p), span=(0, 100), labels=mf.Interval(-1, 3),
        count=COUNT,
    )  # fmt: skip
    assert_certified(made)
    labels = rng.uniform(-1, 3, 5)
    theta = scipy.stats.expon.ppf((labels + 1) / 4)
    np.testing.assert_allclose(made.tokens(labels), on_orbit(TURN, U, theta), atol=1e-12)


def test_a_law_on_the_sphere_is_restricted_to_the_orbit(rng):
    """κ⟨m, x(θ)⟩ = κ·0.6·|m_⟂| cos(θ − θ₀) + constant: a von Mises law of θ."""
    mean = np.array([1.0, 2.0, 2.0]) / 3
    law = mf.VonMisesFisher(mean, 40.0)
    made = mf.realise_on_orbit(TURN, U, law=law, span=(-np.pi, np.pi), count=COUNT)
    assert_certified(made)
    truth = scipy.stats.vonmises(40 * 0.6 * np.hypot(*mean[:2]), loc=np.arctan2(mean[1], mean[0]))
    theta = np.array([0.5, 1.0, 1.4])
    p = truth.cdf(theta) - truth.cdf(-np.pi)
    np.testing.assert_allclose(jax.vmap(made.kernel.by.phase)(jnp.asarray(p)), theta, atol=1e-9)


@pytest.mark.parametrize("form", ["angles", "points", "law"])
def test_a_sample_on_the_orbit_is_the_marginal_exactly(rng, form):
    generator, u = planes(rng, 1.0, 2.5)  # period 4π
    theta = rng.uniform(0, 4 * np.pi, 6)
    points, w = on_orbit(generator, u, theta), simplex(rng, 6)
    target = {
        "angles": {"sample": theta, "weights": w},
        "points": {"sample": points, "weights": w},
        "law": {"law": mf.Tokens(points, w)},
    }[form]
    made = mf.realise_on_orbit(generator, u, **target, count=50)
    assert_certified(made)
    np.testing.assert_allclose(masses(made.maximiser, points), w, rtol=1e-12)
    c = made.certificate.distance
    assert c.upper < 1e-7 and c.reached
    # Labels in between have the sample as well, in proportion to its weights.
    labels = mf.Interval().nodes(2000)[0]
    x = made.tokens(labels)
    np.testing.assert_allclose(masses(mf.Measure(x), points), w, atol=1e-3)
    assert made.maximiser.size == pytest.approx(50, abs=3)


def test_equal_weights_have_an_exact_distance_of_zero(rng):
    theta = rng.uniform(0, 2 * np.pi, 16)
    made = mf.realise_on_orbit(TURN, U, sample=theta, count=COUNT)
    c = made.certificate.distance
    assert c.method == "assignment" and float(c.upper) < 1e-14
    np.testing.assert_allclose(masses(made.maximiser, on_orbit(TURN, U, theta)), 1 / 16)


def test_orbits_that_never_close_need_a_span(rng):
    generator, u = planes(rng, 1.0, 2**0.5)
    with pytest.raises(InputError, match=r"never closes: its frequencies 1, 1\.41421"):
        mf.realise_on_orbit(generator, u, density=bumpy)
    made = mf.realise_on_orbit(generator, u, density=bumpy, span=(0, 2 * np.pi), count=COUNT)
    assert_certified(made)
    theta = float(made.kernel.by.phase(jnp.asarray(0.3)))
    assert (2 * theta + np.sin(2 * theta) / 2) / (4 * np.pi) == pytest.approx(0.3, abs=1e-11)


def test_frequencies_that_u_does_not_see_do_not_count(rng):
    generator, u = planes(rng, 1.0, 2**0.5)
    _, vectors = np.linalg.eigh(generator @ generator)
    plane = vectors[:, 2:4] @ vectors[:, 2:4].T  # where G² = −1
    u = plane @ u / np.linalg.norm(plane @ u)
    made = mf.realise_on_orbit(generator, u, density=bumpy, count=COUNT)
    theta = float(made.kernel.by.phase(jnp.asarray(0.5)))
    assert theta == pytest.approx(np.pi, abs=1e-11)


# Atoms of labels


def test_atoms_of_labels_take_the_atoms_they_fit_in():
    labels = mf.Atoms([5, 1, 3], [0.5, 0.2, 0.3])  # ranks: 1 → (0, .2), 3 → (.2, .5), 5 → (.5, 1)
    made = mf.realise_on_orbit(TURN, U, sample=[2.0, 1.0], weights=[0.5, 0.5], labels=labels)
    assert_certified(made)
    np.testing.assert_allclose(
        made.maximiser.points, on_orbit(TURN, U, [2.0, 1.0, 1.0]), atol=1e-14
    )
    np.testing.assert_allclose(made.maximiser.weights, [0.5, 0.2, 0.3])
    assert made.certificate.distance.upper < 1e-7


def test_an_atom_that_would_be_split_is_named():
    labels = mf.Atoms([5, 1, 3], [0.4, 0.2, 0.4])
    with pytest.raises(InputError, match=r"the label 3 has mass 0\.4, from rank 0\.2 to 0\.6"):
        mf.realise_on_orbit(TURN, U, sample=[2.0, 1.0], labels=labels)
    with pytest.raises(InputError, match="the label 3 has mass"):
        mf.realise_by_gauge(sample=np.eye(2), labels=labels)


@pytest.mark.parametrize(
    "target", [{"density": bumpy}, {"quantile": lambda p: p}, {"law": mf.Uniform(3)}]
)
def test_targets_without_atoms_refuse_labels_with_atoms(target):
    with pytest.raises(InputError, match="the law of the labels has atoms and the target has none"):
        mf.realise_on_orbit(TURN, U, **target, labels=mf.Atoms([0, 1]))
    if "law" in target:
        with pytest.raises(InputError, match="the law of the labels has atoms"):
            mf.realise_by_gauge(**target, labels=mf.Atoms([0, 1]))


# Gauges


def curve(xi):
    return mf.sphere.normalise(jnp.stack([xi, xi**2 - 0.2, 1 - xi, jnp.sin(3 * xi)]))


@pytest.mark.parametrize("chosen", [False, True])
def test_any_map_is_realised_with_any_u(rng, chosen):
    u = sphere_points(rng, 4) if chosen else None
    made = mf.realise_by_gauge(curve, u=u, beta=5.0, count=COUNT)
    assert_certified(made)
    np.testing.assert_allclose(made.u, np.eye(4)[3] if u is None else u)
    labels = jnp.asarray(rng.uniform(size=9))
    np.testing.assert_allclose(made.tokens(labels), jax.vmap(curve)(labels), atol=1e-14)
    again = mf.realise_by_gauge(curve, u=u, count=2 * COUNT)
    ratio = made.certificate.distance.value / again.certificate.distance.value
    assert float(ratio) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reflection_is_right_to_rounding_however_close_the_map_comes_to_u(rng, dtype):
    u = sphere_points(rng, 5)
    v = perpendicular(u)
    u, v = (jnp.asarray(a, dtype) for a in (u, v))

    def close(xi):
        return mf.sphere.normalise(jnp.cos(xi) * u + jnp.sin(xi) * v)

    labels = jnp.asarray([0.0, *10.0 ** np.arange(-18, 0.5, 0.25), np.pi], dtype)
    made = mf.realise_by_gauge(close, u=u, labels=labels)
    assert made.maximiser.points.dtype == dtype
    assert_certified(made, 100 * eps(dtype))
    error = np.linalg.norm(np.asarray(made.tokens(labels) - jax.vmap(close)(labels)), axis=1)
    assert error.max() <= 8 * eps(dtype)


def test_the_map_may_take_prompts_or_vectors_as_labels(rng):
    points = jnp.asarray(sphere_points(rng, 6, 3))
    made = mf.realise_by_gauge(lambda k: points[k], labels=jnp.arange(6))
    assert_certified(made)
    np.testing.assert_allclose(made.maximiser.points, points, atol=1e-14)
    assert made.certificate.distance.value < 1e-14
    made = mf.realise_by_gauge(mf.sphere.normalise, labels=2.0 * points)
    np.testing.assert_allclose(made.tokens(3 * points), points, atol=1e-14)
    weighted = mf.realise_by_gauge(lambda k: points[k], labels=mf.Atoms([4, 1], [0.3, 0.7]))
    np.testing.assert_allclose(weighted.maximiser.weights, [0.3, 0.7])


def test_a_sample_is_realised_in_its_order_by_pieces_of_the_labels(rng):
    points, w = sphere_points(rng, 5, 3), simplex(rng, 5)
    made = mf.realise_by_gauge(sample=points, weights=w, labels=mf.Interval(0, 10), count=40)
    assert_certified(made)
    np.testing.assert_allclose(masses(made.maximiser, points), w, rtol=1e-12)
    ends = 10 * np.cumsum(w)
    np.testing.assert_allclose(made.tokens(ends - 1e-6), points, atol=1e-14)
    np.testing.assert_allclose(made.tokens(ends - 10 * w + 1e-6), points, atol=1e-14)
    assert made.certificate.distance.upper < 1e-7
    given = mf.realise_by_gauge(law=mf.Tokens(points, w), labels=mf.Interval(0, 10), count=40)
    np.testing.assert_array_equal(given.maximiser.points, made.maximiser.points)


def test_a_law_on_the_circle_is_realised_by_a_genuine_map(rng):
    law = mf.VonMisesFisher([0.0, 1.0], 30.0)
    made = mf.realise_by_gauge(law=law, count=COUNT)
    assert_certified(made)
    truth = scipy.stats.vonmises(30.0, loc=np.pi / 2)
    p = np.array([0.01, 0.4, 0.9])
    x = np.asarray(made.tokens(p))
    np.testing.assert_allclose(np.arctan2(x[:, 1], x[:, 0]), truth.ppf(p), atol=1e-8)
    assert made.certificate.distance.method == "assignment"


def test_laws_on_higher_spheres_are_realised_through_their_tokens():
    made = mf.realise_by_gauge(law=mf.Uniform(3), count=COUNT)
    assert_certified(made)
    # Two rules of 128 nodes on S²: their distance is of the size of their spacing.
    assert 0.05 < float(made.certificate.distance.value) < 0.25
    made = mf.realise_by_gauge(law=mf.Uniform(4), key=jax.random.key(0), count=COUNT)
    assert_certified(made)
    assert made.maximiser.dimension == 4
    with pytest.raises(InputError, match=r"a law on S\^3 is realised through a sample; give a key"):
        mf.realise_by_gauge(law=mf.Uniform(4))


def test_a_law_with_weighted_nodes_has_a_distance_with_ends(rng):
    law = mf.VonMisesFisher([0.0, 0.6, 0.8], 4.0)
    made = mf.realise_by_gauge(law=law, count=64, seconds=1)
    assert_certified(made)
    mean = np.asarray(made.maximiser.weights @ made.maximiser.points)
    length = 1 / np.tanh(4.0) - 1 / 4.0
    np.testing.assert_allclose(mean, length * np.array([0, 0.6, 0.8]), atol=0.02)
    assert made.certificate.distance.method == "interval"


# Precision, transformations, derivatives


def test_single_precision_throughout():
    made = mf.realise_on_orbit(
        TURN, jnp.asarray(U, jnp.float32), density=bumpy, beta=2.0, count=COUNT
    )
    mu = made.maximiser
    assert mu.points.dtype == mu.labels.dtype == made.certificate.energy.dtype == jnp.float32
    assert_certified(made, 1e-5)
    assert float(made.certificate.distance.value) < 0.02
    assert made.tokens(mu.labels).dtype == jnp.float32


def test_a_realisation_goes_through_jit_and_vmap():
    made = mf.realise_on_orbit(TURN, U, density=bumpy, count=COUNT)
    labels = made.maximiser.labels
    found = jax.jit(lambda made, labels: made.tokens(labels))(made, labels)
    np.testing.assert_allclose(found, made.maximiser.points, atol=1e-15)
    one_by_one = jax.vmap(made.tokens)(labels[:5])
    np.testing.assert_allclose(one_by_one, made.maximiser.points[:5], atol=1e-15)


def test_derivatives_in_a_sample_and_the_temperature():
    def found(angle, beta):
        sample = jnp.stack([angle, 2.0])
        made = mf.realise_on_orbit(TURN, U, sample=sample, beta=beta, count=2)
        return made.maximiser.points[0, 1], made.certificate.energy

    (height, nothing), (still, energy) = jax.jacfwd(found, (0, 1))(0.5, 2.0)
    assert float(height) == pytest.approx(0.6 * np.cos(0.5), rel=1e-10)
    assert float(energy) == pytest.approx(np.exp(2.0) / 4 * (1 - 1 / 2), rel=1e-10)
    assert abs(float(nothing)) < 1e-15 and abs(float(still)) < 1e-12


def test_derivatives_in_a_density():
    def height(a):
        phase = Phase(InverseCdf(lambda t: 1 + a * jnp.cos(t), (0.0, 2 * np.pi)), mf.Interval())
        return Rotation(-TURN).along(phase).undo(jnp.asarray(0.3), jnp.asarray(U))[1]

    # x₂ = 0.6 sin θ with θ + a sin θ = 2π·0.3.
    a = 0.4
    theta = scipy.optimize.brentq(lambda t: t + a * np.sin(t) - 0.6 * np.pi, 0, np.pi)
    slope = 0.6 * np.cos(theta) * -np.sin(theta) / (1 + a * np.cos(theta))
    assert float(jax.jit(jax.grad(height))(a)) == pytest.approx(slope, rel=1e-7)


# What is wrong, in one sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "exactly one target of density, quantile, sample, law; there is none"),
        ({"density": bumpy, "law": mf.Uniform(3)}, "there is density and law"),
        ({"density": bumpy, "weights": [1.0]}, "weights are given without a sample"),
        ({"density": lambda t: jnp.cos(t)}, r"density is -\d.* at .*; it must be finite and ≥ 0"),
        ({"density": lambda t: 1 / (t - t)}, "density is inf at"),
        ({"density": lambda t: 0.0 * t}, "density is zero on all of the span"),
        ({"quantile": lambda p: 1 - p}, "quantile falls from"),
        ({"quantile": lambda p: 7 * p}, r"quantile is 6\.28.* outside the span \[0, 6\.28319\]"),
        ({"quantile": lambda p: jnp.log(p - 0.5)}, "quantile is not finite at p = "),
        ({"quantile": lambda p: jnp.stack([p, p])}, r"quantile returns shape \(2,\)"),
        ({"density": bumpy, "span": (1, 1)}, r"span is \(1\.0, 1\.0\)"),
        ({"density": bumpy, "count": 0}, "count is 0"),
        ({"density": bumpy, "beta": -1.0}, "beta is -1.0"),
        ({"sample": [[0.6, 0, 0.8], [0, 2.0, 0]]}, r"points\[1\] has length 2"),
        ({"sample": [[0.6, 0, 0.8], [0, 0.8, 0.6]]}, r"sample\[1\] is 0\.28.* away from the orbit"),
        ({"sample": [[0.6, 0.8]]}, r"points must be \(n, 3\)"),
        ({"sample": [0.0, np.nan]}, r"sample\[1\] is nan, not finite"),
        ({"sample": [0.0, 4.0], "span": (0, 3)}, r"sample\[1\] is 4, outside the span \[0, 3\]"),
        ({"sample": [0.0, 1.0], "weights": [0.5, 0.4]}, "weights sum to 0.9"),
        ({"law": mf.Uniform(2)}, "the law has dimension 2 and u 3"),
        ({"density": bumpy, "generator": np.eye(3)}, "generator is not skew"),
        ({"density": bumpy, "u": [0.6, 0.0, 0.9]}, "u has length 1.08"),
        ({"density": bumpy, "u": [0.6, 0.8]}, r"generator has shape \(3, 3\) and u \(2,\)"),
        ({"density": bumpy, "u": [0.0, 0, 1]}, "u is fixed by the generator"),
    ],
)
def test_what_is_no_law_on_an_orbit_is_said(arguments, sentence):
    arguments = {"generator": TURN, "u": U} | arguments
    with pytest.raises(InputError, match=sentence):
        mf.realise_on_orbit(arguments.pop("generator"), arguments.pop("u"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "exactly one target of map, sample, law; there is none"),
        ({"map": curve, "sample": np.eye(3)}, "there is map and sample"),
        ({"map": lambda xi: jnp.stack([xi, xi])}, r"the map has length .* at the label 0\.0"),
        ({"map": lambda xi: xi}, r"the map returns shape \(\) for one label"),
        ({"map": curve, "u": [1.0, 0]}, r"u has shape \(2,\); .* shape \(4,\)"),
        ({"map": curve, "u": [1.0, 1, 0, 0]}, "u has length 1.414"),
        ({"sample": [[1.0, 0], [0.5, 0]]}, r"points\[1\] has length 0.5"),
        ({"sample": [[1.0, 0]], "weights": [0.5, 0.5]}, "weights have shape"),
        ({"map": curve, "labels": [0.1, 0.1]}, r"values\[1\] occurs before"),
    ],
)
def test_what_is_no_target_of_a_gauge_is_said(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        mf.realise_by_gauge(**arguments)


def test_labels_of_another_shape_are_refused():
    made = mf.realise_by_gauge(mf.sphere.normalise, labels=np.eye(3))
    with pytest.raises(InputError, match=r"labels have shape \(5,\).*shape \(3,\) each"):
        made.tokens(np.zeros(5))
