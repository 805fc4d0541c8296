"""Graph laws: maximisers as a map x*: A → S^{d−1}, for continuous or high-dimensional labels.

For a label law ρ without atoms maximisers can be chosen conditionally Dirac (arXiv:2605.30229):
μ* = law of (x*(ξ), ξ). Here x* is a network, and

    E = ½ E h((x*(ξ), ξ), (x*(ζ), ζ)),      ξ, ζ ~ ρ independent,

is climbed on mini-batches of pairs of labels, which estimate it without bias.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from . import sphere
from ._typing import ArrayLike
from .errors import InputError
from .interaction import AbstractInteraction, Automatic
from .kernels import AbstractKernel
from .kernels.check import check
from .maximisers import Maxima, report
from .measure import Measure


class GraphLaw(eqx.Module):
    """x*(ξ) = f(e(ξ))/|f(e(ξ))|, f a multilayer perceptron and e an encoding of the label."""

    network: eqx.nn.MLP
    encode: Callable

    def __call__(self, labels: Shaped[Array, "n ..."]) -> Float[Array, "n d"]:
        """x*(ξ) for each label."""
        return jax.vmap(lambda xi: sphere.normalise(self.network(self.encode(xi))))(labels)


class GraphMaximum(eqx.Module):
    """The best graph law of a search.

    - `law`: x*, a function of labels.
    - `energy`, `error`: E over independent pairs of fresh labels, and its standard error.
    - `energies`: of every start, on the same labels.
    - `report`: what `maximise` says, of the tokens x*(ξ) at fresh labels (and so of their measure,
      the diagonal included). A network ends near a maximum, not at it: the gradient says how near.
    """

    law: GraphLaw
    energy: Float[Array, ""]
    error: Float[Array, ""]
    energies: Float[Array, " starts"]
    report: Maxima


def maximise_graph(
    kernel: AbstractKernel,
    labels: Callable[[PRNGKeyArray, int], Array] | ArrayLike,
    dimension: int,
    *,
    key: PRNGKeyArray,
    starts: int = 8,
    steps: int = 2000,
    batch: int = 256,
    rate: float = 3e-3,
    width: int = 64,
    depth: int = 2,
    encode: Callable | None = None,
    interaction: AbstractInteraction = Automatic(),
) -> GraphMaximum:
    """Search a graph law x*: A → S^{d−1} of large energy, by Adam on mini-batches of label pairs.

    **Arguments:**

    - `labels`: a function (key, count) ↦ labels drawn from ρ, such as `mf.Interval(0, 1).sample`;
      or an array of labels to draw from.
    - `starts`: networks trained side by side. `steps`, `batch`, `rate`: of Adam, whose rate falls
      to zero like a cosine; each step sees batch² pairs.
    - `width`, `depth`: of the hidden layers. `encode`: what the network sees of a label, a vector;
      by default its numbers. For labels on a circle, ξ ↦ (cos ξ, sin ξ).

    **Raises:** `InputError` for labels that do not fit the kernel and the like (see `energy`), or
    counts below one.
    """
    for name, value in (("starts", starts), ("steps", steps), ("batch", batch), ("width", width)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if dimension < 2:
        raise InputError(f"dimension is {dimension}; tokens need d ≥ 2")
    draw = Partial(labels if callable(labels) else _drawn_from(jnp.asarray(labels)))
    encode = Partial(_numbers if encode is None else encode)
    train_key, test_key, network_key = jax.random.split(key, 3)
    example = draw(test_key, 1)[0]
    inputs = jax.eval_shape(encode, example)
    if inputs.ndim != 1:
        raise InputError(f"encode returns shape {inputs.shape}; it must return a vector")

    def new(key):
        return GraphLaw(eqx.nn.MLP(inputs.shape[0], dimension, width, depth, key=key), encode)

    laws = eqx.filter_vmap(new)(jax.random.split(network_key, starts))
    first = _at(laws, 0)
    fresh = draw(test_key, batch)
    check(kernel, Measure(first(fresh), labels=fresh))
    laws = _train(kernel, laws, draw, train_key, steps, batch, rate, interaction)
    pairs = jax.random.split(jax.random.fold_in(test_key, 1), 32)
    values = _values(kernel, laws, draw, pairs, batch, interaction)  # (starts, 32)
    energies = jnp.mean(values, axis=1)
    best = int(jnp.argmax(energies))
    law = _at(laws, best)
    points = law(fresh)
    return GraphMaximum(
        law=law,
        energy=energies[best],
        error=jnp.std(values[best], ddof=1) / jnp.sqrt(32.0),
        energies=energies,
        report=report(kernel, Measure(points, labels=fresh), points[None], interaction),
    )


def _numbers(xi):
    return jnp.asarray(xi, jnp.result_type(float)).reshape(-1)


def _drawn_from(labels):
    if labels.ndim == 0 or not len(labels):
        raise InputError(f"labels have shape {labels.shape}; their first axis must be the labels")
    return Partial(_draw, labels)


def _draw(labels, key, count):
    return labels[jax.random.randint(key, (count,), 0, len(labels))]


def _at(laws, i):
    arrays, rest = eqx.partition(laws, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda a: a[i], arrays), rest)


def _energy(kernel, law, draw, key, batch, interaction):
    """E over all pairs of two independent batches of labels."""
    xi, zeta = (draw(k, batch) for k in jax.random.split(key))
    weights = jnp.full(batch, 1 / batch)
    other = Measure(law(zeta), weights, zeta)
    return jnp.mean(interaction(kernel, law(xi), other, xi).value) / 2


@eqx.filter_jit
def _train(kernel, laws, draw, key, steps, batch, rate, interaction):
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def train(law):
        arrays, rest = eqx.partition(law, eqx.is_inexact_array)

        def step(carry, key):
            arrays, state = carry

            def loss(arrays):
                return -_energy(kernel, eqx.combine(arrays, rest), draw, key, batch, interaction)

            updates, state = optimiser.update(jax.grad(loss)(arrays), state)
            return (optax.apply_updates(arrays, updates), state), None

        start = arrays, optimiser.init(arrays)
        (arrays, _), _ = lax.scan(step, start, jax.random.split(key, steps))
        return eqx.combine(arrays, rest)

    return eqx.filter_vmap(train)(laws)


@eqx.filter_jit
def _values(kernel, laws, draw, keys, batch, interaction):
    def one(law):
        return lax.map(lambda key: _energy(kernel, law, draw, key, batch, interaction), keys)

    return eqx.filter_vmap(one)(laws)
