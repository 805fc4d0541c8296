"""Every way of summing a kernel against the dense autodiff truth, and that against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import DTYPES, call, eps, rotation, simplex, sphere_points

import jaxmf as mf
from jaxmf import InputError, Measure, kernels
from jaxmf.interaction import Automatic, Dense, Streamed, Structured

N = 23
TILT = mf.tilt.Dense()
WAYS = {
    "tilts": Structured(TILT, Dense()),
    "streamed tilts": Structured(mf.tilt.Streamed((7, 5)), Streamed((4, 9))),
    "7x5": Streamed((7, 5)),
    "64x1": Streamed((64, 1)),
    "automatic": Automatic(),
}


def zoo(rng, d):
    exponential, rope = kernels.Exponential(2.5), kernels.RoPE(d, fix_last=True)
    series = kernels.FourierToeplitz({0: 0.3, 1: 1.0, 4: -0.4})
    g = rng.normal(size=(2, d, d))
    turn, other = (kernels.Rotation(a - a.T) for a in g)
    frozen = Measure(sphere_points(rng, 3, d), simplex(rng, 3), np.arange(3.0))
    return {
        "exponential": exponential,
        "offset": kernels.Exponential(300.0, 1.0),
        "linear": kernels.Linear(),
        "polynomial": kernels.Polynomial(3, 0.5),
        "rope": exponential.gauge(rope),
        "wavy": exponential.gauge(turn @ other.along(jnp.sin)),
        "series": series * exponential,
        "gauged series": (series * exponential).gauge(rope),
        "series outside": 0.7 * series * exponential.gauge(rope),
        "series squared": series * series * exponential * exponential,
        "series linear": series * kernels.Linear(),
        "labels alone": series + kernels.Alibi(0.3),
        "bias": kernels.Alibi(0.5) * exponential,
        "gauged bias": kernels.GaussianBias(1.0) * exponential.gauge(turn),
        "two gauges": exponential.gauge(rope) * kernels.Linear().gauge(turn),
        "one gauge twice": exponential.gauge(rope) * kernels.Linear().gauge(rope),
        "sum": exponential.gauge(rope) - 0.4 * kernels.Polynomial(2) * kernels.Alibi(1.0),
        "distributed": (series + 2 * kernels.Constant(1.0)) * (exponential - kernels.Linear()),
        "frozen": exponential + 0.5 * kernels.Frozen(exponential.gauge(rope), frozen),
        "gauged frozen": kernels.Frozen(series * exponential, frozen).gauge(turn),
        "nested gauges": exponential.gauge(rope).gauge(turn) + exponential.gauge(rope),
    }


def scene(rng, d, dtype=jnp.float64):
    """A weighted measure with one token absent, and queries that are not its tokens."""
    w = simplex(rng, N)
    w[3] = 0
    mu = Measure(jnp.asarray(sphere_points(rng, N, d), dtype), w / w.sum(), rng.uniform(0, 6, N))
    return mu, jnp.asarray(sphere_points(rng, 11, d), dtype), jnp.asarray(rng.uniform(0, 6, 11))


NAMES = zoo(np.random.default_rng(0), 2)


WAY_AND_DIMENSION = [("tilts", 2), ("streamed tilts", 3)]


@pytest.mark.parametrize(
    "name, way, d",
    [(name, *case) for name in NAMES for case in WAY_AND_DIMENSION]
    + [(name, way, 6) for name in ("gauged series", "frozen") for way in WAYS],
)
def test_every_way_is_the_dense_sum(rng, name, way, d):
    mu, x, labels = scene(rng, d)
    kernel, way = zoo(rng, d)[name], WAYS[way]
    truth = call(Dense(), kernel, x, mu, labels)
    found = call(way, kernel, x, mu, labels)
    for a, b in zip(truth, found, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-12 * (1e-3 + np.abs(a).max()))


def test_the_dense_sum_is_that_of_numpy(rng):
    mu, x, labels = scene(rng, 3)
    y, w, zeta = (np.asarray(a) for a in (mu.points, mu.weights, mu.labels))
    s = np.asarray(x) @ y.T
    k = np.cos(labels[:, None] - zeta) + np.exp(-0.5 * np.abs(labels[:, None] - zeta))
    kernel = (kernels.FourierToeplitz({1: 1.0}) + kernels.Alibi(0.5)) * kernels.Exponential(2.0)
    value, gradient = Dense()(kernel, x, mu, labels)
    np.testing.assert_allclose(value, (k * np.exp(2 * s) / 2) @ w, rtol=1e-13)
    np.testing.assert_allclose(gradient, (k * np.exp(2 * s) * w) @ y, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_precision_is_that_of_the_tokens(rng, dtype):
    mu, x, labels = scene(rng, 4, dtype)
    for name in ("gauged series", "frozen", "series linear", "wavy"):
        kernel = zoo(rng, 4)[name]
        for way in (Dense(), WAYS["streamed tilts"]):
            value, gradient = jax.eval_shape(way, kernel, x, mu, labels)
            assert value.dtype == gradient.dtype == dtype


def test_float32_errs_by_rounding(rng):
    mu, x, labels = scene(rng, 4)
    low = Measure(mu.points.astype(jnp.float32), mu.weights, mu.labels)
    for name in ("rope", "offset", "gauged series", "series linear", "bias"):
        kernel = zoo(rng, 4)[name]
        truth = call(Dense(), kernel, x, mu, labels)
        found = call(Automatic(largest_dense=1), kernel, x.astype(jnp.float32), low, labels)
        reach = 1e3 if name == "offset" else 50  # a logit of 300 is right to 300 roundings
        for a, b in zip(truth, found, strict=True):
            atol = reach * eps(jnp.float32) * np.abs(a).max()
            np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "name, way",
    [
        ("rope", "streamed tilts"),
        ("gauged series", "tilts"),
        ("sum", "streamed tilts"),
        ("frozen", "tilts"),
        ("series linear", "tilts"),
        ("bias", "7x5"),
    ],
)
def test_derivatives_are_those_of_the_dense_sum(rng, name, way):
    way = WAYS[way]
    mu, x, labels = scene(rng, 3)
    mu = Measure(mu.points, simplex(rng, N), mu.labels)
    kernel = zoo(rng, 3)[name]
    direction = rng.normal(size=x.shape)

    def value(way):
        def f(x, points, weights):
            nu = mu.move(points).reweight(weights)
            found = way(kernel, x, nu, labels)
            return jnp.sum(found.value) + jnp.sum(found.gradient * direction)

        return jax.jit(jax.grad(f, (0, 1, 2)))(x, mu.points, mu.weights)

    for a, b in zip(value(Dense()), value(way), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-11 * np.abs(a).max())


def test_what_it_chooses_it_says(rng):
    series = kernels.FourierToeplitz({0: 1.0, 1: 1.0, 2: 0.5})
    exponential = kernels.Exponential(1.0)
    gauged = exponential.gauge(kernels.RoPE(4))
    say = Automatic().choose
    assert say(gauged, 4096, 4096)[1] == "1 exponential tilt, in conjugated tokens"
    assert say(series * exponential, 4096, 4096)[1] == "6 exponential tilts"
    assert say(series * exponential, 64, 64)[1] == "4096 pairs, held at once"
    assert "in tiles" in say(kernels.Alibi(1.0) * exponential, 4096, 4096)[1]
    assert say(series * kernels.Linear(), 10**6, 10**6)[1] == "moments of the tokens"


def test_streamed_never_holds_all_pairs():
    n = 2**14
    mu = Measure(mf.Uniform(3).quadrature(n).points, labels=np.arange(n) / n)
    kernel = kernels.Alibi(1.0) * kernels.Exponential(2.0)

    def loss(points):
        return jnp.sum(Streamed()(kernel, points, mu.move(points), mu.labels).gradient ** 2)

    memory = jax.jit(jax.grad(loss)).lower(mu.points).compile().memory_analysis()
    assert memory.temp_size_in_bytes < n * n / 4


def test_a_rotation_of_everything_changes_nothing(rng):
    mu, x, labels = scene(rng, 3)
    r = rotation(rng, 3)
    kernel = kernels.FourierToeplitz({1: 1.0}) * kernels.Exponential(3.0)
    one = Automatic()(kernel, x, mu, labels)
    other = Automatic()(kernel, x @ r.T, mu.move(mu.points @ r.T), labels)
    np.testing.assert_allclose(other.value, one.value, rtol=1e-12)
    np.testing.assert_allclose(other.gradient, one.gradient @ r.T, rtol=0, atol=1e-12)


def test_queries_may_have_any_leading_axes(rng):
    mu, x, labels = scene(rng, 3)
    kernel = zoo(rng, 3)["gauged series"]
    flat = Automatic()(kernel, x[:6], mu, labels[:6])
    shaped = Automatic()(kernel, x[:6].reshape(2, 3, 3), mu, labels[:6].reshape(2, 3))
    np.testing.assert_array_equal(shaped.value.reshape(-1), flat.value)
    np.testing.assert_array_equal(shaped.gradient.reshape(-1, 3), flat.gradient)
    one = Automatic()(kernel, x[0], mu, labels[0])
    np.testing.assert_allclose(one.gradient, flat.gradient[0], rtol=1e-13)


def test_refuses_what_does_not_fit(rng):
    mu, x, labels = scene(rng, 3)
    kernel = kernels.Exponential(1.0)
    for query, nu, xi, message in (
        (x[:, :2], mu, labels, "queries have dimension 2 and tokens 3"),
        (x, mu.move(jnp.stack([mu.points] * 2)), labels, "takes one measure"),
        (x, mu, labels[:4], r"labels of the queries have shape \(4,\); it must start with \(11,\)"),
    ):
        with pytest.raises(InputError, match=message):
            Automatic()(kernel, query, nu, xi)
    with pytest.raises(InputError, match="no labels; RoPE"):
        Automatic()(kernel.gauge(kernels.RoPE(3, fix_last=True)), x, mu)
    with pytest.raises(InputError, match=r"tile is \(0, 4\)"):
        Streamed((0, 4))
