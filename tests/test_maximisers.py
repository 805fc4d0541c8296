"""The search for maximisers: known optima and bounds, saddles, symmetries, reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rotation, simplex, sphere_points

import jaxmf as mf
from jaxmf import InputError, kernels
from jaxmf.maximisers import report

KEY = jax.random.key(0)
CIRCLE = 2 * np.pi * np.arange(64) / 64
COSINE = kernels.FourierToeplitz({1: 1.0})


# The best of many restarts of another search; β = 1 is the great circle's I₁(1)/2.
@pytest.mark.parametrize(
    "beta, best, starts",
    [(1.0, 0.28257955, 8), (2.0, 0.41121078, 8), (3.0, 0.75880672, 32), (5.0, 3.40130860, 128)],
)
def test_finds_the_best_states_of_the_cosine(beta, best, starts):
    found = mf.maximise(COSINE * kernels.Exponential(beta), CIRCLE, 3, key=KEY, starts=starts)
    assert found.energy >= best - 1e-8
    top = found.best
    assert top.kind == "maximum" and top.gradient_norm < 1e-12 and top.curvature < 1e-10
    assert top.flat == 3  # the rotations of S²
    assert 1 <= top.reached <= starts == len(found.energies)
    assert sum(m.reached for m in found.found) == starts
    np.testing.assert_allclose(
        top.energy, mf.energy(COSINE * kernels.Exponential(beta), top.measure)
    )
    assert found.bound > found.energy


@pytest.mark.parametrize("name, d", [("rope", 4), ("prefix", 2)])
def test_gauged_kernels_reach_their_bound(rng, name, d):
    prompts = kernels.Prefix(np.stack([rotation(rng, d) for _ in range(3)]))
    gauge = kernels.RoPE(d) if name == "rope" else prompts
    labels = np.arange(10.0) if name == "rope" else np.arange(10) % 3
    kernel = kernels.Exponential(2.0).gauge(gauge)
    found = mf.maximise(kernel, labels, d, key=KEY, starts=4, steps=150)
    np.testing.assert_allclose(found.bound, np.exp(2) / 4, rtol=1e-14)
    assert abs(found.gap) < 1e-12
    assert found.best.reached == 4 and found.best.flat == d - 1
    turned = jax.vmap(gauge.apply)(jnp.asarray(labels), found.points)
    assert np.abs(turned - turned[0]).max() < 1e-10


def test_many_labels_go_the_matrix_free_way():
    kernel = kernels.Exponential(1.0).gauge(kernels.RoPE(4))
    found = mf.maximise(kernel, np.arange(400.0), 4, key=KEY, starts=2, steps=60)
    top = found.best
    assert abs(found.gap) < 1e-12 and top.kind == "maximum" and top.flat is None
    assert abs(top.curvature) < 1e-8


def test_a_saddle_is_called_one(rng):
    # Two antipodal points: by symmetry critical, and a saddle of a kernel that attracts.
    kernel = kernels.Exponential(1.0)
    e = np.array([0.0, 0.0, 1.0])
    points = np.array([e, e, -e, -e])
    mu = mf.Measure(points)
    (found,) = report(kernel, mu, mu.points[None]).found
    assert found.kind == "saddle" and found.curvature > 1e-2
    assert found.gradient_norm < 1e-15
    again = mf.maximise(kernel, np.zeros(4), 3, key=KEY, initial=points[None] + 0.0)
    assert again.found[0].kind == "saddle"  # a search that starts on it, exactly, stays
    moved = sphere_points(rng, 1, 4, 3)
    assert mf.maximise(kernel, np.zeros(4), 3, key=KEY, initial=moved).best.kind == "maximum"


def test_the_hessian_is_that_of_finite_differences(rng):
    n, d = 5, 3
    kernel = COSINE * kernels.Exponential(2.0)
    labels, w = rng.uniform(0, 6, n), simplex(rng, n)
    mu = mf.Measure(sphere_points(rng, n, d), w, labels)
    x = np.asarray(mu.points)
    frame = [np.linalg.svd(p[None])[2][1:].T for p in x]

    value = jax.jit(lambda points: mf.energy(kernel, mu.move(points)))

    def energy(a):
        moved = np.stack(
            [
                np.cos(r) * p + np.sinc(r / np.pi) * v
                for p, v in ((p, q @ b) for p, q, b in zip(x, frame, a, strict=True))
                for r in [np.linalg.norm(v)]
            ]
        )
        return float(value(jnp.asarray(moved)))

    # In exponential coordinates scaled by √w the second derivatives are the Riemannian Hessian's.
    size, h = n * (d - 1), 1e-3
    scale = np.repeat(1 / np.sqrt(w), d - 1)
    steps = h * np.diag(scale)

    def at(v):
        return energy(v.reshape(n, d - 1))

    matrix = np.array(
        [
            [(at(a + b) - at(a - b) - at(b - a) + at(-a - b)) / (4 * h * h) for b in steps]
            for a in steps
        ]
    )
    (found,) = report(kernel, mu, mu.points[None]).found
    assert found.kind == "unfinished"
    np.testing.assert_allclose(found.curvature, np.linalg.eigvalsh(matrix)[-1], rtol=1e-4)
    assert size == 10


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_state_seen_through_symmetries_is_one(rng, dtype):
    kernel = COSINE * kernels.Exponential(3.0)
    labels = CIRCLE[::4]
    top = mf.maximise(kernel, labels, 3, key=KEY, starts=8).best
    x = np.asarray(top.points)
    seen = [x, x @ rotation(rng, 3), np.roll(x, 5, axis=0), x[::-1]]  # ξ ↦ ξ + c, ξ ↦ c − ξ
    mu = mf.Measure(x.astype(dtype), labels=labels.astype(dtype))
    found = report(kernel, mu, jnp.asarray(np.stack(seen), dtype)).found
    assert [(m.reached, m.kind) for m in found] == [(4, "maximum")]


def test_several_tokens_a_label_become_one():
    found = mf.maximise(
        COSINE * kernels.Exponential(1.0), CIRCLE[::8], 3, key=KEY, starts=4, per_label=3
    )
    assert found.points.shape == (24, 3)
    assert abs(found.best.conditional_variance) < 1e-12
    angle = CIRCLE[::8]
    circle = np.stack([np.cos(angle), np.sin(angle), 0 * angle], axis=1)
    best = mf.energy(COSINE * kernels.Exponential(1.0), mf.Measure(circle, labels=angle))
    np.testing.assert_allclose(found.energy, best, rtol=1e-12)


def test_weights_count_like_copies(rng):
    kernel = COSINE * kernels.Exponential(2.0)
    labels = np.array([0.0, 1.0, 2.5, 4.0])
    weighted = mf.maximise(kernel, labels, 3, key=KEY, starts=16, weights=[0.4, 0.2, 0.2, 0.2])
    copied = mf.maximise(kernel, np.append(labels, 0.0), 3, key=KEY, starts=16)
    np.testing.assert_allclose(weighted.energy, copied.energy, rtol=1e-10)


def test_float32_finds_the_same_energy():
    with jax.enable_x64(False):
        kernel = kernels.FourierToeplitz({1: 1.0}) * kernels.Exponential(1.0)
        found = mf.maximise(kernel, CIRCLE[::4], 3, key=jax.random.key(1), starts=4)
        assert found.points.dtype == jnp.float32
        assert found.best.kind == "maximum"
    np.testing.assert_allclose(found.energy, 0.2825795519962425, rtol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"starts": 0}, "starts is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"per_label": 0}, "per_label is 0"),
        ({"dimension": 1}, "dimension is 1"),
        ({"labels": np.zeros((0,))}, "labels have shape"),
        ({"weights": [0.5, 0.5, 0.0]}, r"weights\[2\] is 0; leave that label out"),
        ({"initial": np.ones((1, 2, 3))}, "initial has shape"),
        ({"kernel": kernels.Exponential(1.0) * kernels.Toeplitz(jnp.sin)}, "not symmetric"),
    ],
)
def test_refuses(arguments, message):
    given = {"kernel": COSINE * kernels.Exponential(1.0), "labels": np.arange(3.0), "dimension": 3}
    with pytest.raises(InputError, match=message):
        mf.maximise(**{**given, **arguments}, key=KEY)


def test_a_graph_law_finds_the_great_circle_and_says_how_near():
    def labels(key, count):
        return jax.random.uniform(key, (count,)) * 2 * jnp.pi

    found = mf.maximise_graph(
        COSINE * kernels.Exponential(1.0),
        labels,
        3,
        key=KEY,
        starts=2,
        steps=400,
        batch=64,
        width=16,
        encode=lambda xi: jnp.stack([jnp.cos(xi), jnp.sin(xi)]),
    )
    assert abs(found.energy - 0.2825795519962425) < 5 * found.error + 1e-3
    # On the circle of labels itself, where the best there is has this energy.
    mu = mf.Measure(found.law(jnp.asarray(CIRCLE)), labels=CIRCLE)
    energy = mf.energy(COSINE * kernels.Exponential(1.0), mu)
    assert 0.2825795519962425 * 0.999 < energy <= 0.2825795519962425
    assert found.report.best.gradient_norm < 0.2 and len(found.energies) == 2


def test_a_graph_law_takes_labels_of_many_numbers(rng):
    frequencies = rng.normal(size=(2, 5))
    kernel = kernels.Exponential(1.0).gauge(kernels.RoPE(4, frequencies))
    found = mf.maximise_graph(
        kernel, rng.normal(size=(200, 5)) / 4, 4, key=KEY, starts=1, steps=300, batch=64, width=32
    )
    assert 0 < found.report.gap < 0.02
    with pytest.raises(InputError, match="encode returns shape"):
        mf.maximise_graph(kernel, np.ones((4, 5)), 4, key=KEY, encode=lambda xi: xi[0])
    with pytest.raises(InputError, match="batch is 0"):
        mf.maximise_graph(kernel, np.ones((4, 5)), 4, key=KEY, batch=0)
