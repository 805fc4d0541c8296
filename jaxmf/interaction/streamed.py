"""Pairs summed tile by tile: no (queries × tokens) array, in the values or in the derivatives."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp

from ..errors import InputError
from ..tilt.streamed import fold
from .base import AbstractInteraction, States
from .dense import partial_sum


class Streamed(AbstractInteraction):
    """The pairs in tiles of at most `tile` = (queries, tokens); derivatives recompute a tile."""

    tile: tuple[int, int] = eqx.field(static=True, default=(256, 1024))

    def __check_init__(self):
        if len(self.tile) != 2 or min(self.tile) < 1:
            raise InputError(f"tile is {self.tile}; it must be two positive integers")

    def sum(self, kernel, queries, tokens, weights):
        last = jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), (tokens, weights))

        @partial(jax.checkpoint, prevent_cse=False)
        def block(queries, columns):
            tokens, weights = jax.tree.map(lambda a: jnp.moveaxis(a, -1, 0), columns)
            return partial_sum(kernel, States(*queries), States(*tokens), weights)

        def add(total, queries, columns):
            return jax.tree.map(jnp.add, total, block(queries, columns))

        def start(queries):
            x = queries[0]
            return jnp.zeros(len(x), x.dtype), jnp.zeros_like(x)

        # What fills up the last tile is the first token, without weight.
        absent = jax.tree.map(lambda a: a[..., :1], last[0]), 0.0
        return fold(add, start, queries, last, self.tile, absent)
