"""Theorem 1 as a bound of β and t, its fit to tables, and the zero-temperature bound."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    DTYPES,
    W2_UNIFORM,
    call,
    eps,
    invertible,
    rotation,
    seeds,
    simplex,
    sphere_points,
)

from jaxmf import (
    RK4,
    Attention,
    ConcentrationBound,
    InputError,
    Measure,
    Mixture,
    Tokens,
    Uniform,
    VonMisesFisher,
    ZeroTemperature,
    coupling,
    fit_bound,
    flow,
    inverse_moment,
    spectrum,
    zero_temperature_bound,
)

BOUND = ConcentrationBound(K1=1.3, C1=0.7, K2=2.0, c=1.1)
BETAS = np.geomspace(1e-3, 1e6, 10)


def s(beta):
    return np.sqrt(np.log1p(beta) / beta)


def truth(constants, beta, t):
    k1, c1, k2, c = constants
    return k1 * s(beta) * np.exp(c1 * t) + k2 * np.exp(-c * t)


@st.composite
def constants(draw):
    return [np.exp(draw(st.floats(-1.5, 1.5))) for _ in range(4)]


# The bound


@given(constants())
def test_bound_is_the_sum_of_its_two_terms(values):
    t = np.linspace(0, 9, 4)
    bound = ConcentrationBound(*values)(BETAS[:, None], t)
    np.testing.assert_allclose(bound, truth(values, BETAS[:, None], t), rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_is_never_nan(dtype):
    bound = jax.tree.map(lambda leaf: leaf.astype(dtype), BOUND)
    beta = jnp.asarray(BETAS, dtype)
    t = jnp.asarray([0, 1, 1e2, 1e5], dtype)
    values = bound(beta[:, None], t)
    assert values.dtype == dtype and np.all(values[:, -1] == np.inf)
    assert np.all(values[:, :2] < np.inf) and not np.any(np.isnan(values))
    np.testing.assert_allclose(
        values[:, 1], truth((1.3, 0.7, 2.0, 1.1), BETAS, 1.0), rtol=10 * eps(dtype)
    )


@given(constants())
def test_optimal_time_is_where_the_bound_is_smallest(values):
    bound = ConcentrationBound(*values)
    t = np.asarray(bound.optimal_time(BETAS))
    assert np.all(t >= 0)
    lowest = truth(values, BETAS, t)
    np.testing.assert_allclose(bound.minimum(BETAS), lowest, rtol=1e-13)
    for step in (-1e-2, 1e-2, -1.0, 1.0):
        assert np.all(lowest <= truth(values, BETAS, np.maximum(t + step, 0)) * (1 + 1e-14))


@given(constants())
def test_optimal_time_moves_with_beta_by_its_closed_form(values):
    bound = ConcentrationBound(*values)
    slope = jax.vmap(jax.grad(bound.optimal_time))(jnp.asarray(BETAS))
    log_s_slope = (1 / ((BETAS + 1) * np.log1p(BETAS)) - 1 / BETAS) / 2  # s′/s
    expected = np.where(bound.optimal_time(BETAS) > 0, -log_s_slope / (values[1] + values[3]), 0)
    # Where β is small s′/s is a difference of numbers 1/β.
    np.testing.assert_allclose(slope, expected, rtol=1e-9, atol=1e-15 / BETAS.min())


@given(constants(), st.floats(1.001, 50))
def test_the_bound_is_the_tolerance_at_both_ends_of_its_window(values, factor):
    bound = ConcentrationBound(*values)
    tolerance = np.asarray(bound.minimum(BETAS)) * factor
    entry, exit = map(np.asarray, call(ConcentrationBound.window, bound, BETAS, tolerance))
    best = np.asarray(bound.optimal_time(BETAS))
    assert np.all((entry >= 0) & (entry <= best) & (best <= exit))
    # To rounding in t, which the slope C₁ or c carries into the logarithm of the bound.
    rounding = 1e-14 * (1 + max(values[1], values[3]) * exit)
    assert np.all(np.abs(truth(values, BETAS, exit) / tolerance - 1) < rounding)
    at_start = truth(values, BETAS, 0) <= tolerance
    np.testing.assert_array_equal(entry == 0, at_start)
    off = np.abs(truth(values, BETAS, entry) / tolerance - 1)
    assert np.all(np.where(at_start, 0, off) < rounding)


def test_a_window_near_its_closing_is_as_wide_as_the_curvature_says():
    beta = 100.0
    lowest = float(BOUND.minimum(beta))
    curvature = 0.7 * 1.1  # of the logarithm of the bound at its minimum, C₁c
    for excess in (1e-4, 1e-8, 1e-12):
        entry, exit = BOUND.window(beta, lowest * (1 + excess))
        # The excess itself is only known to a few rounding units.
        width = 2 * np.sqrt(2 * excess / curvature)
        np.testing.assert_allclose(exit - entry, width, rtol=excess + 4e-16 / excess + 1e-8)


def test_there_is_no_window_below_the_minimum_or_before_time_zero():
    tolerance = jnp.asarray(BOUND.minimum(BETAS)) * 0.999
    assert np.all(np.isnan(BOUND.window(BETAS, tolerance)))
    assert np.all(np.isnan(BOUND.window(10.0, jnp.array([0.0, -1.0]))))
    # Smallest at a negative time: only ever above its value at 0.
    late = ConcentrationBound(2.0, 1.0, 0.1, 0.5)
    lowest = float(late(10.0, 0.0))
    assert late.optimal_time(10.0) == 0
    assert np.all(np.isnan(late.window(10.0, 0.999 * lowest)))
    entry, exit = late.window(10.0, 1.001 * lowest)
    assert entry == 0 and 0 < exit < 0.01


@pytest.mark.parametrize("end", [0, 1])
def test_window_is_differentiable_in_everything(end):
    def at(theta):
        k1, c1, k2, c, beta, tolerance = theta
        return ConcentrationBound(k1, c1, k2, c).window(beta, tolerance)[end]

    theta = jnp.array([1.3, 0.7, 2.0, 1.1, 1e3, 0.8])
    steps = 1e-5 * np.diag(theta)
    ends, slope = jax.jit(jax.vmap(at)), jax.jit(jax.grad(at))
    gradient = slope(theta)
    numeric = (ends(theta + steps) - ends(theta - steps)) / (2 * np.diag(steps))
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(at))(theta), gradient, rtol=1e-12)
    second = jax.jit(jax.jacfwd(jax.grad(at)))(theta)[4]
    numeric = (slope(theta + steps[4]) - slope(theta - steps[4])) / (2 * steps[4, 4])
    np.testing.assert_allclose(second, numeric, rtol=1e-5)
    # What is clipped or not there has derivative zero, alone and beside others.
    betas = jnp.array([1.0, 30.0, 1e3])
    slopes = jax.vmap(jax.grad(lambda b: BOUND.window(b, 2.05)[end]))(betas)
    assert np.all(np.isfinite(slopes)) and slopes[0] == 0 and slopes[2] != 0


@pytest.mark.parametrize("name", ["K1", "C1", "K2", "c"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_constants_must_be_positive(name, value):
    with pytest.raises(InputError, match=f"{name} is {value}; it must be finite and positive"):
        ConcentrationBound(**{"K1": 1, "C1": 1, "K2": 1, "c": 1, name: value})
    with pytest.raises(InputError, match=rf"{name}\[1\] is {value}"):
        ConcentrationBound(**{"K1": 1, "C1": 1, "K2": 1, "c": 1, name: [1.0, value]})


# Its fit


T = np.linspace(0, 8, 21)
TABLE_BETAS = np.geomspace(3, 1e5, 5)[:, None]


@settings(max_examples=8)
@given(constants())
def test_fit_finds_the_bound_that_made_the_table(values):
    found = fit_bound(TABLE_BETAS, T, truth(values, TABLE_BETAS, T))
    assert found.ratio < 1.001
    assert found.slack.shape == (5, 21)
    far = BETAS[:, None], np.linspace(0, 8, 17)
    np.testing.assert_allclose(found.bound(*far), truth(values, *far), rtol=1e-4)


@settings(max_examples=8)
@given(constants(), seeds)
def test_fit_is_above_every_point_and_no_other_bound_is_closer(values, seed):
    rng = np.random.default_rng(seed)
    above = truth(values, TABLE_BETAS, T)
    w2 = above * np.exp(-rng.exponential(0.2, above.shape))
    found = fit_bound(TABLE_BETAS, T, w2)
    bound = np.asarray(found.bound(TABLE_BETAS, T))
    assert np.all(bound >= w2)
    np.testing.assert_array_equal(found.slack, bound - w2)
    np.testing.assert_allclose(found.ratio, np.mean(bound / w2), rtol=1e-12)
    # The bound the table was made from lies above it too, and so does what is near the fit, lifted.
    assert found.ratio <= np.mean(above / w2) * (1 + 1e-9)
    best = [float(leaf) for leaf in (found.bound.K1, found.bound.C1, found.bound.K2, found.bound.c)]
    for size in (1e-3, 1e-2, 0.1):
        other = truth(best * np.exp(size * rng.normal(size=4)), TABLE_BETAS, T) / w2
        assert found.ratio <= np.mean(other / other.min()) * (1 + 1e-9)
    # It touches what it says it touches, and nothing else.
    touching = np.zeros(w2.shape, bool)
    touching[tuple(found.touches.T)] = True
    assert len(found.touches) >= 2
    assert np.all(found.slack[touching] <= 2e-9 * w2[touching])
    assert np.all(found.slack[~touching] > 1e-10 * w2[~touching])


def test_for_its_rates_the_fit_has_the_constants_of_the_linear_programme(rng):
    w2 = truth((0.5, 0.4, 1.0, 0.6), TABLE_BETAS, T) * rng.uniform(0.5, 1, (5, 21))
    for c in (None, 0.9):
        found = fit_bound(TABLE_BETAS, T, w2, c=c)
        late = (s(TABLE_BETAS) * np.exp(found.bound.C1 * T) / w2).ravel()
        early = (np.exp(-found.bound.c * T) / w2).ravel()
        rows = np.stack([late, early], axis=1)
        best = scipy.optimize.linprog(rows.mean(axis=0), A_ub=-rows, b_ub=-np.ones(len(rows)))
        np.testing.assert_allclose(found.ratio, best.fun, rtol=1e-8)
        np.testing.assert_allclose([found.bound.K1, found.bound.K2], best.x, rtol=1e-6)


@settings(max_examples=4)
@given(constants())
def test_fit_keeps_a_rate_that_theory_gives(values):
    w2 = truth(values, TABLE_BETAS, T)
    found = fit_bound(TABLE_BETAS, T, w2, c=values[3])
    assert found.bound.c == pytest.approx(values[3], rel=1e-14) and found.ratio < 1.001
    slower = fit_bound(TABLE_BETAS, T, w2, c=values[3] / 2)
    assert slower.bound.c == pytest.approx(values[3] / 2, rel=1e-14)
    assert np.all(slower.slack >= 0) and slower.ratio > found.ratio


def test_fit_of_a_table_that_only_falls_or_only_rises():
    falls = np.broadcast_to(np.exp(-0.5 * T), (5, 21))
    rises = s(TABLE_BETAS) * np.exp(0.5 * T)
    for w2 in (falls, rises, np.ones((5, 21))):
        found = fit_bound(TABLE_BETAS, T, w2)
        assert np.all(found.slack >= 0) and found.ratio < 1.0001


def test_fit_in_the_scaling_of_any_time_and_distance():
    w2 = truth((0.5, 0.4, 1.0, 0.6), TABLE_BETAS, T) * np.linspace(0.7, 1, 21)
    plain = fit_bound(TABLE_BETAS, T, w2)
    scaled = fit_bound(TABLE_BETAS, T * 1e3, w2 * 1e-6)
    np.testing.assert_allclose(scaled.ratio, plain.ratio, rtol=1e-7)
    np.testing.assert_allclose(scaled.bound.C1, plain.bound.C1 / 1e3, rtol=1e-4)
    np.testing.assert_allclose(scaled.bound.K2, plain.bound.K2 * 1e-6, rtol=1e-4)


def test_zeros_do_not_count():
    w2 = truth((0.5, 0.4, 1.0, 0.6), TABLE_BETAS, T)
    holes = np.where(np.arange(21) % 4 == 1, 0, w2)
    found = fit_bound(TABLE_BETAS, T, holes)
    assert found.ratio < 1.001 and np.all(found.slack[:, 1::4] > 0.08)
    assert np.all(holes[tuple(found.touches.T)] > 0)


def test_fit_is_above_every_point_also_in_float32():
    w2 = truth((0.5, 0.4, 1.0, 0.6), TABLE_BETAS, T)
    with jax.enable_x64(False):
        found = fit_bound(TABLE_BETAS, T, w2)
        assert found.bound.K1.dtype == jnp.float32
        bound = np.asarray(found.bound(TABLE_BETAS, T))
    assert bound.dtype == np.float32 and np.all(bound.astype(np.float64) >= w2)
    assert np.all(bound <= w2 * (1 + 1e-4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": [[1.0], [0.0]]}, r"beta\[1, 0\] is 0.0; it must be finite and positive"),
        ({"t": [0.0, 1.0, -1.0]}, r"t\[2\] is -1.0; it must be finite and ≥ 0"),
        ({"w2": [[1.0, 1, 1], [1, np.nan, 1]]}, r"w2\[1, 1\] is nan; it must be finite and ≥ 0"),
        ({"w2": [[1.0, 1, 1], [1, 1, -2]]}, r"w2\[1, 2\] is -2.0; it must be finite and ≥ 0"),
        ({"c": -1.0}, r"c is -1.0; it must be finite and positive"),
        ({"t": [0.0, 1.0]}, r"shapes \(2, 1\), \(2,\) and \(2, 3\), which do not broadcast"),
        ({"w2": [[1.0, 1, 1], [0, 0, 0]]}, "3 positive entries; finding 4 constants needs"),
        ({"w2": [[1.0, 1, 0], [0, 0, 0]], "c": 1.0}, "2 positive entries; finding 3 constants"),
    ],
)
def test_fit_says_what_is_wrong_with_a_table(change, message):
    table = {"beta": [[10.0], [20.0]], "t": [0.0, 1.0, 2.0], "w2": np.ones((2, 3))}
    with pytest.raises(InputError, match=message):
        fit_bound(**table | change)


# Zero temperature


def attention_with(rng, values):
    """Attention with a B without symmetry and a symmetric M of these eigenvalues."""
    r, b = rotation(rng, len(values)), invertible(rng, len(values))
    return Attention((r * values @ r.T) @ np.linalg.inv(b.T), b)


@pytest.mark.parametrize("values", [[2.0, 1.0], [1.0, -0.5, -1.0], [2.0, 2, 1, 0.5]])
def test_zero_temperature_flow_stays_below_its_bound(rng, values):
    attention = attention_with(rng, np.array(values))
    d = len(values)
    mu = Measure(sphere_points(rng, 40, d), simplex(rng, 40))
    spaces = spectrum(attention)
    k = spaces.multiplicities[0]
    t = np.linspace(0, 8, 17)
    moved = flow(ZeroTemperature(attention), mu, t, RK4(step=0.02))
    bound = zero_temperature_bound(attention, mu, t)
    assert np.all(np.asarray(coupling(moved, spaces.project(mu))) <= bound * (1 + 1e-9))
    # The bound itself, from the definitions.
    e = np.asarray(spaces.dominant)
    cosine = np.linalg.norm(mu.points @ e, axis=1)
    square = (1 - cosine**2) / cosine**2
    rate = (values[0] - values[k]) / np.linalg.norm(attention.key_query, 2)
    terms = np.minimum(2, np.exp(-2 * rate * t[:, None]) * square)
    np.testing.assert_allclose(bound, np.sqrt(terms @ mu.weights), rtol=1e-10)


@pytest.mark.parametrize("d", [2, 3])
def test_uniform_bound_is_above_the_exact_distance(d):
    """B = I, V = diag(μ₁, μ₂, …, μ₂), uniform ρ₀: W₂ is known."""
    for (dimension, gap, t), exact in W2_UNIFORM.items():
        if dimension == d:
            attention = Attention(np.diag([1 + gap] + [1.0] * (d - 1)), np.eye(d))
            bound = float(zero_temperature_bound(attention, Uniform(d), t))
            assert exact < bound < 1.6 * exact
            # Of the angle the bound takes tan for 2 sin(θ/2), which in the tail is not much.
            if d == 3:
                np.testing.assert_allclose(exact, np.sqrt(2 / (1 + np.exp(gap * t))), rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_bound_is_the_limit_of_that_of_many_tokens(dtype):
    attention = Attention(np.diag([2, 1, 0.5]), np.diag([0.3, 1, 1]))
    t = jnp.linspace(0, 4, 5, dtype=dtype)
    nodes = Uniform(3).quadrature(100_000)
    nodes = Measure(nodes.points.astype(dtype))
    many = zero_temperature_bound(attention, nodes, t)
    np.testing.assert_allclose(zero_temperature_bound(attention, Uniform(3), t), many, rtol=2e-3)


def expected_square(d, k, reach):
    """(E min(2, e^{−2·reach} tan²θ), its derivative in the reach), in mpmath.

    cos²θ has a Beta(k/2, (d − k)/2) law, and the minimum is 2 below the kink in cos²θ.
    """
    with mpmath.workdps(30):
        a, b = mpmath.mpf(k) / 2, mpmath.mpf(d - k) / 2
        shrink = mpmath.exp(-2 * mpmath.mpf(reach))
        kink = shrink / (2 + shrink)
        beyond = mpmath.betainc(a, b, 0, kink, regularized=True)
        if k > 2:
            tangent = b / (a - 1) * mpmath.betainc(a - 1, b + 1, kink, 1, regularized=True)
        else:  # ∫ y^{a−2}(1 − y)^b dy, by y = e^{−v}
            stops = [0, *(v for v in range(1, 12) if v < -mpmath.log(kink)), -mpmath.log(kink)]
            tangent = mpmath.quad(
                lambda v: mpmath.exp((1 - a) * v) * (1 - mpmath.exp(-v)) ** b, stops
            ) / mpmath.beta(a, b)
        return float(2 * beyond + shrink * tangent), float(-2 * shrink * tangent)


@pytest.mark.parametrize(
    ("d", "k"), [(2, 1), (3, 1), (3, 2), (5, 4), (8, 3), (512, 1), (512, 2), (512, 256), (512, 511)]
)
def test_uniform_expectation_has_all_digits(d, k):
    attention = Attention(np.diag([2.0] * k + [1.0] * (d - k)), 2 * np.eye(d))  # γ/‖B‖ = 1
    t = np.array([0.0, 0.4, 2.0, 6.0])
    expected = np.array([expected_square(d, k, reach) for reach in t])
    square, slope = jax.jvp(
        lambda t: zero_temperature_bound(attention, Uniform(d), t) ** 2,
        (jnp.asarray(t),),
        (jnp.ones(4),),
    )
    np.testing.assert_allclose(square, expected[:, 0], rtol=1e-12)
    np.testing.assert_allclose(slope, expected[:, 1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("d", "k"), [(3, 1), (4, 2), (6, 5)])
def test_uniform_bound_decays_at_the_rate_of_its_moments(d, k):
    """min(k, 2)γ/(2‖B‖₂); with k = 1 half of γ/‖B‖₂. At k = 2 a factor √t remains."""
    rate = 0.8 / 1.7
    attention = Attention(np.diag([1.8] * k + [1.0] * (d - k)) / 1.7, 1.7 * np.eye(d))

    def log_bound(t):
        return jnp.log(zero_temperature_bound(attention, Uniform(d), t))

    t = 60 / rate
    slope = float(jax.grad(log_bound)(t))
    if k == 2:
        slope -= 1 / (2 * t)
        np.testing.assert_allclose(slope, -rate, rtol=1e-3)
    else:
        np.testing.assert_allclose(slope, -min(k, 2) * rate / 2, rtol=1e-9)


def test_zero_temperature_bound_of_tokens_in_e_and_orthogonal_to_it():
    attention = Attention(np.diag([2.0, 1, 0]), np.eye(3))
    t = jnp.array([0.0, 1.0, 500.0])
    bound, slope = jax.jvp(
        lambda t: zero_temperature_bound(attention, Measure(np.eye(3), [0.5, 0.3, 0.2]), t),
        (t,),
        (jnp.ones(3),),
    )
    np.testing.assert_allclose(bound, 1, rtol=1e-14)
    np.testing.assert_array_equal(slope, 0)
    assert zero_temperature_bound(attention, Measure(np.eye(3)[:1]), 1.0) == 0
    # Every vector is in E if M is a multiple of the identity.
    still = Attention(np.eye(3), np.eye(3))
    assert zero_temperature_bound(still, Uniform(3), 1.0) == 0
    assert zero_temperature_bound(still, Measure(np.eye(3)), 1.0) == 0


def test_zero_temperature_bound_compiles_and_keeps_the_shape_of_time():
    attention = Attention(np.diag([2, 1, 0.5]), np.diag([0.3, 1, 1]))
    t = np.linspace(0, 3, 6).reshape(2, 3)
    for source in (Uniform(3), Uniform(3).quadrature(50)):
        bound = zero_temperature_bound(attention, source, t)
        assert bound.shape == (2, 3)
        compiled = call(lambda t, source=source: zero_temperature_bound(attention, source, t), t)
        np.testing.assert_allclose(compiled, bound, rtol=1e-14)
        np.testing.assert_allclose(zero_temperature_bound(attention, source, t[1, 0]), bound[1, 0])


@pytest.mark.parametrize("law", [VonMisesFisher(np.ones(3), 2.0), Mixture([Uniform(3)])])
def test_other_laws_are_to_be_given_as_measures(law):
    attention = Attention(np.diag([2.0, 1, 0.5]), np.eye(3))
    for f in (
        lambda: zero_temperature_bound(attention, law, 1.0),
        lambda: inverse_moment(law, np.eye(3)[:, :1], 0.5),
    ):
        name = type(law).__name__
        with pytest.raises(
            InputError, match=rf"not for {name}; pass law.quadrature\(n\) or law.sa"
        ):
            f()


def test_zero_temperature_bound_is_refused_where_it_is_none():
    v, b = np.diag([2.0, 1, 0.5]), np.eye(3)
    for attention, message in (
        (Attention(v, np.eye(3)[[1, 0, 2]] + np.eye(3)), "its rank is 2 of 3"),
        (Attention(v + np.eye(3, k=1), b), "M = VBᵀ has asymmetry .* and there are no biases"),
        (Attention(v, b, value_bias=np.ones(3)), "there are some biases"),
        (Attention(v, query=b, key=b, query_bias=np.ones(3)), "there are some biases"),
    ):
        with pytest.raises(InputError, match=message):
            zero_temperature_bound(attention, Uniform(3), 1.0)
    with pytest.raises(InputError, match=r"t\[1\] is -1.0; it must be finite and ≥ 0"):
        zero_temperature_bound(Attention(v, b), Uniform(3), [0.0, -1.0])
    with pytest.raises(InputError, match="source has dimension 4 and attention 3"):
        zero_temperature_bound(Attention(v, b), Uniform(4), 1.0)


# Moments


@pytest.mark.parametrize(
    ("d", "k", "p", "value"),
    [
        (3, 1, 0.5, 2.0),
        (5, 2, 1, 2.356194490192345),
        (8, 3, 2, 6.0),
        (512, 3, 2, 510.0),
        (3, 1, 1, np.inf),
        (5, 2, 3, np.inf),
        (4, 4, 1, 1.0),
        (4, 4, 7, 1.0),
    ],
)
def test_inverse_moment_of_the_uniform_law(rng, d, k, p, value):
    found = inverse_moment(Uniform(d), rotation(rng, d)[:, :k], p)
    np.testing.assert_allclose(found[:3], value, rtol=1e-12)
    assert not found.dominated


def test_inverse_moment_of_weighted_tokens(rng):
    x, w = sphere_points(rng, 500, 6), simplex(rng, 500)
    basis = rotation(rng, 6)[:, :5]
    found = inverse_moment(Measure(x, w), basis, 1.5)
    terms = np.linalg.norm(x @ basis, axis=1) ** -1.5
    np.testing.assert_allclose(found.value, w @ terms, rtol=1e-12)
    assert found.low < found.value < found.high and not found.dominated
    # A token without weight is not there, even where it would count most.
    more = Measure(np.concatenate([x, np.eye(6)[:1]]), np.append(w, 0))
    aside = np.eye(6)[:, 1:]
    assert inverse_moment(more, aside, 0.5) == pytest.approx(
        inverse_moment(Measure(x, w), aside, 0.5), rel=1e-12
    )
    # Equal weights: the textbook interval.
    plain = inverse_moment(Measure(x), basis, 1.5)
    error = 1.96 * np.std(terms, ddof=1) / np.sqrt(500)
    np.testing.assert_allclose(plain[:3], terms.mean() + error * np.array([0, -1, 1]), rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_interval_covers_the_moment_as_often_as_it_says(rng, weighted):
    basis = np.eye(6)[:, :5]
    truth = inverse_moment(Uniform(6), basis, 1).value
    hits = 0
    for _ in range(300):
        x = sphere_points(rng, 400, 6)
        w = simplex(rng, 400) if weighted else None
        found = inverse_moment(Measure(x, w), basis, 1)
        hits += found.low <= truth <= found.high
    assert 0.92 < hits / 300 < 0.98


def test_inverse_moment_warns_when_few_tokens_decide(rng):
    x, basis = sphere_points(rng, 2000, 3), np.eye(3)[:, :1]
    with pytest.warns(UserWarning, match=r"ten of 2000 tokens carry \d\d% of E\|P_E x\|\^\(−2\)"):
        found = inverse_moment(Measure(x), basis, 2)
    assert found.dominated and np.isfinite(found.value)
    x[7] = [0, 0.6, 0.8]
    assert inverse_moment(Measure(x), basis, 2) == (np.inf, np.inf, np.inf, True)
    with pytest.warns(UserWarning):
        single = inverse_moment(Measure(np.array([[0.6, 0.8]])), np.eye(2)[:, :1], 1)
    assert single == (pytest.approx(1 / 0.6), -np.inf, np.inf, True)


@pytest.mark.parametrize(
    ("basis", "p", "message"),
    [
        (np.eye(3)[:2], 1.0, r"basis has shape \(2, 3\); it must be \(3, k\)"),
        (np.ones((3, 1)), 1.0, "the 1 columns of basis are off orthonormal by 2"),
        (np.eye(3)[:, :0], 1.0, "the 0 columns of basis"),
        (np.eye(3)[:, :1], 0.0, "p is 0.0; it must be finite and positive"),
        (np.eye(3)[:, :1], np.nan, "p is nan; it must be"),
    ],
)
def test_inverse_moment_says_what_is_wrong(basis, p, message):
    for source in (Uniform(3), Measure(np.eye(3)), Tokens(np.eye(3))):
        with pytest.raises(InputError, match=message):
            inverse_moment(source, basis, p)
