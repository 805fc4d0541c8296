"""Velocity fields: closed forms against the uniform law, literal sums with biases, symmetries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from oracles import (
    DTYPES,
    GROWTH_RATE,
    call,
    eps,
    invertible,
    log_uniform_mass,
    mean_resultant,
    rotation,
    seeds,
    simplex,
    sphere_points,
    uniform_rule,
    zonal_rule,
)

from jaxmf import (
    Attention,
    HardmaxAttention,
    HeadSum,
    InputError,
    Measure,
    SoftmaxAttention,
    Uniform,
    UnnormalisedAttention,
    ZeroTemperature,
)
from jaxmf.tilt import Dense, Streamed

BETA = 4.0
DENSE = Dense()
FIELDS = {
    "softmax": lambda attention, tilt=DENSE: SoftmaxAttention(attention, BETA, tilt),
    "unnormalised": lambda attention, tilt=DENSE: UnnormalisedAttention(
        attention, BETA, offset=1.5, tilt=tilt
    ),
    "hardmax": lambda attention, tilt=DENSE: HardmaxAttention(attention, tilt=tilt),
    "zero temperature": lambda attention, tilt=None: ZeroTemperature(attention),
}
fields = pytest.mark.parametrize("make", FIELDS.values(), ids=FIELDS)


def project(x, v):
    return v - np.sum(x * v, axis=-1, keepdims=True) * x


def random_attention(rng, d, rank=None):
    """An attention head with every kind of bias, and B of full rank unless told otherwise."""
    q, k = invertible(rng, d), invertible(rng, d)
    b_q, b_v = 0.3 * rng.normal(size=d), 0.3 * rng.normal(size=d)
    v = rng.normal(size=(d, d)) / np.sqrt(d)
    r = rank or d
    return {"value": v, "query": q[:r], "key": k[:r], "query_bias": b_q[:r], "value_bias": b_v}


# Against the uniform law


def uniform_case(x, b, count=400):
    """A measure that the tilt at u ∥ Bᵀx does not tell from the uniform law."""
    u = b.T @ x
    return Measure(*zonal_rule(u / np.linalg.norm(u), count))


@pytest.mark.parametrize("d", [2, 3, 5, 384])
@pytest.mark.parametrize("beta", [0.3, 8.0, 100.0])
def test_against_the_uniform_law(rng, d, beta):
    """v_β[uniform](x) = A_d(β|Bᵀx|) P_x V Bᵀx/|Bᵀx|, and F times that without the denominator."""
    b, v, x = invertible(rng, d), rng.normal(size=(d, d)) / np.sqrt(d), sphere_points(rng, d)
    mu, attention = uniform_case(x, b), Attention(v, b)
    length = np.linalg.norm(b.T @ x)
    kappa = beta * length
    expected = mean_resultant(d, kappa) * project(x, v @ b.T @ x / length)
    softmax = call(SoftmaxAttention(attention, beta), jnp.asarray(x), mu)
    np.testing.assert_allclose(softmax, expected, atol=1e-9 * np.linalg.norm(expected))
    usa = call(UnnormalisedAttention(attention, beta), jnp.asarray(x), mu)
    expected = expected * np.exp(log_uniform_mass(d, kappa) - beta)
    np.testing.assert_allclose(usa, expected, atol=1e-9 * np.linalg.norm(expected))


@pytest.mark.parametrize("d", [2, 3, 5])
def test_against_the_uniform_law_at_many_points(rng, d):
    points, weights = uniform_rule(d, degree=24)
    b, v, x = invertible(rng, d), rng.normal(size=(d, d)), sphere_points(rng, 6, d)
    field = SoftmaxAttention(Attention(v, b), 3.0, Streamed())
    u = x @ b
    length = np.linalg.norm(u, axis=1)
    a = np.array([mean_resultant(d, 3 * one) for one in length])
    expected = project(x, (a / length)[:, None] * u @ v.T)
    # Terms of degree 25 of e^{4.5 t} are left out: 4.5²⁵/25!/2²⁵ < 10⁻¹⁵.
    actual = call(field, jnp.asarray(x), Measure(points, weights))
    np.testing.assert_allclose(actual, expected, atol=1e-11)


@pytest.mark.parametrize("d", [2, 3, 5, 384])
def test_converges_to_zero_temperature_like_one_over_beta(rng, d):
    """v_β[uniform] = v_∞ (1 − (d − 1)/(2β|Bᵀx|) + O(β⁻²))."""
    b, v, x = invertible(rng, d), rng.normal(size=(d, d)), sphere_points(rng, d)
    attention, mu = Attention(v, b), uniform_case(x, b, count=2000)
    x = jnp.asarray(x)
    limit = call(ZeroTemperature(attention), x, mu)
    for beta in (2000.0, 8000.0):
        loss = 1 - call(SoftmaxAttention(attention, beta), x, mu) / limit
        kappa = beta * np.linalg.norm(b.T @ x)
        # The next term is (d − 3)/(4κ) of the first.
        np.testing.assert_allclose(loss * 2 * kappa / (d - 1), np.ones(d), atol=d / (4 * kappa))


@pytest.mark.parametrize(("d", "beta", "degree", "softmax"), GROWTH_RATE)
def test_uniform_law_is_unstable_at_the_predicted_rate(rng, d, beta, degree, softmax):
    """Q = K = V = I and ρ = (1 + εY)σ, Y a spherical harmonic of degree l: since
    ∂ₜρ = −div(ρv) and −div ∇Y = l(l + d − 2)Y, growth at rate λ means that the field's linear
    response is dv/dε = λ/(l(l + d − 2)) ∇Y.
    """
    # Y = Re⟨c, y⟩^l with ⟨c, c⟩ = 0 is harmonic in any dimension.
    c = rotation(rng, d)[:, :2] @ [1, 1j]
    points, weights = uniform_rule(d, degree={2: 60, 3: 50, 5: 28}[d])
    y, x = jnp.asarray(points), jnp.asarray(sphere_points(rng, 4, d))
    harmonic = ((points @ c) ** degree).real
    gradient = project(np.asarray(x), (degree * (x @ c) ** (degree - 1))[:, None] * c).real
    kind = SoftmaxAttention if softmax else UnnormalisedAttention
    field = kind(Attention(np.eye(d), np.eye(d)), beta)

    @jax.jit
    def response(w, dw):
        return jax.jvp(lambda w: field(x, Measure(y, w)), (w,), (dw,))

    rest, perturbation = response(jnp.asarray(weights), jnp.asarray(weights * harmonic))
    np.testing.assert_allclose(rest, 0, atol=1e-13)  # the uniform law is at rest
    rate = GROWTH_RATE[d, beta, degree, softmax]
    if not softmax:
        rate = rate * np.exp(-beta)  # the rate is in the time of the kernel e^{β⟨x,y⟩}
    expected = rate / (degree * (degree + d - 2)) * gradient
    np.testing.assert_allclose(perturbation, expected, atol=1e-9 * np.abs(expected).max())


# Literal sums


@pytest.mark.parametrize("rank", [2, 5])
def test_biases_enter_as_in_a_transformer(rng, rank):
    """Logits ⟨Qx + b_q, Ky + b_k⟩ and values Vy + b_v; b_k is constant in y and drops out."""
    a = random_attention(rng, 5, rank)
    b_k = rng.normal(size=rank)
    x, y, w = sphere_points(rng, 4, 5), sphere_points(rng, 9, 5), simplex(rng, 9)
    query = x @ a["query"].T + a["query_bias"]
    values = y @ a["value"].T + a["value_bias"]
    attention, mu, at = Attention(**a), Measure(y, w), jnp.asarray(x)

    p = np.exp(BETA * query @ (y @ a["key"].T + b_k).T) * w
    softmax = project(x, p @ values / p.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(call(FIELDS["softmax"](attention), at, mu), softmax, atol=1e-13)

    kernel = np.exp(BETA * (query @ (y @ a["key"].T).T - 1.5)) * w
    expected = project(x, kernel @ values)
    usa = call(FIELDS["unnormalised"](attention), at, mu)
    np.testing.assert_allclose(usa, expected, rtol=1e-12, atol=1e-13 * np.abs(expected).max())

    best = np.argmax(query @ a["key"] @ y.T, axis=1)
    hardmax = call(FIELDS["hardmax"](attention), at, mu)
    np.testing.assert_allclose(hardmax, project(x, values[best]), atol=1e-13)

    if rank == 5:
        u = query @ a["key"]
        direction = u / np.linalg.norm(u, axis=1, keepdims=True)
        limit = project(x, direction @ a["value"].T + a["value_bias"])
        actual = call(ZeroTemperature(attention), at, mu)
        np.testing.assert_allclose(actual, limit, atol=1e-13)


@given(seeds)
def test_unnormalised_is_softmax_times_the_mass(seed):
    rng = np.random.default_rng(seed)
    attention = Attention(**random_attention(rng, 3))
    mu, x = (
        Measure(sphere_points(rng, 9, 3), simplex(rng, 9)),
        jnp.asarray(sphere_points(rng, 4, 3)),
    )
    log_mass = Dense()(BETA * attention.logit(x), mu).log_mass
    for offset in (0.0, 1.0, 2.5):
        usa = UnnormalisedAttention(attention, BETA, offset=offset, tilt=DENSE)(x, mu)
        mass = np.exp(log_mass - BETA * offset)[:, None]
        np.testing.assert_allclose(
            usa, mass * SoftmaxAttention(attention, BETA, Dense())(x, mu), rtol=1e-12, atol=1e-300
        )


@given(seeds)
def test_hardmax_is_the_limit_of_softmax_for_finitely_many_tokens(seed):
    rng = np.random.default_rng(seed)
    attention = Attention(**random_attention(rng, 3))
    mu, x = (
        Measure(sphere_points(rng, 9, 3), simplex(rng, 9)),
        jnp.asarray(sphere_points(rng, 4, 3)),
    )
    hardmax = call(FIELDS["hardmax"](attention), x, mu)
    # No two logits are closer than 10⁻⁶ here; e^{−100} of the second token remains at 10⁸.
    nearly = call(SoftmaxAttention(attention, 1e8, Dense()), x, mu)
    np.testing.assert_allclose(nearly, hardmax, atol=1e-13)
    # Nine tokens do not fill the sphere: the mean field's limit is another one, ...
    mean_field = call(ZeroTemperature(attention), x, mu)
    assert np.abs(mean_field - hardmax).max() > 0.01
    # ... which many tokens approach, like n^{−1/2} on S².
    dense = call(HardmaxAttention(attention), x, Uniform(3).quadrature(10_000))
    np.testing.assert_allclose(dense, mean_field, atol=0.05)


def test_hardmax_shares_ties_within_its_tolerance():
    attention = Attention(np.eye(2), np.eye(2))
    angle = np.array([0.1, -0.1, 0.3, 2.0])
    mu = Measure(np.stack([np.cos(angle), np.sin(angle)], 1), np.array([0.4, 0.2, 0.2, 0.2]))
    x = jnp.asarray([1.0, 0.0])
    y = np.asarray(mu.points)
    exact = HardmaxAttention(attention)(x, mu)
    np.testing.assert_allclose(exact, [0, (0.4 * y[0, 1] + 0.2 * y[1, 1]) / 0.6], atol=1e-15)
    loose = HardmaxAttention(attention, tolerance=0.05)(x, mu)  # cos 0.1 − cos 0.3 = 0.04
    np.testing.assert_allclose(loose[1], mu.weights[:3] @ y[:3, 1] / 0.8, atol=1e-15)


@fields
def test_a_sum_of_heads_is_the_sum(rng, make):
    heads = [make(Attention(**random_attention(rng, 3))) for _ in range(3)]
    mu, x = Measure(sphere_points(rng, 9, 3)), jnp.asarray(sphere_points(rng, 4, 3))
    expected = sum(head(x, mu) for head in heads)
    np.testing.assert_allclose(call(HeadSum(heads), x, mu), expected, atol=1e-13)


def test_heads_may_differ_in_beta_and_are_differentiable_in_each(rng):
    attention = Attention(**random_attention(rng, 3))
    mu, x = Measure(sphere_points(rng, 9, 3)), jnp.asarray(sphere_points(rng, 4, 3))

    def speed(betas):
        heads = HeadSum([SoftmaxAttention(attention, beta) for beta in betas])
        return jnp.sum(heads(x, mu)[:, 0])

    slopes = jax.grad(speed)((1.0, 5.0))
    for beta, slope in zip((1.0, 5.0), slopes, strict=True):
        alone = jax.grad(lambda b: jnp.sum(SoftmaxAttention(attention, b)(x, mu)[:, 0]))(beta)
        np.testing.assert_allclose(slope, alone, rtol=1e-12)


# Symmetries


def case(seed, d=3):
    rng = np.random.default_rng(seed)
    x, y, w = sphere_points(rng, 4, d), sphere_points(rng, 23, d), simplex(rng, 23)
    return rng, random_attention(rng, d), jnp.asarray(x), jnp.asarray(y), jnp.asarray(w)


ways = pytest.mark.parametrize("tilt", [Dense(), Streamed((3, 5))], ids=["dense", "3x5"])

# Fields are of size one to ten; the unnormalised one is a sum of exponentials, right to its size.
SAME = {"rtol": 1e-12, "atol": 1e-12}


@fields
@ways
@given(seed=seeds)
def test_turns_with_everything(make, tilt, seed):
    """x → Rx, B → RBRᵀ, V → RVRᵀ and biases with them: v → Rv."""
    rng, a, x, y, w = case(seed)
    r = rotation(rng, 3)
    turned = dict(
        a,
        query=a["query"] @ r.T,
        key=a["key"] @ r.T,
        value=r @ a["value"] @ r.T,
        value_bias=r @ a["value_bias"],
    )
    v = call(make(Attention(**a), tilt), x, Measure(y, w))
    v_turned = call(make(Attention(**turned), tilt), x @ r.T, Measure(y @ r.T, w))
    np.testing.assert_allclose(v_turned, v @ r.T, **SAME)


@fields
@ways
@given(seed=seeds)
def test_sees_the_measure_and_not_its_list_of_tokens(make, tilt, seed):
    """Reordering tokens, or splitting one in two, changes nothing; nor does an absent one."""
    rng, a, x, y, w = case(seed)
    field = make(Attention(**a), tilt)
    v = call(field, x, Measure(y, w))
    order = rng.permutation(23)
    np.testing.assert_allclose(call(field, x, Measure(y[order], w[order])), v, **SAME)
    i = rng.integers(23)
    split = Measure(jnp.concatenate([y, y[i][None]]), jnp.append(w, w[i] / 4).at[i].multiply(0.75))
    np.testing.assert_allclose(call(field, x, split), v, **SAME)
    absent = Measure(jnp.concatenate([y, x[:1]]), jnp.append(w, 0))
    np.testing.assert_allclose(call(field, x, absent), v, **SAME)


@fields
@ways
@given(seed=seeds)
def test_is_tangent_to_the_sphere(make, tilt, seed):
    _, a, x, y, w = case(seed)
    v = call(make(Attention(**a), tilt), x, Measure(y, w))
    np.testing.assert_allclose(np.sum(x * v, axis=1), 0, atol=1e-14 * np.abs(v).max())
    assert np.all(np.linalg.norm(v, axis=1) > 0)


@fields
@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_shape_and_precision(rng, make, dtype):
    """Queries need not be tokens, and there may be any number of them; β is a Python float."""
    attention = Attention(**{k: v.astype(dtype) for k, v in random_attention(rng, 3).items()})
    mu = Measure(jnp.asarray(sphere_points(rng, 9, 3), dtype))
    x = jnp.asarray(sphere_points(rng, 2, 4, 3), dtype)
    field = make(attention)
    v = field(x, mu)
    assert v.shape == x.shape and v.dtype == dtype
    one = field(x[1, 2], mu)
    assert one.shape == (3,) and one.dtype == dtype
    double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (field, x, mu))
    # β⟨Bᵀx, y⟩ is about 10; so is the unnormalised field.
    np.testing.assert_allclose(v, double[0](*double[1:]), atol=200 * eps(dtype), rtol=1e-5)
    np.testing.assert_allclose(one, v[1, 2], atol=50 * eps(dtype), rtol=1e-5)


def test_differentiates_in_beta_and_in_the_matrices(rng):
    _, a, x, y, w = case(0)
    mu = Measure(y, w)
    direction = rng.normal(size=(2, 3, 3))

    @eqx.filter_jit
    def field(beta, value, key):
        attention = Attention(**dict(a, value=value, key=key))
        return SoftmaxAttention(attention, beta, Streamed((3, 5)))(x, mu)

    at = (jnp.asarray(BETA), jnp.asarray(a["value"]), jnp.asarray(a["key"]))
    v = (jnp.asarray(1.0), *map(jnp.asarray, direction))
    h = 1e-5
    ahead, behind = (field(*(p + s * h * t for p, t in zip(at, v, strict=True))) for s in (1, -1))
    slope = jax.jvp(field, at, v)[1]
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * h), atol=1e-7)  # h²·10³


# What is refused

HEAD = Attention(np.eye(3), np.eye(3))


@pytest.mark.parametrize("kind", [SoftmaxAttention, UnnormalisedAttention])
@pytest.mark.parametrize(
    ("beta", "message"),
    [
        (-1.0, "beta is -1.0; it must be finite and positive"),
        (0.0, "beta is 0.0"),
        (np.nan, "beta is nan"),
        (np.inf, "beta is inf"),
        (jnp.ones(2), r"beta has shape \(2,\); a field takes one β \(jax.vmap for more\)"),
    ],
)
def test_refuses_a_beta(kind, beta, message):
    with pytest.raises(InputError, match=message):
        kind(HEAD, beta)


def test_zero_temperature_refuses_a_singular_matrix():
    message = "needs B = QᵀK invertible, but its rank is 2 of 3"
    with pytest.raises(InputError, match=message):
        ZeroTemperature(Attention(np.eye(3), np.diag([1.0, 1.0, 0.0])))


def test_a_sum_of_heads_refuses_what_it_cannot_stack():
    with pytest.raises(InputError, match="heads is empty; a sum needs at least one field"):
        HeadSum([])
    with pytest.raises(InputError, match="heads are fields of different kinds"):
        HeadSum([SoftmaxAttention(HEAD, 1.0), ZeroTemperature(HEAD)])


def test_vmaps_over_beta(rng):
    mu, x = Measure(sphere_points(rng, 9, 3)), jnp.asarray(sphere_points(rng, 4, 3))
    betas = jnp.asarray([0.5, 1.0, 50.0])
    several = jax.vmap(lambda beta: SoftmaxAttention(HEAD, beta)(x, mu))(betas)
    for beta, v in zip(betas, several, strict=True):
        np.testing.assert_allclose(v, SoftmaxAttention(HEAD, beta)(x, mu), atol=1e-14)
