"""Flows: orders of the methods, the solved zero-temperature limit, symmetries, derivatives."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
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
from scipy import special
from scipy.integrate import solve_ivp

from jaxmf import (
    RK4,
    Adaptive,
    Attention,
    Euler,
    HeadSum,
    InputError,
    Measure,
    Midpoint,
    SoftmaxAttention,
    Uniform,
    UnnormalisedAttention,
    ZeroTemperature,
    coupling,
    flow,
    spectrum,
    wasserstein,
)
from jaxmf.tilt import Dense, Streamed
from jaxmf.transport import to_axis

METHODS = (Euler, Midpoint, RK4)
run = eqx.filter_jit(flow)  # to which times that are Python numbers are known, not traced


def interacting(seed, d=3, n=8, tilt=Streamed((3, 5))):  # noqa: B008
    """Tokens, and a softmax field in which they all move one another."""
    rng = np.random.default_rng(seed)
    attention = Attention(rng.normal(size=(d, d)), invertible(rng, d))
    return SoftmaxAttention(attention, 3.0, tilt), Measure(
        sphere_points(rng, n, d), simplex(rng, n)
    )


# Zero temperature, where the flow is solved


def symmetric_case(rng, d):
    """B of no symmetry, V with VBᵀ = M symmetric, k = dim E = 2 (1 if d = 2) and gap 0.7."""
    k = 1 if d == 2 else 2
    eigenvalues = np.concatenate([np.full(k, 1.2), np.linspace(0.5, -0.5, d - k)])
    r, b = rotation(rng, d), invertible(rng, d)
    return Attention(r * eigenvalues @ r.T @ np.linalg.inv(b.T), b), b, r, eigenvalues, k


@pytest.mark.parametrize("d", [2, 3, 5, 384])
def test_zero_temperature_flow_is_solved_by_the_exponential_of_m(rng, d):
    """x(t) = e^{sM}x₀/|e^{sM}x₀| with ds/dt = 1/|Bᵀx|; Πx(t) = Πx₀ and
    tan∠(x, E) ≤ e^{−γt/‖B‖₂} tan∠(x₀, E)."""
    attention, b, r, eigenvalues, k = symmetric_case(rng, d)
    x0, times = sphere_points(rng, 3, d), (0.0, 0.5, 1.5, 4.0)
    mu = Measure(x0)
    rho = run(ZeroTemperature(attention), mu, times, RK4(step=0.02))

    def solved(c, s):
        """e^{sM}x₀/|e^{sM}x₀| in the eigenbasis of M, where x₀ is c."""
        y = np.exp(s * eigenvalues) * c
        return y / np.linalg.norm(y)

    rotated = b.T @ r
    for i, c in enumerate(x0 @ r):
        s = solve_ivp(
            lambda t, s, c=c: 1 / np.linalg.norm(rotated @ solved(c, s[0])),
            (0, 4), [0.0], t_eval=times, rtol=1e-10, atol=1e-10,
        ).y[0]  # fmt: skip
        expected = np.array([r @ solved(c, one) for one in s])
        # RK4 at h = 0.02: h⁴ = 2e-7, with a small constant.
        np.testing.assert_allclose(rho.points[:, i], expected, atol=1e-8)

    spaces = spectrum(attention)
    assert spaces.multiplicities[0] == k
    image = spaces.project(mu)
    np.testing.assert_allclose(
        spaces.project(rho).points, np.broadcast_to(image.points, rho.points.shape), atol=1e-7
    )
    shadow = np.linalg.norm(np.asarray(rho.points) @ r[:, :k], axis=-1)
    tangent = np.sqrt(1 - shadow**2) / shadow
    decay = np.exp(-0.7 * np.array(times) / np.linalg.norm(b, 2))[:, None]
    assert np.all(tangent <= decay * tangent[0] * (1 + 1e-9))
    # W₂² ≤ E min(2, e^{−2γt/‖B‖₂} tan²∠(x₀, E)), through the coupling xᵢ(t) ↔ Πxᵢ(0).
    bound = np.sqrt(np.mean(np.minimum(2, (decay * tangent[0]) ** 2), axis=1))
    for i in range(len(times)):
        rho_t = mu.move(rho.points[i])
        assert wasserstein(rho_t, image).value <= coupling(rho_t, image) + 1e-12
        assert coupling(rho_t, image) <= bound[i]


def graded_rule(d, count=200):
    """Tokens that integrate functions of |⟨y, e₁⟩| against the uniform law on S^{d−1}.

    Their latitude is θ = (π/2)s⁶, s by Gauss's rule on [0, 1], so that they crowd at the equator,
    where late times see a layer of width e^{−γt}.
    """
    s, a = special.roots_legendre(count)
    s, a = (1 + s) / 2, a / 2
    latitude = np.pi / 2 * s**6
    a = a * s**5 * np.cos(latitude) ** (d - 2)
    points = np.zeros((2, count, d))
    points[0, :, 0], points[1, :, 0] = np.sin(latitude), -np.sin(latitude)
    points[:, :, 1] = np.cos(latitude)
    return points.reshape(-1, d), np.concatenate([a, a]) / (2 * a.sum())


@pytest.mark.parametrize(("d", "gap", "t"), W2_UNIFORM)
def test_distance_to_the_limit_from_the_uniform_law(d, gap, t):
    mu = Measure(*graded_rule(d))
    attention = Attention(np.diag([1.0] + [1.0 - gap] * (d - 1)), np.eye(d))
    rho = run(ZeroTemperature(attention), mu, t, RK4(step=0.02))
    distance = wasserstein(rho, spectrum(attention).project(mu))
    assert distance.method == "axis"
    # RK4 is right to (γh)⁴γt/120 = 1e-7 at worst, the quadrature to 1e-9 (100 nodes: 1e-7).
    np.testing.assert_allclose(distance.value, W2_UNIFORM[d, gap, t], rtol=1e-7)


def test_quadrature_of_the_law_comes_close_to_that_distance():
    # e = e₂, against which the lattice is balanced. Late on W₂² comes from the equator alone, where
    # few nodes are: W₂ is off by 3.5e-4 at t = 5, by 5e-6 before.
    mu, times = Uniform(3).quadrature(4096), (0.0, 0.5, 5.0)
    attention = Attention(np.diag([0.2, 1.0, 0.2]), np.eye(3))
    rho = run(ZeroTemperature(attention), mu, times, RK4(step=0.1))
    distances = call(to_axis, rho, spectrum(attention).project(mu))
    for t, distance, tolerance in zip(times, distances, (1e-5, 1e-5, 5e-4), strict=True):
        np.testing.assert_allclose(distance, W2_UNIFORM[3, 0.8, t], atol=tolerance)


# Orders


@functools.cache
def exactly(seed, times):
    """The tokens of `interacting` at the given times, by SciPy and a literal softmax."""
    field, mu = interacting(seed)
    v, b, w = (
        np.asarray(a) for a in (field.attention.value, field.attention.key_query, mu.weights)
    )

    def velocity(t, flat):
        x = flat.reshape(mu.points.shape)
        p = np.exp(3.0 * x @ b @ x.T) * w
        drift = p @ x @ v.T / p.sum(axis=1, keepdims=True)
        return (drift - np.sum(x * drift, axis=1, keepdims=True) * x).ravel()

    x0 = np.asarray(mu.points).ravel()
    solution = solve_ivp(
        velocity, (0, times[-1]), x0, "DOP853", t_eval=times, rtol=1e-13, atol=1e-14
    )
    return solution.y.T.reshape(len(times), *mu.points.shape)


@pytest.mark.parametrize("method", METHODS)
def test_order_of_accuracy(method):
    field, mu = interacting(0)
    (exact,) = exactly(0, (1.0,))
    coarse = {Euler: 100, Midpoint: 50, RK4: 20}[method]
    errors = [
        np.linalg.norm(run(field, mu, 1.0, method(steps=steps)).points - exact)
        for steps in (coarse, 2 * coarse)
    ]
    assert errors[1] > 1e-10  # far above rounding
    np.testing.assert_allclose(np.log2(errors[0] / errors[1]), method.order, atol=0.1)
    assert method.order == {Euler: 1, Midpoint: 2, RK4: 4}[method]


@pytest.mark.parametrize("rtol", [1e-4, 1e-9])
def test_adaptive_is_accurate_to_its_tolerance(rtol):
    field, mu = interacting(0)
    times = (0.0, 0.4, 2.0)
    exact = exactly(0, times)
    error = np.abs(run(field, mu, times, Adaptive(rtol=rtol, atol=rtol)).points - exact).max()
    assert 1e-3 * rtol < error < 10 * rtol


def test_adaptive_that_runs_out_of_steps_yields_nan_from_there_on():
    field, mu = interacting(0)
    points = run(field, mu, (0.0, 0.01, 5.0, 6.0), Adaptive(max_steps=3)).points
    assert np.all(np.isfinite(points[:2])) and np.all(np.isnan(points[2:]))


@pytest.mark.parametrize("method", [*(m(step=0.1) for m in METHODS), Adaptive()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_stay_on_the_sphere_in_their_precision(method, dtype):
    # β and the matrices are float64 all the same.
    field, mu = interacting(1)
    mu = Measure(mu.points.astype(dtype), mu.weights)
    rho = run(field, mu, (0.0, 1.0, 5.0), method)
    assert rho.points.dtype == rho.weights.dtype == dtype
    np.testing.assert_allclose(np.linalg.norm(rho.points, axis=-1), 1, atol=4 * eps(dtype))
    exact = run(field, interacting(1)[1], (0.0, 1.0, 5.0), method).points
    # Errors of float32 grow like e^{C₁t}; here C₁t is about five.
    np.testing.assert_allclose(rho.points, exact, atol=2000 * eps(dtype))


# Saved times


def test_saves_the_initial_tokens_first_and_then_composes():
    field, mu = interacting(2)
    mu = Measure(mu.points, mu.weights, np.arange(8))
    method = RK4(steps=5)
    rho = run(field, mu, (0.3, 0.3, 0.7, 2.0), method)  # irregular, and not from zero
    assert rho.points.shape == (4, 8, 3)
    np.testing.assert_array_equal(rho.points[0], mu.points)
    np.testing.assert_allclose(rho.points[1], mu.points, atol=1e-15)
    np.testing.assert_array_equal(rho.weights, mu.weights)
    np.testing.assert_array_equal(rho.labels, mu.labels)
    middle = run(field, mu, 0.4, method)
    np.testing.assert_allclose(rho.points[2], middle.points, atol=1e-14)
    np.testing.assert_allclose(rho.points[3], run(field, middle, 1.3, method).points, atol=1e-14)
    assert middle.points.shape == (8, 3) and np.array_equal(middle.labels, mu.labels)


def test_takes_lists_and_one_saved_time():
    field, mu = interacting(2)
    listed = flow(field, mu, [0, 0.5], Euler())
    np.testing.assert_allclose(listed.points[1], flow(field, mu, 0.5, Euler()).points, atol=1e-15)
    np.testing.assert_array_equal(flow(field, mu, [2.0]).points, mu.points[None])


def test_observes_instead_of_saving():
    field, mu = interacting(2)
    times = (0.0, 0.5, 2.0)

    def observe(mu):
        return {"mean": mu.weights @ mu.points, "first": mu.points[0]}

    seen = run(field, mu, times, RK4(), observe)
    rho = run(field, mu, times, RK4())
    np.testing.assert_allclose(seen["mean"], np.einsum("n,tnd->td", mu.weights, rho.points))
    np.testing.assert_allclose(seen["first"], rho.points[:, 0])
    one = run(field, mu, 2.0, RK4(), observe)
    np.testing.assert_allclose(
        one["mean"], run(field, mu, 2.0).weights @ run(field, mu, 2.0).points
    )


def test_steps_are_the_fewest_that_are_no_longer_than_step():
    for intervals, step, steps in (
        ([0.1 + 0.2], 0.1, 3),  # the quotient is 3.0000000000000004
        ([0.3, 0.7, 0.1], 0.1, 7),
        ([0.31], 0.1, 4),
        ([0.01], 0.1, 1),
        ([0.0], 0.1, 1),
        ([100.0], 0.01, 10_000),
    ):
        assert RK4(step=step).resolve(np.array(intervals)).steps == steps


def test_times_are_those_of_the_kernel_with_its_offset():
    """USA with offset c at time t e^{βc} is USA with offset 0 at time t, step by step."""
    field, mu = interacting(3)
    plain, scaled = (
        UnnormalisedAttention(field.attention, 2.0, offset=c, tilt=Dense()) for c in (0.0, 1.5)
    )
    end = run(plain, mu, 0.5, RK4(steps=20)).points
    np.testing.assert_allclose(
        run(scaled, mu, 0.5 * np.exp(3.0), RK4(steps=20)).points, end, atol=1e-13
    )


# Symmetries, which hold for the discrete flow


@pytest.mark.parametrize("method", METHODS)
@given(seed=seeds)
def test_steps_commute_with_rotations_permutations_and_splittings(method, seed):
    field, mu = interacting(seed)
    rng = np.random.default_rng(seed)
    method = method(steps=8)
    end = run(field, mu, 1.0, method).points
    # Rounding errors grow like e^{C₁t}.
    same = {"atol": 1e-11}

    r = rotation(rng, 3)
    head = field.attention
    turned = SoftmaxAttention(
        Attention(r @ head.value @ r.T, r @ head.key_query @ r.T), 3.0, field.tilt
    )
    np.testing.assert_allclose(
        run(turned, mu.move(mu.points @ r.T), 1.0, method).points, end @ r.T, **same
    )

    order = rng.permutation(8)
    permuted = Measure(mu.points[order], mu.weights[order])
    np.testing.assert_allclose(run(field, permuted, 1.0, method).points, end[order], **same)

    points = jnp.concatenate([mu.points, mu.points[2:3]])
    weights = jnp.append(mu.weights, mu.weights[2] / 4).at[2].multiply(0.75)
    split = run(field, Measure(points, weights), 1.0, method).points
    np.testing.assert_allclose(split[:8], end, **same)
    np.testing.assert_allclose(split[8], split[2], **same)


# Derivatives


def final_height(field, mu, method):
    """A function of the whole flow, no symmetry of which makes a derivative vanish."""
    rho = flow(field, mu, 1.0, method)
    return jnp.sum(rho.weights * jnp.sin(rho.points @ jnp.asarray([1.0, 2.0, -1.0])))


def quotient(f, x, v, h=1e-5):
    return (f(x + h * v) - f(x - h * v)) / (2 * h)


# Tight, since a difference quotient also sees the choice of the steps.
ADAPTIVE = Adaptive(rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("method", "tilt"),
    [(RK4(step=0.1), Dense()), (RK4(step=0.1), Streamed((3, 5))), (ADAPTIVE, Streamed((3, 5)))],
    ids=["rk4-dense", "rk4-3x5", "adaptive-3x5"],
)
def test_differentiates_backwards_in_beta_value_and_key_query(rng, method, tilt):
    field, mu = interacting(4, tilt=tilt)

    def f(beta, value, key_query):
        return final_height(SoftmaxAttention(Attention(value, key_query), beta, tilt), mu, method)

    at = (field.beta, field.attention.value, field.attention.key_query)
    gradient = jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*at)
    compiled = jax.jit(f)
    for i in range(3):
        v = jnp.asarray(rng.normal(size=at[i].shape))
        slope = quotient(lambda a, i=i: compiled(*at[:i], a, *at[i + 1 :]), at[i], v)
        # The quotient is right to h² and to ε/h, both 10⁻¹⁰, times a third derivative.
        np.testing.assert_allclose(jnp.vdot(gradient[i], v), slope, rtol=1e-5)


@pytest.mark.parametrize(
    "method",
    [RK4(step=0.1), Adaptive(rtol=1e-10, atol=1e-10, adjoint=diffrax.DirectAdjoint())],
    ids=["rk4", "adaptive"],
)
def test_differentiates_forwards_in_beta_and_in_the_tokens(rng, method):
    field, mu = interacting(5)

    def f(beta, points):
        at_beta = SoftmaxAttention(field.attention, beta, field.tilt)
        return final_height(at_beta, mu.move(points), method)

    at = (field.beta, mu.points)
    v = jnp.asarray(1.0), jnp.asarray(rng.normal(size=mu.points.shape))
    compiled = jax.jit(f)
    for i in range(2):
        only = tuple(t * (j == i) for j, t in enumerate(v))
        slope = jax.jit(lambda at, only: jax.jvp(f, at, only)[1])(at, only)
        expected = quotient(lambda a, i=i: compiled(*at[:i], a, *at[i + 1 :]), at[i], v[i])
        np.testing.assert_allclose(slope, expected, rtol=1e-5)


@pytest.mark.parametrize("method", [RK4(steps=40), Adaptive(adjoint=diffrax.DirectAdjoint())])
def test_derivative_in_time_is_the_velocity(method):
    field, mu = interacting(6)

    def end(t):
        return flow(field, mu, t, method)

    rho, velocity = jax.jit(lambda t: jax.jvp(end, (t,), (1.0,)))(1.0)
    # The derivative of the discrete flow: RK4 with h = 1/40 is right to 10⁻⁶, Adaptive to 10⁻⁵.
    np.testing.assert_allclose(velocity.points, field(rho.points, rho), atol=1e-4)
    if isinstance(method, RK4):
        ahead, behind = (jax.jit(end)(1 + s * 1e-5).points for s in (1, -1))
        np.testing.assert_allclose(velocity.points, (ahead - behind) / 2e-5, atol=1e-8)


def test_gradient_through_a_flow_holds_no_square_array():
    n, tilt = 8192, Streamed()
    attention = Attention(np.eye(3), np.eye(3))

    def spread(beta, x):
        rho = flow(SoftmaxAttention(attention, beta, tilt), Measure(x), 1.0, RK4(steps=10))
        return jnp.sum(rho.points[:, 0] ** 2)

    x = jax.ShapeDtypeStruct((n, 3), jnp.float64)
    compiled = jax.jit(jax.grad(spread, argnums=(0, 1))).lower(1.0, x).compile()
    # A handful of tiles of 1024 × 1024 and the tokens of ten steps; the square alone is 64 tiles.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * n**2 / 8


def test_jit_changes_nothing():
    field, mu = interacting(7)
    for times, method in ((0.5, RK4(step=0.1)), ((0.0, 0.2, 0.5), Adaptive())):
        eager = flow(field, mu, times, method).points
        np.testing.assert_allclose(run(field, mu, times, method).points, eager, atol=1e-14)
    traced = jax.jit(lambda times: flow(field, mu, times, RK4(steps=5)).points)
    times = np.array([0.0, 0.2, 0.5])
    eager = flow(field, mu, times, RK4(steps=5)).points
    np.testing.assert_allclose(traced(times), eager, atol=1e-14)


def test_heads_flow_together():
    """Two heads of half the value matrix are one head."""
    field, mu = interacting(8)
    half = Attention(field.attention.value / 2, field.attention.key_query)
    heads = HeadSum([SoftmaxAttention(half, 3.0, field.tilt)] * 2)
    np.testing.assert_allclose(run(heads, mu, 1.0).points, run(field, mu, 1.0).points, atol=1e-13)


# What is refused


@pytest.mark.parametrize("times", [-1.0, [0.0, 1.0, 0.5], np.nan, [0.0, np.inf]])
@pytest.mark.parametrize("method", [RK4(), Adaptive()], ids=["rk4", "adaptive"])
def test_refuses_times_that_do_not_increase(times, method):
    with pytest.raises(InputError, match="times must be finite and increasing, and one time must"):
        flow(*interacting(0), times, method)


def test_refuses_a_table_of_times():
    with pytest.raises(InputError, match=r"times have shape \(1, 2\); give one time or a sequence"):
        flow(*interacting(0), np.zeros((1, 2)))


def test_traced_times_need_a_number_of_steps():
    field, mu = interacting(0)
    message = "must be known when compiling: .* give the method `steps`"
    for differentiate in (jax.jit, jax.grad):
        with pytest.raises(InputError, match=message):
            differentiate(lambda t: jnp.sum(flow(field, mu, t, RK4()).points))(1.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0.0}, "step is 0.0; it must be finite and positive"),
        ({"step": -0.1}, "step is -0.1"),
        ({"step": np.inf}, "step is inf"),
        ({"step": None}, "step is None"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
    ],
)
def test_refuses_a_step(method, arguments, message):
    with pytest.raises(InputError, match=message):
        method(**arguments)


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_refuses_a_tolerance(name):
    with pytest.raises(InputError, match=f"{name} is 0.0; it must be finite and positive"):
        Adaptive(**{name: 0.0})
