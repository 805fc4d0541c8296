"""Eigenspaces of M = VBᵀ, the projection Π, and the assumptions with their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from oracles import DTYPES, eps, invertible, rotation, seeds, simplex, sphere_points

from jaxmf import (
    RK4,
    Attention,
    InputError,
    Measure,
    SoftmaxAttention,
    Tokens,
    Uniform,
    VonMisesFisher,
    assumptions,
    eigenspaces,
    flow,
    spectrum,
    sphere,
)
from jaxmf.transport import to_axis

EIGENVALUES = np.array([2.0, 2.0, 0.5, -1.0, -1.0, -1.0])
MULTIPLICITIES = (2, 1, 3)


def with_eigenvalues(rng, values):
    r = rotation(rng, len(values))
    return r * values @ r.T, r


@given(seeds)
def test_groups_repeated_eigenvalues_into_eigenspaces(seed):
    matrix, r = with_eigenvalues(np.random.default_rng(seed), EIGENVALUES)
    spaces = eigenspaces(matrix)
    assert spaces.multiplicities == MULTIPLICITIES
    np.testing.assert_allclose(spaces.eigenvalues, [2, 0.5, -1], atol=1e-14)
    np.testing.assert_allclose(spaces.gap, 1.5, atol=1e-14)
    assert spaces.asymmetry < 1e-15
    projectors = [b @ b.T for b in spaces.bases]
    for p, columns in zip(projectors, np.split(r, [2, 3], axis=1), strict=True):
        np.testing.assert_allclose(p, columns @ columns.T, atol=1e-14)
    np.testing.assert_allclose(sum(projectors), np.eye(6), atol=1e-14)
    np.testing.assert_array_equal(spaces.dominant, spaces.bases[0])


@pytest.mark.parametrize("d", [2, 3, 5, 384])
def test_sums_to_the_symmetric_part_of_any_matrix(rng, d):
    m = rng.normal(size=(d, d))
    spaces = eigenspaces(m)
    rebuilt = sum(
        value * b @ b.T for value, b in zip(spaces.eigenvalues, spaces.bases, strict=True)
    )
    np.testing.assert_allclose(rebuilt, (m + m.T) / 2, atol=1e-13 * np.sqrt(d))
    assert np.all(np.diff(spaces.eigenvalues) < 0)
    expected = np.linalg.norm(m - m.T) / np.linalg.norm(m)
    np.testing.assert_allclose(spaces.asymmetry, expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("size", "tolerance", "grouped"),
    [
        (1e-12, None, True),  # the default in float64 is ε^{2/3} = 4e-11, relative to ‖M‖₂ = 2
        (1e-9, None, False),
        (1e-9, 1e-8, True),
        (1e-7, 1e-8, False),
    ],
)
def test_tolerance_decides_which_eigenvalues_are_one(rng, size, tolerance, grouped):
    split = EIGENVALUES + size * np.array([0.0, 1, 0, 0, 0, 0])
    matrix, _ = with_eigenvalues(rng, split)
    for scale in (1e-6, 1.0, 1e6):
        spaces = eigenspaces(scale * matrix, tolerance)
        assert spaces.multiplicities == (MULTIPLICITIES if grouped else (1, 1, 1, 3))


def test_float32_matrices_group_at_their_own_precision(rng):
    matrix = with_eigenvalues(rng, EIGENVALUES)[0].astype(np.float32)
    assert eigenspaces(matrix).multiplicities == MULTIPLICITIES
    # The same numbers, taken for exact: rounding to float32 has split them.
    assert len(eigenspaces(matrix.astype(np.float64)).multiplicities) == 6


def test_a_multiple_of_the_identity_has_one_eigenspace_and_no_gap():
    for c in (0.0, 1.0, -3.0):
        spaces = eigenspaces(c * np.eye(3))
        assert spaces.multiplicities == (3,) and spaces.gap == 0 and spaces.asymmetry == 0


def test_spectrum_is_that_of_the_product_of_value_and_transposed_key_query(rng):
    symmetric, r = with_eigenvalues(rng, np.array([3.0, 1.0, 0.5]))
    b = invertible(rng, 3)
    spaces = spectrum(Attention(symmetric @ np.linalg.inv(b.T), b))
    np.testing.assert_allclose(spaces.eigenvalues, [3, 1, 0.5], atol=1e-13)
    np.testing.assert_allclose(np.abs(spaces.dominant[:, 0]), np.abs(r[:, 0]), atol=1e-13)


# Projection and overlaps


@pytest.mark.parametrize("dtype", DTYPES)
def test_projects_to_the_nearest_unit_vector_of_the_dominant_eigenspace(rng, dtype):
    matrix, r = with_eigenvalues(rng, EIGENVALUES)
    mu = Measure(jnp.asarray(sphere_points(rng, 50, 6), dtype), simplex(rng, 50), np.arange(50))
    spaces = eigenspaces(matrix)
    image = spaces.project(mu)
    shadow = np.asarray(mu.points) @ r[:, :2] @ r[:, :2].T
    expected = shadow / np.linalg.norm(shadow, axis=1, keepdims=True)
    assert image.points.dtype == dtype
    # Π divides by |P_E x|, which magnifies the rounding of the shadow.
    smallest = np.linalg.norm(shadow, axis=1).min()
    np.testing.assert_allclose(image.points, expected, atol=4 * eps(dtype) / smallest)
    np.testing.assert_array_equal(image.weights, mu.weights)
    np.testing.assert_array_equal(image.labels, mu.labels)
    np.testing.assert_allclose(spaces.project(image).points, image.points, atol=8 * eps(dtype))


def test_projects_and_overlaps_a_batch(rng):
    spaces = eigenspaces(with_eigenvalues(rng, EIGENVALUES)[0])
    mu = Measure(sphere_points(rng, 4, 50, 6), simplex(rng, 50))
    for i in range(4):
        one = mu.move(mu.points[i])
        np.testing.assert_allclose(
            spaces.project(mu).points[i], spaces.project(one).points, atol=1e-15
        )
        np.testing.assert_allclose(spaces.overlap(mu)[i], spaces.overlap(one), atol=1e-15)


@given(seeds)
def test_overlaps_are_shares_of_one(seed):
    rng = np.random.default_rng(seed)
    matrix, r = with_eigenvalues(rng, EIGENVALUES)
    spaces = eigenspaces(matrix)
    x, w = sphere_points(rng, 50, 6), simplex(rng, 50)
    overlap = spaces.overlap(Measure(x, w))
    expected = [np.sum(c) for c in np.split(w @ (x @ r) ** 2, [2, 3])]
    np.testing.assert_allclose(overlap, expected, atol=1e-14)
    np.testing.assert_allclose(np.sum(overlap), 1, atol=1e-14)
    inside = spaces.project(Measure(x, w))
    np.testing.assert_allclose(spaces.overlap(inside), [1, 0, 0], atol=1e-14)


def test_project_names_the_tokens_it_cannot_project():
    spaces = eigenspaces(np.diag([2.0, 1.0, 0.0]))
    points = np.eye(3)[[0, 1, 0, 2]]
    message = r"2 tokens are orthogonal to E, where Π is not defined: indices 1, 3; "
    with pytest.raises(InputError, match=message):
        spaces.project(Measure(points))
    with pytest.raises(InputError, match=r"7 tokens .* indices 0, 1, 2, 3, 4, …;"):
        spaces.project(Measure(np.eye(3)[[1] * 7]))
    # Under tracing there is nothing to look at: the orthogonal tokens alone become NaN.
    image = jax.jit(lambda x: spaces.project(Measure(x)).points)(points)
    assert np.array_equal(np.isfinite(image).all(axis=1), [True, False, True, False])


# Assumptions


def test_assumption_1_holds_and_reports_its_numbers(rng):
    b = invertible(rng, 4)
    symmetric, _ = with_eigenvalues(rng, np.array([2.0, 2.0, 1.5, 1.0]))
    report = assumptions(Attention(symmetric @ np.linalg.inv(b.T), b), Uniform(4))
    first = report.findings[0]
    assert first.name == "A1" and first.holds
    assert first.statement == "B is invertible, M = VBᵀ is symmetric, the gap is positive"
    assert first.numbers["rank_B"] == 4 and first.numbers["asymmetry"] < 1e-14
    np.testing.assert_allclose(first.numbers["cond_B"], np.linalg.cond(b), rtol=1e-12)
    np.testing.assert_allclose([first.numbers["gap"], report.gap], 0.5, atol=1e-13)
    assert report.multiplicity == 2


SINGULAR = np.diag([1.0, 1.0, 0.0])
SKEW = np.array([[0.0, 0.1, 0], [-0.1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("value", "key_query", "failures"),
    [
        (np.eye(3), SINGULAR, ["B is singular"]),
        (np.diag([2.0, 1, 1]) + SKEW, np.eye(3), ["M is not symmetric"]),
        (np.eye(3), np.eye(3), ["the gap is zero"]),
        (np.eye(3) + SKEW, SINGULAR, ["B is singular", "M is not symmetric"]),
        (0 * np.eye(3), 0 * np.eye(3), ["B is singular", "the gap is zero"]),
    ],
)
def test_assumption_1_fails_in_each_of_its_ways(value, key_query, failures):
    report = assumptions(Attention(value, key_query), Uniform(3))
    first = report.findings[0]
    assert first.holds is False
    assert first.statement.split(", ") == failures
    assert np.isinf(first.numbers["cond_B"]) == ("B is singular" in failures)
    assert first.numbers["rank_B"] == np.linalg.matrix_rank(key_query)
    m = value @ key_query.T
    asymmetry = np.linalg.norm(m - m.T) / max(np.linalg.norm(m), 1e-300)
    assert first.numbers["asymmetry"] == pytest.approx(asymmetry, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "law", "moment_limit", "moment"),
    [
        ([2.0, 1, 1, 1], Uniform(4), 1, 1),
        ([2.0, 2, 1, 1], Uniform(4), 2, 2),
        ([2.0, 2, 2, 1], Uniform(4), 3, 2),
        ([2.0, 1, 1, 1], VonMisesFisher(np.ones(4), 3.0), 1, 1),
    ],
)
def test_rate_is_min_k_2_gap_over_twice_the_norm(rng, values, law, moment_limit, moment):
    """For a law with a density E|P_E x|^{−p} is finite for p < k = dim E: rate min(k, 2)γ/2‖B‖₂."""
    b = invertible(rng, 4)
    symmetric, _ = with_eigenvalues(rng, np.array(values))
    report = assumptions(Attention(symmetric @ np.linalg.inv(b.T), b), law)
    _, second, third = report.findings
    assert second.name == "A2" and second.holds and third.name == "A3" and third.holds
    assert second.numbers == {"dim_E": values.count(2.0), "moment_limit": moment_limit}
    assert f"finite for p < {moment_limit}" in second.statement
    assert report.moment == moment
    np.testing.assert_allclose(report.rate, moment / 2 / np.linalg.norm(b, 2), rtol=1e-12)
    least, slope = law.density_bounds()
    assert third.numbers == {"density_min": least, "lipschitz": slope}


def test_given_tokens_have_every_moment_or_none_and_no_density(rng):
    attention = Attention(np.diag([2.0, 1, 0.5]), np.eye(3))
    points = sphere_points(rng, 9, 3)
    _, second, third = assumptions(attention, Tokens(points)).findings
    assert second.holds and second.numbers["moment_limit"] == np.inf
    assert third.holds is None and "no density" in third.statement
    points[3] = [0, 0.6, 0.8]
    report = assumptions(attention, Tokens(points))
    assert report.findings[1].holds is False and report.rate == 0
    assert "some tokens are orthogonal to E" in report.findings[1].statement
    # A token of weight zero is not there to be orthogonal.
    weights = np.where(np.arange(9) == 3, 0, 1 / 8)
    assert assumptions(attention, Tokens(points, weights)).findings[1].holds


def test_without_a_law_its_assumptions_are_unknown():
    report = assumptions(Attention(np.diag([2.0, 1, 0.5]), np.eye(3)))
    assert [f.holds for f in report.findings] == [True, None, None]
    assert report.findings[1].statement == "unknown: no law was given"


# Derivatives


def central(f, h=1e-5):
    """f′(0) by differences, of order h⁴."""
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def weights_of(rng, values):
    """V and B with VBᵀ symmetric, of these eigenvalues; and directions that break all of that."""
    b = invertible(rng, len(values))
    symmetric, _ = with_eigenvalues(rng, np.asarray(values))
    start = symmetric @ np.linalg.inv(b.T), b
    return start, tuple(rng.normal(size=b.shape) for _ in start)


QUANTITIES = {
    "project": lambda spaces, mu: jnp.sum(jnp.sin(3 * spaces.project(mu).points) * mu.points**2),
    "overlap": lambda spaces, mu: jnp.sum(jnp.cos(jnp.arange(1.0, 4) * spaces.overlap(mu)[:3])),
    "gap": lambda spaces, mu: spaces.gap**2,
}


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("values", "multiplicities"),
    [([2.0, 1.0, 0.4, -1.0], (1, 1, 1, 1)), ([2.0, 2.0, 0.4, 0.1, 0.1], (2, 1, 2))],
    ids=["simple", "double"],
)
def test_derivatives_in_value_and_key_query(rng, values, multiplicities, jit, name):
    """Also along directions that split a group, where its space and its mean stay smooth."""
    start, direction = weights_of(rng, values)
    mu = Measure(sphere_points(rng, 30, len(values)), simplex(rng, 30))

    def quantity(v, b, multiplicities=None):
        return QUANTITIES[name](spectrum(Attention(v, b), multiplicities=multiplicities), mu)

    def along(h):
        return quantity(*(a + h * da for a, da in zip(start, direction, strict=True)), given)

    # Eagerly the groups are found; elsewhere than at the point itself they have to be given.
    given = multiplicities
    expected = central(along)
    f = jax.jit(quantity, static_argnums=2) if jit else quantity
    told = (multiplicities,) if jit else ()

    def called(v, b):
        return f(v, b, *told)

    forward = jax.jvp(called, start, direction)[1]
    gradient = jax.grad(called, argnums=(0, 1))(*start)
    reverse = sum(np.sum(g * da) for g, da in zip(gradient, direction, strict=True))
    np.testing.assert_allclose([forward, reverse], expected, rtol=1e-6)
    np.testing.assert_allclose(called(*start), quantity(*start), rtol=1e-12)


@pytest.mark.parametrize("values", [[2.0, 1.0, 0.4], [2.0, 2.0, 0.4, 0.1]])
def test_second_derivatives(rng, values):
    start, direction = weights_of(rng, values)
    mu = Measure(sphere_points(rng, 30, len(values)))
    multiplicities = (values.count(2.0), *(1,) * (len(values) - values.count(2.0)))

    def along(h):
        v, b = (a + h * da for a, da in zip(start, direction, strict=True))
        return QUANTITIES["project"](spectrum(Attention(v, b), None, multiplicities), mu)

    slope = jax.jit(jax.grad(along))
    second = jax.grad(jax.grad(along))(0.0)
    np.testing.assert_allclose(second, central(slope), rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(jax.grad(along), (0.0,), (1.0,))[1], second, rtol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_derivative_is_nan_where_eigenvalues_coincide_or_the_matrix_is_symmetric(dtype):
    def everything(m):
        spaces = eigenspaces(m)
        projectors = sum(i * basis @ basis.T for i, basis in enumerate(spaces.bases))
        return jnp.sum(projectors**3) + jnp.sum(spaces.eigenvalues) + spaces.asymmetry

    for matrix in (np.eye(3), np.zeros((3, 3)), np.diag([2.0, 2.0, 1.0])):
        matrix = jnp.asarray(matrix, dtype)
        assert np.all(np.isfinite(jax.grad(everything)(matrix)))
        asymmetry = jax.grad(lambda m: eigenspaces(m).asymmetry)(matrix)
        np.testing.assert_array_equal(asymmetry, 0)


def test_asymmetry_is_differentiable_away_from_symmetry(rng):
    m, dm = rng.normal(size=(2, 4, 4))
    derivative = jax.jvp(lambda m: eigenspaces(m).asymmetry, (m,), (dm,))[1]
    expected = central(lambda h: eigenspaces(m + h * dm).asymmetry)
    np.testing.assert_allclose(derivative, expected, rtol=1e-8)


@pytest.mark.parametrize("jit", [False, True])
def test_derivatives_of_a_distance_through_flow_and_projection(rng, jit):
    """W₂(ρₜ, Π♯ρ₀) in V and B, both of which move the tokens and the axis they are sent to."""
    start, direction = weights_of(rng, [2.0, 0.8, 0.3])
    # No token near the equator, where the sign of ⟨x, e⟩ may change along the way.
    mu0 = Measure(sphere_points(rng, 40, 3), simplex(rng, 40))
    mu0 = (
        spectrum(Attention(*start))
        .project(mu0)
        .move(sphere.normalise(mu0.points + 0.5 * spectrum(Attention(*start)).project(mu0).points))
    )

    def distance(v, b):
        attention = Attention(v, b)
        target = spectrum(attention, multiplicities=(1, 1, 1)).project(mu0)
        return to_axis(flow(SoftmaxAttention(attention, 5.0), mu0, 0.5, RK4(steps=10)), target)

    f = jax.jit(distance) if jit else distance
    expected = central(
        lambda h: f(*(a + h * da for a, da in zip(start, direction, strict=True))), 1e-4
    )
    gradient = jax.grad(f, argnums=(0, 1))(*start)
    reverse = sum(np.sum(g * da) for g, da in zip(gradient, direction, strict=True))
    np.testing.assert_allclose([jax.jvp(f, start, direction)[1], reverse], expected, rtol=1e-5)


def test_traced_matrices_need_multiplicities():
    matrix = jnp.diag(jnp.array([2.0, 1.0, 1.0]))
    message = r"must be known when compiling: under jax.jit or jax.vmap give `multiplicities`"
    with pytest.raises(InputError, match=message):
        jax.jit(lambda m: eigenspaces(m).gap)(matrix)
    with pytest.raises(InputError, match=message):
        jax.vmap(lambda m: eigenspaces(m).gap)(matrix[None])
    gap = jax.vmap(lambda m: eigenspaces(m, multiplicities=(1, 2)).gap)(matrix[None])
    np.testing.assert_allclose(gap, [1], rtol=1e-14)
    for wrong in ((1, 1), (0, 3), ()):
        with pytest.raises(InputError, match="positive integers that sum to the dimension 3"):
            eigenspaces(matrix, multiplicities=wrong)
