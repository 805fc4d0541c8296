"""All pairs at once, by autodiff: the definition, for small n and as the yardstick."""

import jax
import jax.numpy as jnp

from .base import AbstractInteraction


class Dense(AbstractInteraction):
    """Every pair of the (queries × tokens) at once."""

    def sum(self, kernel, queries, tokens, weights):
        return partial_sum(kernel, queries, tokens, weights)


def partial_sum(kernel, queries, tokens, weights):
    """(Φ, ∇Φ) of some queries against some tokens, all pairs at once."""

    def potential(x, xi):
        pairs = jax.vmap(kernel.evaluate, (None, None, 0, 0))(x, xi, *tokens)
        return jnp.dot(weights, pairs.astype(weights.dtype), precision="highest")

    return jax.vmap(jax.value_and_grad(potential))(*queries)
