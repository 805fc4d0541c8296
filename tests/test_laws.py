"""Laws: samples against moments, nodes against integrals, densities against other people's."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from oracles import (
    MEAN_RESULTANT,
    log_uniform_mass,
    perpendicular,
    simplex,
    sphere_points,
    uniform_rule,
)
from scipy import special, stats

from jaxmf import (
    Attention,
    InputError,
    Mixture,
    Tokens,
    Uniform,
    VonMisesFisher,
    ZeroTemperature,
    flow,
    spectrum,
    wasserstein,
)
from jaxmf.laws import nodes

KEY = jax.random.key(7)

# Sample means must lie within this many standard errors. Keys are fixed, so a test that passes
# always passes; by chance one in two million sound samplers would fail.
STANDARD_ERRORS = 5


def assert_mean(values, expected, deviation=None):
    """The mean of independent values agrees with its expectation, to five standard errors."""
    deviation = np.std(values) if deviation is None else deviation
    error = abs(float(np.mean(values)) - expected)
    assert error <= STANDARD_ERRORS * deviation / math.sqrt(len(values))


def log_area(d):
    return math.log(2) + d / 2 * math.log(math.pi) - special.gammaln(d / 2)


# Samples


@pytest.mark.parametrize("d", [2, 3, 5, 384])
def test_uniform_samples_have_the_moments_of_the_uniform_law(rng, d):
    x = np.asarray(Uniform(d).sample(KEY, 4000).points)
    t = x @ sphere_points(rng, d)
    assert_mean(t, 0, deviation=d**-0.5)
    # E⟨x, e⟩² = 1/d and E⟨x, e⟩⁴ = 3/(d(d + 2)).
    assert_mean(t**2, 1 / d)
    assert_mean(t**4, 3 / (d * (d + 2)))


def check_von_mises_fisher(rng, d, kappa, count):
    """⟨m, x⟩ has mean A = A_d(κ) and mean square 1 − (d − 1)A/κ; x is isotropic about m."""
    m = sphere_points(rng, d)
    mu = VonMisesFisher(3 * m, kappa).sample(KEY, count)
    x = np.asarray(mu.points, np.float64)
    assert np.all(np.isfinite(x)) and mu.size == count
    with mpmath.workdps(40):  # 1 − A is 5e-7 at κ = 10⁶
        half, k = mpmath.mpf(d) / 2, mpmath.mpf(max(kappa, 1e-20))
        a = mpmath.besseli(half, k) / mpmath.besseli(half - 1, k)
        across = (d - 1) * a / k
        drop, deviation = float(1 - a), float(mpmath.sqrt(1 - across - a * a))
        across = float(across)
    offset = x - m
    # 1 − ⟨m, x⟩ = |x − m|²/2, without cancellation.
    assert_mean(np.sum(offset**2, axis=1) / 2, drop, deviation)
    transverse = offset - np.outer(offset @ m, m)
    assert_mean(np.sum(transverse**2, axis=1), across)
    f = perpendicular(m)
    assert_mean(transverse @ f, 0, math.sqrt(across / (d - 1)))
    assert_mean((transverse @ f) ** 2, across / (d - 1))
    if kappa == 1e6:
        np.testing.assert_allclose(across, (d - 1) / kappa, rtol=1e-3)


@pytest.mark.parametrize(
    ("d", "kappa"),
    [
        (2, 0.0),
        (2, 1e6),
        (3, 0.5),
        (3, 1e6),
        (5, 8.0),
        (384, 0.0),
        (384, 1e3),
        (384, 1e6),
    ],
)
def test_von_mises_fisher_samples_have_its_moments(rng, d, kappa):
    check_von_mises_fisher(rng, d, kappa, 2000 if d == 384 else 20_000)


@pytest.mark.parametrize(("d", "kappa"), [(3, 1e7), (384, 1e6)])
def test_von_mises_fisher_samples_in_single_precision(rng, d, kappa):
    # Many of them: an acceptance ratio with cancelling terms of size κ shows as a bias of 3%.
    with jax.enable_x64(False):
        check_von_mises_fisher(rng, d, kappa, 2000 if d == 384 else 100_000)


def test_mixture_samples_its_components_in_proportion(rng):
    e = sphere_points(rng, 3)
    law = Mixture([VonMisesFisher(e, 200.0), Tokens(-e[None])], [6, 2])
    assert law.weights == (0.75, 0.25)
    height = np.asarray(law.sample(KEY, 10_000).points) @ e
    assert np.all((height > 0.8) | np.isclose(height, -1))
    assert_mean(height > 0, 0.75, deviation=math.sqrt(0.75 * 0.25))
    assert_mean(height[height > 0], 1 / math.tanh(200) - 1 / 200)  # A₃(κ)


def test_keys_decide_samples():
    for law in (Uniform(3), VonMisesFisher([1, 0, 0], 5.0), Mixture([Uniform(3)])):
        sample = jax.jit(lambda key, law=law: law.sample(key, 5).points)
        x, again, other = (sample(k) for k in (KEY, KEY, jax.random.key(8)))
        assert np.array_equal(x, again) and not np.any(x == other)


# Densities


@pytest.mark.parametrize("kappa", [0.0, 1e-3, 0.5, 8.0, 300.0, 1e4])
@pytest.mark.parametrize("d", [2, 3, 5, 384])
def test_densities_integrate_to_one(rng, d, kappa):
    """∫ρ = |S^{d−2}| ∫₀^π ρ(cos θ m + sin θ f) sin^{d−2} θ dθ for ρ zonal about m."""
    m = sphere_points(rng, d)
    t, a = special.roots_legendre(1000)
    angle = np.pi / 2 * (1 + t)
    x = jnp.asarray(np.cos(angle)[:, None] * m + np.sin(angle)[:, None] * perpendicular(m))
    log_ring = log_area(d - 1) + (d - 2) * np.log(np.sin(angle)) if d > 2 else math.log(2)
    for law in (VonMisesFisher(m, kappa), Mixture([VonMisesFisher(m, kappa), Uniform(d)], [1, 3])):
        mass = np.pi / 2 * a @ np.exp(law.log_density(x) + log_ring)
        # At κ = 10⁴ the exponent is a difference of numbers near 10⁴, known to 10⁻¹¹.
        np.testing.assert_allclose(mass, 1, rtol=1e-10)


@pytest.mark.parametrize("d", [2, 3, 5])
@pytest.mark.parametrize("kappa", [0.5, 8.0, 1e4])
def test_von_mises_fisher_density_agrees_with_scipy(rng, d, kappa):
    m, x = sphere_points(rng, d), sphere_points(rng, 20, d)
    expected = stats.vonmises_fisher(m, kappa).logpdf(x)
    density = VonMisesFisher(m, kappa).log_density(jnp.asarray(x))
    np.testing.assert_allclose(density, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("kappa", [1e-300, 1e-8, 0.1, 1.0, 5.0, 40.0])
def test_density_where_bessel_functions_underflow(rng, kappa):
    m, x = sphere_points(rng, 2, 384)
    expected = kappa * (m @ x) - log_area(384) - log_uniform_mass(384, kappa)
    density = VonMisesFisher(m, kappa).log_density(jnp.asarray(x))
    # log I₁₉₁(10⁻³⁰⁰) is −132,000; the density near e^{593} is what remains after cancellation.
    np.testing.assert_allclose(density, expected, atol=1e-9)


@pytest.mark.parametrize("d", [2, 3, 5])
@pytest.mark.parametrize("kappa", [0.0, 0.3, 4.0, 60.0])
def test_density_bounds_are_valid_and_attained(rng, d, kappa):
    m = sphere_points(rng, d)
    law = VonMisesFisher(m, kappa)
    least, slope = law.density_bounds()
    # A fine meridian through m sees every value and every slope of a zonal density.
    angle = np.linspace(0, np.pi, 20_001)
    f = perpendicular(m)
    x = np.cos(angle)[:, None] * m + np.sin(angle)[:, None] * f
    # Relative to the uniform law.
    density = np.exp(law.log_density(jnp.asarray(x)) - Uniform(d).log_density(jnp.asarray(x)))
    steepest = np.abs(np.diff(density)).max() / angle[1]
    np.testing.assert_allclose(density.min(), least, rtol=1e-10)
    assert steepest <= slope + 1e-8
    np.testing.assert_allclose(steepest, slope, rtol=1e-5, atol=1e-8)


def test_density_bounds_of_a_mixture_are_valid(rng):
    law = Mixture([VonMisesFisher([1, 0, 0], 5.0), VonMisesFisher([0, 1, 1], 9.0)], [1, 2])
    least, slope = law.density_bounds()
    x, y = sphere_points(rng, 2, 4000, 3)
    y = x + 0.05 * y
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    p, q = (4 * np.pi * np.exp(law.log_density(jnp.asarray(z))) for z in (x, y))
    distance = 2 * np.arcsin(np.linalg.norm(x - y, axis=1) / 2)
    assert 0 < least <= p.min() and np.all(np.abs(p - q) <= slope * distance)
    assert Mixture([Uniform(2), Tokens(np.eye(2))]).density_bounds() is None


def test_density_bounds_overflow_to_infinity():
    # At κ = 10⁴ the density on S³⁸³ reaches e^{1,000} times the uniform one, which no double holds.
    least, slope = VonMisesFisher(np.eye(384)[0], 1e4).density_bounds()
    assert least == 0 and slope == math.inf
    assert Uniform(1000).density_bounds() == (1, 0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_laws_with_a_bounded_density_have_moments_up_to_the_dimension(k):
    basis = jnp.eye(4)[:, :k]
    cloud = Mixture([Uniform(4), VonMisesFisher([1, 0, 0, 0], 3.0)])
    assert cloud.inverse_moment_limit(basis) == k
    # A token orthogonal to E spoils a mixture, unless its component has proportion zero.
    orthogonal = Tokens(np.eye(4)[3:])
    assert Mixture([cloud, orthogonal]).inverse_moment_limit(basis) == 0
    assert Mixture([cloud, orthogonal], [1, 0]).inverse_moment_limit(basis) == k
    assert Tokens(np.eye(4)[:1]).inverse_moment_limit(basis) == math.inf


# Nodes


def test_nodes_on_the_circle_integrate_trigonometric_polynomials_exactly():
    mu = Uniform(2).quadrature(64)
    z = np.asarray(mu.points) @ [1, 1j]
    np.testing.assert_allclose(np.sum(mu.weights), 1, rtol=1e-14)
    np.testing.assert_allclose([np.mean(z**l) for l in range(1, 64)], 0, atol=1e-13)
    assert abs(np.mean(z**64)) > 1 - 1e-12  # and no further


@pytest.mark.parametrize("count", [1000, 4001])
def test_nodes_on_the_sphere_integrate_harmonics(rng, count):
    mu = Uniform(3).quadrature(count)
    np.testing.assert_allclose(np.sum(mu.weights), 1, rtol=1e-12)
    frames = [np.linalg.qr(rng.normal(size=(3, 2)))[0] @ [1, 1j] for _ in range(5)]
    worst = max(abs(np.mean((np.asarray(mu.points) @ p) ** l)) for p in frames for l in range(1, 9))
    # A Fibonacci lattice converges like 1/n: iid tokens would be off by n^{−1/2}, 30 times more.
    assert worst < 2 / count


@pytest.mark.parametrize(
    ("d", "count", "kappa", "tolerance"),
    [
        (2, 64, 8.0, 1e-12),  # spectral accuracy
        (3, 1000, 8.0, 1e-3),  # 1/n
        (3, 16_000, 50.0, 1e-4),
    ],
)
def test_weighted_nodes_have_the_mean_of_the_law(rng, d, count, kappa, tolerance):
    m = sphere_points(rng, d)
    expected = MEAN_RESULTANT[d, kappa] * m
    for law, mean in (
        (VonMisesFisher(m, kappa), expected),
        (Mixture([VonMisesFisher(m, kappa), Uniform(d)], [1, 3]), expected / 4),
    ):
        mu = law.quadrature(count)
        assert mu.size == count and np.all(mu.weights > 0)
        np.testing.assert_allclose(np.sum(mu.weights), 1, rtol=1e-12)
        np.testing.assert_allclose(mu.weights @ mu.points, mean, atol=tolerance)


def test_weights_are_proportional_to_the_density(rng):
    law = Mixture([VonMisesFisher(sphere_points(rng, 3), 8.0), Uniform(3)])
    mu = law.quadrature(500)
    ratio = np.asarray(mu.weights) / np.exp(law.log_density(mu.points))
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
    np.testing.assert_array_equal(mu.points, nodes(3, 500))


@pytest.mark.parametrize("count", [2, 4, 10, 64, 1000, 4096])
def test_an_even_number_of_nodes_keeps_off_the_coordinate_planes(count):
    """Π(x) = P_E x/|P_E x| is defined at every node, E spanned by any of the axes."""
    for d in (2, 3):
        assert np.abs(nodes(d, count)).min() > 1e-4 / count
    # The middle one of an odd number is e₁ itself.
    np.testing.assert_allclose(nodes(3, count + 1)[count // 2], [1, 0, 0], atol=1e-12)


@pytest.mark.parametrize("count", [10, 11, 4096])
def test_nodes_on_the_sphere_are_symmetric_under_a_half_turn(count):
    """diag(1, −1, −1) permutes them: what balances e₂ against −e₂, and e₃ against −e₃."""
    x = np.asarray(nodes(3, count))
    np.testing.assert_allclose(x[::-1] * [1, -1, -1], x, atol=1e-11)
    assert np.sum(x[:, 2] > 0) == np.sum(x[:, 2] < 0) and np.sum(x[:, 1] > 1e-9) == count // 2


def test_rules_of_the_test_suite_agree_with_the_nodes():
    points, weights = uniform_rule(3, 12)
    mu = Uniform(3).quadrature(20_000)
    f = lambda x: np.exp(x[:, 0] + 0.5 * x[:, 1] * x[:, 2])  # noqa: E731
    np.testing.assert_allclose(mu.weights @ f(mu.points), weights @ f(points), atol=1e-6)


# Given tokens


@pytest.mark.parametrize("kappa", [0.5, 8.0])
def test_graded_nodes_integrate(kappa):
    axis = np.array([1.0, 2.0])
    law = VonMisesFisher([0.6, 0.8], kappa)
    mu = law.quadrature(512, axis)
    # They leave out e^{−12} about the axis and its equator.
    np.testing.assert_allclose(
        mu.weights @ mu.points, MEAN_RESULTANT[2, kappa] * np.array([0.6, 0.8]), atol=1e-5
    )
    # Equispaced in log tan of the angle to the axis, on each quarter.
    e = axis / np.linalg.norm(axis)
    along, across = mu.points @ e, mu.points @ np.array([-e[1], e[0]])
    steps = np.diff(np.sort(np.log(np.abs(across / along)).reshape(4, -1)), axis=1)
    np.testing.assert_allclose(steps, 24 / 128, rtol=1e-6)
    assert {(bool(a), bool(b)) for a, b in zip(along > 0, across > 0, strict=True)} == {
        (True, True), (True, False), (False, True), (False, False)
    }  # fmt: skip


def test_graded_nodes_leave_no_gaps_when_they_concentrate():
    """W₂ at zero temperature in closed form, long after equispaced nodes have left the equator."""
    gap, t = 0.8, 8.0
    attention = Attention(np.diag([1 + gap, 1.0]), key_query=np.eye(2))
    a2 = 1 - mpmath.exp(-2 * gap * t)
    exact = float(mpmath.sqrt(2 - 4 / mpmath.pi * mpmath.asin(mpmath.sqrt(a2)) / mpmath.sqrt(a2)))

    def error(mu):
        target = spectrum(attention).project(mu)
        end = flow(ZeroTemperature(attention), mu, t)
        return abs(float(wasserstein(end, target).value) / exact - 1)

    graded, equispaced = (Uniform(2).quadrature(1024, axis) for axis in ([1.0, 0.0], None))
    assert error(graded) < 0.003 < 0.2 < error(equispaced)


def test_tokens_are_their_own_quadrature(rng):
    x, w, labels = sphere_points(rng, 9, 4), simplex(rng, 9), np.arange(9)
    law = Tokens(x, w, labels)
    for mu in (law.quadrature(), law.quadrature(9)):
        np.testing.assert_array_equal(mu.points, x)
        np.testing.assert_array_equal(mu.weights, w)
        np.testing.assert_array_equal(mu.labels, labels)
    assert law.dimension == 4 and law.density_bounds() is None


def test_tokens_are_drawn_by_weight_with_their_labels(rng):
    x, w = sphere_points(rng, 5, 3), np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    mu = Tokens(x, w, np.arange(5)).sample(KEY, 5000)
    labels = np.asarray(mu.labels)
    np.testing.assert_array_equal(mu.points, x[labels])
    np.testing.assert_allclose(mu.weights, 1 / 5000)
    for i in range(4):
        assert_mean(labels == i, w[i], math.sqrt(w[i] * (1 - w[i])))
    assert not np.any(labels == 4)
    assert Tokens(x).sample(KEY, 3).labels is None


# What is refused


E = np.eye(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1), "dimension is 1; tokens need d ≥ 2"),
        (lambda: VonMisesFisher([1.0], 1.0), "dimension is 1"),
        (lambda: VonMisesFisher(E, 1.0), r"mean has shape \(3, 3\); it must be a vector"),
        (lambda: VonMisesFisher([0, 0], 1.0), r"mean is \[0.0, 0.0\].* not zero"),
        (lambda: VonMisesFisher([np.nan, 0], 1.0), r"mean is \[nan, 0.0\]; it must be finite"),
        (lambda: VonMisesFisher([1, 0], -1.0), "kappa is -1.0; it must be finite and ≥ 0"),
        (lambda: VonMisesFisher([1, 0], math.inf), "kappa is inf"),
        (lambda: Mixture([]), "components is empty"),
        (lambda: Mixture([Uniform(2), Uniform(3)]), r"dimensions \[2, 3\]; they must agree"),
        (lambda: Mixture([Uniform(2)], [1, 2]), r"weights is \[1, 2\]; it must be 1 numbers ≥ 0"),
        (lambda: Mixture([Uniform(2)] * 2, [1, -1]), r"weights is \[1, -1\]"),
        (lambda: Mixture([Uniform(2)] * 2, [0, 0]), "not all 0"),
        (lambda: Mixture([Uniform(2)] * 2, [np.nan, 1]), "it must be 2 numbers ≥ 0"),
        (lambda: Tokens(np.stack([E, E])), r"points have shape \(2, 3, 3\); they must be \(n, d\)"),
        (lambda: Tokens(2 * E), "unit vector"),
        (lambda: Tokens(E).quadrature(4), "given tokens, so its quadrature has 3 nodes, not 4"),
        (lambda: Tokens(E).log_density(jnp.asarray(E)), "given tokens has no density"),
        (lambda: Tokens(E).quadrature(3, E[0]), "given tokens are their own quadrature, which has"),
        (lambda: Uniform(3).quadrature(8, E[0]), "known for d = 2, not 3"),
        (lambda: Uniform(2).quadrature(6, [1, 0]), "count is 6; graded nodes need a multiple of"),
        (lambda: Uniform(2).quadrature(8, [0, 0]), "about two finite numbers, not both zero"),
        (lambda: Uniform(3).quadrature(0), "count is 0; quadrature needs at least one node"),
        (lambda: Uniform(5).quadrature(10), r"on S¹ and S² .* not for d = 5; sample instead"),
        (lambda: VonMisesFisher(np.eye(5)[0], 1.0).quadrature(10), "not for d = 5"),
        (lambda: Mixture([Uniform(5)]).quadrature(10), "not for d = 5"),
        (lambda: VonMisesFisher([1, 0, 0], 1e6).quadrature(1000), "1000 .* do not resolve the law"),
        (lambda: VonMisesFisher([1, 0], 1e6).quadrature(100), "use more tokens, or sample"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(InputError, match=message):
        make()
