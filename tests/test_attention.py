"""One attention head: B, V and what biases leave of themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import DTYPES, eps

from jaxmf import Attention, InputError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [2, 5, 7])
def test_logits_and_outputs_are_those_of_the_matrices(rng, r, dtype):
    """⟨Qx + b_q, Ky⟩ = ⟨logit(x), y⟩ and output(m) = Vm + b_v."""
    shapes = {"query": (r, 5), "key": (r, 5), "value": (5, 5), "query_bias": r, "value_bias": 5}
    a = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    x, y = rng.normal(size=(2, 4, 5)).astype(dtype)
    attention = Attention(**a)
    logit = np.sum(attention.logit(jnp.asarray(x)) * y, axis=1)
    expected = np.sum((x @ a["query"].T + a["query_bias"]) * (y @ a["key"].T), axis=1)
    # Sums of 35 terms of size one.
    np.testing.assert_allclose(logit, expected, atol=200 * eps(dtype))
    output = attention.output(jnp.asarray(x))
    assert output.dtype == dtype
    np.testing.assert_allclose(output, x @ a["value"].T + a["value_bias"], atol=50 * eps(dtype))
    assert attention.dimension == 5


def test_key_query_is_the_product_of_query_and_key(rng):
    q, k, v = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 4))
    b = q[0].T @ k[0]
    apart, together = Attention(v, query=q[0], key=k[0]), Attention(v, b)
    np.testing.assert_allclose(apart.key_query, b, atol=1e-14)
    np.testing.assert_allclose(apart.interaction, v @ b.T, atol=1e-13)
    np.testing.assert_array_equal(together.key_query, b)
    for attention in (apart, together):
        assert not np.any(attention.shift) and not np.any(attention.value_bias)


def test_takes_lists_of_integers():
    attention = Attention([[2, 0], [0, 1]], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(attention.interaction, [[0.0, 2.0], [1.0, 0.0]])


def test_is_differentiable_in_its_matrices(rng):
    v, b, dv, db = rng.normal(size=(4, 3, 3))
    _, dm = jax.jvp(lambda v, b: Attention(v, b).interaction, (v, b), (dv, db))
    np.testing.assert_allclose(dm, dv @ b.T + v @ db.T, atol=1e-14)


I, R = np.eye(3), np.ones((2, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": np.ones(3), "key_query": I}, r"value has shape \(3,\); it must be a matrix"),
        ({"value": R, "key_query": I}, r"value has shape \(2, 3\); V must be square"),
        ({"value": np.ones((1, 1)), "key_query": np.ones((1, 1))}, "dimension d ≥ 2"),
        ({"value": I}, "give either key_query .* or both query and key"),
        ({"value": I, "key_query": I, "query": R, "key": R}, "give either key_query"),
        ({"value": I, "query": R}, "give either key_query"),
        ({"value": I, "key": R}, "give either key_query"),
        ({"value": I, "key_query": I, "key": R}, "give either key_query"),
        ({"value": I, "key_query": R}, r"key_query has shape \(2, 3\); it must be \(3, 3\)"),
        ({"value": I, "key_query": I, "query_bias": np.ones(3)}, "query_bias needs query and key"),
        ({"value": I, "query": R, "key": I}, r"key has shape \(3, 3\); it must be \(2, 3\)"),
        ({"value": I, "query": R[:, :2], "key": R}, r"query has shape \(2, 2\); .* \(2, 3\)"),
        ({"value": I, "query": R, "key": R, "query_bias": np.ones(3)}, r"query_bias has shape"),
        ({"value": I, "key_query": I, "value_bias": np.ones(2)}, r"value_bias has shape \(2,\)"),
        ({"value": I * [1, np.nan, 1], "key_query": I}, r"value\[0, 1\] is not finite in float64"),
        ({"value": I, "key_query": np.diag([np.inf, 1, 1])}, r"key_query\[0, 0\] is not finite"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        Attention(**arguments)


def test_names_the_precision_in_which_a_number_is_not_finite():
    with pytest.raises(InputError, match=r"value\[1, 1\] is not finite in float32"):
        Attention(jnp.diag(jnp.asarray([1, jnp.inf], jnp.float32)), I[:2, :2])
