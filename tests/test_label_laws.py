"""Laws of labels: their distribution functions, nodes and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from oracles import simplex

import jaxmf as mf
from jaxmf import InputError


def test_nodes_of_an_interval_are_its_midpoint_quantiles():
    labels, weights = mf.Interval(-1, 3).nodes(4)
    np.testing.assert_allclose(labels, [-0.5, 0.5, 1.5, 2.5], rtol=1e-15)
    np.testing.assert_allclose(weights, 0.25, rtol=1e-15)


def test_nodes_of_an_interval_integrate_with_the_order_of_the_midpoint_rule():
    """∫ξ⁴ over [0, 2] is 16/5; the error is h²/24·(f′(2) − f′(0))·… ∝ 1/count²."""
    errors = []
    for count in (50, 100):
        labels, weights = mf.Interval(0.0, 2.0).nodes(count)
        errors.append(float(weights @ labels**4) - 16 / 5)
    assert errors[0] / errors[1] == pytest.approx(4, rel=1e-3)


def test_the_cdf_of_an_interval_and_its_derivatives():
    xi = np.linspace(-2, 4, 61)
    truth = scipy.stats.uniform(-1, 3).cdf(xi)
    law = mf.Interval(-1.0, 2.0)
    np.testing.assert_allclose(law.cdf(xi), truth, atol=1e-15)
    np.testing.assert_allclose(law.quantile(law.cdf(0.7)), 0.7, rtol=1e-14)
    assert jax.grad(law.cdf)(0.5) == pytest.approx(1 / 3)
    assert jax.grad(law.cdf)(2.5) == 0
    # The ends are leaves: ∂F/∂high = −(ξ − low)/(high − low)².
    slope = jax.grad(lambda high: mf.Interval(-1.0, high).cdf(0.5))(2.0)
    assert slope == pytest.approx(-1.5 / 9)


def test_the_cdf_of_atoms_jumps_by_their_weights(rng):
    values, w = rng.permutation(7) / 2, simplex(rng, 7)
    law = mf.Atoms(values, w)
    for xi in (-1.0, *values, 0.6, 9.0):
        assert law.cdf(xi) == pytest.approx(w[values <= xi].sum(), abs=1e-15)
        middle = (w[values <= xi].sum() + w[values < xi].sum()) / 2
        assert law.rank(xi) == pytest.approx(middle, abs=1e-15)
    # Q(F(ξ)) = ξ, and Q takes each atom on an interval as long as its weight.
    np.testing.assert_array_equal(law.quantile(law.rank(values)), values)
    p = (np.arange(10_000) + 0.5) / 10_000
    share = (np.asarray(law.quantile(p))[:, None] == values).mean(0)
    np.testing.assert_allclose(share, w, atol=2e-4)


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_atoms_are_their_own_nodes_and_keep_their_kind(rng, shape):
    values = rng.permutation(np.prod(shape)).reshape(shape)
    law = mf.Atoms(values)
    labels, weights = law.nodes(5)
    assert labels.dtype == values.dtype
    np.testing.assert_array_equal(labels, values)
    np.testing.assert_allclose(weights, 0.2)
    assert law.atomic and not mf.Interval().atomic


def test_samples_have_the_law(rng):
    drawn = mf.Interval(2.0, 5.0).sample(jax.random.key(0), 2000)
    assert scipy.stats.kstest(np.asarray(drawn), scipy.stats.uniform(2, 3).cdf).pvalue > 0.01
    w = simplex(rng, 4)
    drawn = mf.Atoms([3, 1, 4, 5], w).sample(jax.random.key(1), 4000)
    seen = np.array([(drawn == v).sum() for v in (3, 1, 4, 5)])
    assert scipy.stats.chisquare(seen, 4000 * w).pvalue > 0.01


def test_laws_go_through_jit_and_vmap(rng):
    for law in (mf.Interval(0.5, 2.0), mf.Atoms([0.7, 1.5], [0.25, 0.75])):
        xi = jnp.asarray(rng.uniform(0, 3, 9))
        np.testing.assert_array_equal(jax.jit(jax.vmap(law.rank))(xi), law.rank(xi))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: mf.Interval(1, 1), r"the interval is \[1, 1\]; it must be finite with low < high"),
        (lambda: mf.Interval(0, np.inf), r"it must be finite"),
        (lambda: mf.Interval(0, np.nan), r"it must be finite"),
        (lambda: mf.Interval().nodes(0), r"count is 0"),
        (lambda: mf.Interval().nodes(), r"count is None"),
        (lambda: mf.Atoms([]), r"at least one label"),
        (lambda: mf.Atoms([1.0, np.nan]), r"values\[1\] is not finite"),
        (lambda: mf.Atoms([1, 2, 1]), r"values\[2\] occurs before"),
        (lambda: mf.Atoms([1, 2], [0.5]), r"weights have shape \(1,\)"),
        (lambda: mf.Atoms([1, 2], [1.5, -0.5]), r"weights\[1\] is -0.5"),
        (lambda: mf.Atoms([1, 2], [0.5, 0.4]), r"weights sum to 0.9"),
        (lambda: mf.Atoms([1, 2]).nodes(3), r"2 atoms, which are its nodes, not 3"),
        (lambda: mf.Atoms([[1, 2], [3, 4]]).cdf(1.0), r"only numbers have an order"),
        (lambda: mf.Atoms([[1, 2], [3, 4]]).quantile(0.1), r"only numbers have an order"),
    ],
)
def test_what_is_no_law_is_said_so(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()
