"""The tilt with every logit held at once: the textbook sum, for small n and as the yardstick."""

import jax.numpy as jnp
from jax import lax

from .base import AbstractTilt, inner


class Dense(AbstractTilt):
    """The tilt through the full (queries × tokens) array of logits."""

    def sum(self, u, points, log_weights):
        logits = inner(u, points) + log_weights
        top = lax.stop_gradient(jnp.max(logits, axis=1))
        p = jnp.exp(logits - top[:, None])
        # Divided by their own sum, not by e^{log F}, whose rounding grows with |u|.
        total = jnp.sum(p, axis=1)
        mean = jnp.matmul(p, points, precision="highest") / total[:, None]
        return top + jnp.log(total), mean

    def _exposed(self, u, points, weights, tolerance):
        logits = jnp.where(weights > 0, inner(u, points), -jnp.inf)
        slack = tolerance * jnp.linalg.norm(u, axis=1)
        face = logits >= (jnp.max(logits, axis=1) - slack)[:, None]
        p = jnp.where(face, weights, 0)
        return jnp.matmul(p, points, precision="highest") / jnp.sum(p, axis=1, keepdims=True)
