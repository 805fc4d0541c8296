"""Kernels on one pair against their formulas in NumPy and SciPy; the algebra; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from oracles import rotation, seeds, simplex, sphere_points

import jaxmf as mf
from jaxmf import InputError, Measure, kernels
from jaxmf.kernels.check import check

BETA = 1.7


def skew(rng, d):
    g = rng.normal(size=(d, d))
    return g - g.T


def planar(d, angles):
    """The rotation by these angles in the planes of (x₁, x₂), (x₃, x₄), …"""
    u = np.eye(d)
    for k, angle in enumerate(angles):
        c, s = np.cos(angle), np.sin(angle)
        u[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = [[c, -s], [s, c]]
    return u


def gauge_matrix(gauge, xi, d):
    return jax.vmap(gauge.apply, (None, 1), 1)(xi, jnp.eye(d))


@pytest.mark.parametrize("d", [2, 5])
def test_content_and_label_kernels_are_their_formulas(rng, d):
    x, y = sphere_points(rng, 2, d)
    xi, zeta, s = jnp.asarray(0.4), jnp.asarray(5.9), x @ y
    cases = {
        "exponential": (kernels.Exponential(BETA), np.exp(BETA * s) / BETA),
        "offset": (kernels.Exponential(BETA, 1.0), np.exp(BETA * (s - 1)) / BETA),
        "linear": (kernels.Linear(), s),
        "polynomial": (kernels.Polynomial(3, 0.5), (s + 0.5) ** 3),
        "constant": (kernels.Constant(-2.0), -2.0),
        "toeplitz": (kernels.Toeplitz(lambda t: jnp.cos(2 * t) - 1), np.cos(11.0) - 1),
        "fourier": (
            kernels.FourierToeplitz({0: 0.3, 2: -1.5}, period=4.0),
            0.3 - 1.5 * np.cos(2 * np.pi * 2 * 5.5 / 4),
        ),
        "bias": (kernels.DistanceBias(lambda r: 1 / (1 + r)), 1 / 6.5),
        "alibi": (kernels.Alibi(0.5), np.exp(-0.5 * 5.5)),
        "alibi on a circle": (kernels.Alibi(0.5, 6.0), np.exp(-0.5 * 0.5)),
        "gaussian": (kernels.GaussianBias(2.0), np.exp(-(5.5**2) / 8)),
    }
    for name, (kernel, expected) in cases.items():
        found = kernel.evaluate(jnp.asarray(x), xi, jnp.asarray(y), zeta)
        np.testing.assert_allclose(found, expected, rtol=1e-13, err_msg=name)


@given(seeds)
def test_the_algebra_is_that_of_functions(seed):
    rng = np.random.default_rng(seed)
    x, y = jnp.asarray(sphere_points(rng, 2, 4))
    xi, zeta = jnp.asarray(rng.normal(size=2))
    a, b, c = (
        kernels.Exponential(BETA),
        kernels.FourierToeplitz({1: 1.0, 3: 0.2}),
        kernels.Polynomial(2),
    )
    f, g, h = (k.evaluate(x, xi, y, zeta) for k in (a, b, c))
    pairs = (
        (a + b * c, f + g * h),
        ((a + b) * c - 2 * a, (f + g) * h - 2 * f),
        (-a * np.float64(0.5), -f / 2),
        (sum([a, b, c]), f + g + h),
    )
    for kernel, expected in pairs:
        np.testing.assert_allclose(kernel.evaluate(x, xi, y, zeta), expected, rtol=1e-13)
    # A gauge acts on everything inside it, and gauges compose from the inside out.
    one, two = kernels.Rotation(skew(rng, 4)), kernels.RoPE(4)
    turned = one.apply(xi, two.apply(xi, x)), one.apply(zeta, two.apply(zeta, y))
    expected = (a * c).evaluate(turned[0], xi, turned[1], zeta)
    for kernel in ((a * c).gauge(one).gauge(two), (a * c).gauge(one @ two)):
        np.testing.assert_allclose(kernel.evaluate(x, xi, y, zeta), expected, rtol=1e-12)


def test_gauges_are_the_matrices_they_say(rng):
    g, h = skew(rng, 3), skew(rng, 3)
    three = np.stack([skew(rng, 3) for _ in range(2)])
    q = np.stack([rotation(rng, 3) for _ in range(4)])
    v = rng.normal(size=3)
    xi, two = jnp.asarray(0.8), jnp.asarray([0.8, -1.1])
    frequencies = np.array([[1.0, 2.0], [0.5, -1.0]])
    cases = [
        (kernels.RoPE(4), xi, planar(4, [0.8, 0.8 / 100])),
        (kernels.RoPE(5, fix_last=True), xi, planar(5, 0.8 * 1e4 ** (-2 * np.arange(2) / 5))),
        (kernels.RoPE(4, frequencies), two, planar(4, frequencies @ [0.8, -1.1])),
        (kernels.Rotation(g), xi, scipy.linalg.expm(0.8 * g)),
        (kernels.Rotation(three), two, scipy.linalg.expm(0.8 * three[0] - 1.1 * three[1])),
        (
            kernels.Rotation(g) @ kernels.Rotation(h).along(lambda t: t**2),
            xi,
            scipy.linalg.expm(0.8 * g) @ scipy.linalg.expm(0.64 * h),
        ),
        (kernels.Prefix(q), jnp.asarray(2), q[2]),
        (kernels.OrthogonalMap(lambda k: jnp.asarray(q)[k]), jnp.asarray(3), q[3]),
        (
            kernels.Householder(lambda t: t * jnp.asarray(v)),
            xi,
            np.eye(3) - 2 * np.outer(v, v) / (v @ v),
        ),
        (kernels.Householder(np.stack([v, 0 * v])), jnp.asarray(1), np.eye(3)),
    ]
    for gauge, label, expected in cases:
        d = len(expected)
        found = gauge_matrix(gauge, label, d)
        np.testing.assert_allclose(found, expected, atol=1e-13)
        x = jnp.asarray(sphere_points(rng, d))
        np.testing.assert_allclose(gauge.undo(label, gauge.apply(label, x)), x, atol=1e-13)


def test_a_series_is_found_from_its_function_or_refused():
    found = kernels.fourier(lambda t: jnp.cos(t) ** 3, 4)  # ¾ cos t + ¼ cos 3t
    assert found.modes == (1, 3)
    np.testing.assert_allclose(found.amplitudes, [0.75, 0.25], atol=1e-14)
    with pytest.raises(InputError, match="k is not even"):
        kernels.fourier(jnp.sin, 3)
    with pytest.raises(InputError, match="past mode 2"):
        kernels.fourier(lambda t: jnp.cos(3 * t), 2)


def test_a_kernel_of_ones_own_is_five_lines(rng):
    class Gaussian(kernels.AbstractKernel):
        width: float

        def evaluate(self, x, xi, y, zeta):
            return jnp.exp(-jnp.sum((x - y) ** 2) / self.width) * jnp.cos(xi - zeta)

    labels = rng.uniform(0, 6, 9)
    x, w = sphere_points(rng, 9, 3), simplex(rng, 9)
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    matrix = np.exp(-square / 0.7) * np.cos(labels[:, None] - labels)
    found = mf.energy(Gaussian(0.7), Measure(x, w, labels))
    np.testing.assert_allclose(found, w @ matrix @ w / 2, rtol=1e-13)


def test_parameters_have_derivatives(rng):
    mu = Measure(sphere_points(rng, 6, 3), labels=rng.normal(size=6))

    @jax.jit
    def energy(parameters):
        beta, generator, slope, amplitude = parameters
        gauge = kernels.Rotation(generator)
        bias = kernels.Alibi(slope) + kernels.FourierToeplitz({1: amplitude})
        return mf.energy((bias * kernels.Exponential(beta)).gauge(gauge), mu)

    at = (jnp.asarray(2.0), jnp.asarray(skew(rng, 3)), jnp.asarray(0.3), jnp.asarray(0.7))
    along = (jnp.asarray(0.4), jnp.asarray(skew(rng, 3)), jnp.asarray(0.2), jnp.asarray(-1.0))
    _, slope = jax.jvp(energy, (at,), (along,))
    reverse = jax.grad(energy)(at)
    dot = sum(jnp.vdot(a, b) for a, b in zip(reverse, along, strict=True))
    h = 1e-5
    ahead, behind = (
        energy(tuple(p + s * h * v for p, v in zip(at, along, strict=True))) for s in (1, -1)
    )
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * h), rtol=1e-7)
    np.testing.assert_allclose(dot, slope, rtol=1e-12)


EXPONENTIAL = kernels.Exponential(1.0)
LABELS = np.arange(4.0)


class Asymmetric(kernels.AbstractKernel):
    def evaluate(self, x, xi, y, zeta):
        return x[0] * y[1]


class Vector(kernels.AbstractKernel):
    def evaluate(self, x, xi, y, zeta):
        return x * y


@pytest.mark.parametrize(
    "kernel, labels, message",
    [
        (EXPONENTIAL.gauge(kernels.RoPE(4)), None, "no labels; RoPE needs one label, one number"),
        (EXPONENTIAL.gauge(kernels.RoPE(4)), np.ones((4, 2)), r"shape \(2,\); RoPE needs one num"),
        (EXPONENTIAL * kernels.Toeplitz(jnp.cos), None, "no labels; a Toeplitz kernel needs"),
        (EXPONENTIAL * kernels.Alibi(1.0), None, "no labels; a distance bias needs"),
        (EXPONENTIAL * kernels.FourierToeplitz({1: 1.0}), None, "no labels"),
        (EXPONENTIAL.gauge(kernels.Prefix(np.eye(4)[None])), LABELS, "whole numbers from 0 to 0"),
        (
            EXPONENTIAL.gauge(kernels.Prefix(np.stack([np.eye(4)] * 3))),
            np.arange(4),
            r"Prefix at labels\[3\] is not finite; is 3 a label",
        ),
        (EXPONENTIAL.gauge(kernels.RoPE(6)), LABELS, "dimension 4 and RoPE acts on 6"),
        (
            EXPONENTIAL.gauge(kernels.OrthogonalMap(lambda t: (1 + t) * jnp.eye(4))),
            LABELS,
            r"OrthogonalMap at labels\[3\] is not orthogonal: UᵀU − I has entries up to 15",
        ),
        (
            EXPONENTIAL.gauge(kernels.OrthogonalMap(lambda t: jnp.eye(3))),
            LABELS,
            r"returns shape \(3, 3\)",
        ),
        (
            EXPONENTIAL * kernels.DistanceBias(lambda r: 1 - r),
            LABELS,
            r"distance bias is -2 at distance 3; it must be ≥ 0",
        ),
        (Asymmetric(), None, r"not symmetric: h\(z, z′\) = .* tokens . and ."),
        (EXPONENTIAL * kernels.Toeplitz(jnp.sin), LABELS, "not symmetric"),
        (Vector(), None, r"returns shape \(4,\) for one pair"),
    ],
)
def test_refuses_what_is_not_a_kernel_of_an_energy(rng, kernel, labels, message):
    mu = Measure(sphere_points(rng, 4, 4), labels=labels)
    with pytest.raises(InputError, match=message):
        check(kernel, mu)
    with pytest.raises(InputError, match=message):
        mf.energy(kernel, mu)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kernels.RoPE(3), "the last one would stay fixed; give fix_last=True"),
        (lambda: kernels.RoPE(4, [1.0]), r"frequencies have shape \(1,\); d = 4 has 2 planes"),
        (lambda: kernels.RoPE(1, fix_last=True), "d ≥ 2"),
        (lambda: kernels.Rotation(np.eye(3)), "not skew: G \\+ Gᵀ has entries up to 2"),
        (lambda: kernels.Rotation(np.ones((2, 3))), "generator has shape"),
        (lambda: kernels.Prefix(np.ones((3, 3))), "matrices have shape"),
        (
            lambda: kernels.Prefix(np.stack([np.eye(3), 1.1 * np.eye(3)])),
            r"matrices\[1\] is not orthogonal: UᵀU − I has entries up to 0.21",
        ),
        (lambda: kernels.Householder(np.ones(3)), "vectors have shape"),
        (lambda: kernels.Householder(np.array([[1.0, np.nan]])), r"vectors\[0\] is not finite"),
        (lambda: kernels.Exponential(0.0), "beta is 0"),
        (lambda: kernels.Polynomial(0), "degree is 0"),
        (lambda: kernels.Alibi(-1.0), "slope is -1"),
        (lambda: kernels.GaussianBias(0.0), "length is 0"),
        (lambda: kernels.FourierToeplitz({}), "amplitudes is empty"),
        (lambda: kernels.FourierToeplitz({-1: 1.0}), "mode -1; modes are whole"),
        (lambda: kernels.FourierToeplitz({1: 1.0}, period=0.0), "period is 0"),
    ],
)
def test_constructors_refuse(make, message):
    with pytest.raises(InputError, match=message):
        make()
