"""The tilt summed tile by tile: no (queries × tokens) array, in the values or in the derivatives.

A block of queries meets the tokens one block at a time and carries a running maximum, so that a
tile of logits lives in cache and nothing overflows or underflows to 0/0. Derivatives are a second
pass of the same shape (with p the tilted probabilities, which log F makes known),

    d log F = Σⱼ pⱼ (⟨du, yⱼ⟩ + ⟨u, dyⱼ⟩ + d log wⱼ),
    dm      = Σⱼ pⱼ (⟨du, yⱼ⟩ + ⟨u, dyⱼ⟩ + d log wⱼ)(yⱼ − m) + Σⱼ pⱼ dyⱼ,

linear in the tangents, so that JAX transposes it for reverse mode; its tiles are recomputed there,
not stored.

Queries are rows and tokens are columns throughout: on CPUs a product whose long axis is contracted
from the left (the transpose of a sum over tokens) is more than ten times slower the other way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ..errors import InputError
from .base import NOTHING, AbstractTilt


class Streamed(AbstractTilt):
    """The tilt in tiles of at most `tile` = (queries, tokens) logits."""

    tile: tuple[int, int] = eqx.field(static=True, default=(1024, 1024))

    def __check_init__(self):
        if len(self.tile) != 2 or min(self.tile) < 1:
            raise InputError(f"tile is {self.tile}; it must be two positive integers")

    def sum(self, u, points, log_weights):
        top, log_total, mean = _streamed(u, points, log_weights, self.tile)
        return top + log_total, mean

    def _exposed(self, u, points, weights, tolerance):
        tokens = (points.T, weights)

        def highest(top, u, tokens):
            y, w = tokens
            return jnp.maximum(top, jnp.max(jnp.where(w > 0, _product(u, y), NOTHING), axis=1))

        def start(u):
            return jnp.full(len(u), NOTHING, u.dtype)

        absent = (0.0, 0.0)
        top = fold(highest, start, u, tokens, self.tile, absent)

        def face(total, queries, tokens):
            (u, least), (y, w) = queries, tokens
            p = jnp.where(_product(u, y) >= least[:, None], w, 0)
            mass, moment = total
            return mass + jnp.sum(p, axis=1), moment + _product(p, y.T)

        def nothing(queries):
            u, least = queries
            return jnp.zeros_like(least), jnp.zeros_like(u)

        least = top - tolerance * jnp.linalg.norm(u, axis=1)
        mass, moment = fold(face, nothing, (u, least), tokens, self.tile, absent)
        return moment / mass[:, None]


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _streamed(u, points, log_weights, tile):
    """(top, log F − top, m), top the largest logit: as far as derivatives go, a constant.

    log F in one number is rounded to |u|ε, which would be the relative error of every p below.
    """
    # One product gives ⟨u, y⟩ + log w, another the moments (Σ p y, Σ p).
    queries = jnp.append(u, jnp.ones_like(u[:, :1]), axis=1)
    lifted = jnp.append(points, log_weights[:, None], axis=1).T
    moments = jnp.append(points, jnp.ones_like(points[:, :1]), axis=1).T

    def add(carry, queries, tokens):
        (top, total), (lifted, moments) = carry, tokens
        logits = _product(queries, lifted)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        p = jnp.exp(logits - higher[:, None])
        total = total * jnp.exp(top - higher)[:, None]
        return higher, total + _product(p, moments.T)

    def start(queries):
        return jnp.full(len(queries), NOTHING, u.dtype), jnp.zeros_like(queries)

    absent = jnp.zeros_like(lifted[:, :1]).at[-1].set(NOTHING), 0.0
    top, total = fold(add, start, queries, (lifted, moments), tile, absent)
    return top, jnp.log(total[:, -1]), total[:, :-1] / total[:, -1:]


@_streamed.defjvp
def _streamed_jvp(tile, primals, tangents):
    u, points, log_weights = primals
    du, dpoints, dlog_weights = tangents
    top, log_total, mean = _streamed(u, points, log_weights, tile)

    # Recomputing a tile's p in the transpose, where storing it would be n × n.
    @partial(jax.checkpoint, prevent_cse=False)
    def add(carry, queries, tokens):
        (u, du, shift, top, log_total), (y, dy, lw, dlw) = queries, tokens
        p = jnp.exp((_product(u, y) + lw - top[:, None]) - log_total[:, None])
        dp = p * (_product(du, y) - shift[:, None] + _product(u, dy) + dlw)
        mass, moment = carry
        return mass + jnp.sum(dp, axis=1), moment + _product(dp, y.T) + _product(p, dy.T)

    def start(queries):
        return jnp.zeros_like(queries[2]), jnp.zeros_like(queries[1])

    tokens = (points.T, dpoints.T, log_weights, dlog_weights)
    absent = (0.0, 0.0, NOTHING, 0.0)
    # ⟨du, y⟩ from its mean: at large |du| the sums below would cancel to nothing.
    shift = jnp.sum(du * mean, axis=1)
    excess, moment = fold(add, start, (u, du, shift, top, log_total), tokens, tile, absent)
    dmean = moment - excess[:, None] * mean
    return (top, log_total, mean), (jnp.zeros_like(top), shift + excess, dmean)


def _product(a, b):
    return jnp.matmul(a, b, precision="highest")


def fold(
    add: Callable[[Any, Any, Any], Any],
    start: Callable[[Any], Any],
    queries: PyTree,
    tokens: PyTree,
    tile: tuple[int, int],
    absent: PyTree,
) -> PyTree:
    """For each block of queries, fold `add(carry, queries, tokens)` over the blocks of tokens.

    The queries run along the first axis of their leaves and the tokens along the last of theirs.
    The last block of tokens is filled up with `absent`.
    """
    count = len(jax.tree.leaves(queries)[0])
    rows = jax.tree.map(lambda a: _blocks(a, 0, tile[0]), queries)
    columns = jax.tree.map(lambda a, b: _blocks(a, -1, tile[1], b), tokens, absent)

    def block(queries):
        def body(carry, tokens):
            return add(carry, queries, tokens), None

        return lax.scan(body, start(queries), columns)[0]

    folded = lax.map(block, rows)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], folded)


def _blocks(a, axis, size, filler=0):
    """Split an axis into equal blocks of at most `size`, filling up the last; blocks come first."""
    n = a.shape[axis]
    count = -(-n // size)
    size = -(-n // count)
    axis %= a.ndim
    padding = jnp.broadcast_to(filler, (*a.shape[:axis], count * size - n, *a.shape[axis + 1 :]))
    a = jnp.concatenate([a, padding.astype(a.dtype)], axis)
    return jnp.moveaxis(a.reshape(*a.shape[:axis], count, size, *a.shape[axis + 1 :]), axis, 0)
