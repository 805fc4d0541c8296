"""Whether a kernel fits the tokens it meets: shapes always, values where they are known."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .._tracing import known
from ..errors import InputError
from ..measure import Measure
from .algebra import AbstractGauge, AbstractKernel
from .frozen import Frozen
from .gauges import check_orthogonal, orthogonality_defect
from .labels import AbstractDistanceBias

LOOKED_AT = 256  # so many tokens, spread over the measure, stand for all in the checks of pairs


def check_pair(kernel: AbstractKernel, queries: tuple, tokens: tuple) -> None:
    """**Raises:** `InputError` unless the kernel makes one number of one pair (points, labels)."""
    one, other = (
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), tuple(states))
        for states in (queries, tokens)
    )
    try:
        found = jax.eval_shape(kernel.evaluate, *one, *other)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        labels = "no labels" if one[1] is None else f"labels of shape {one[1].shape}"
        raise InputError(
            f"the kernel cannot be evaluated on tokens of dimension {one[0].shape[0]} with "
            f"{labels}: {error}"
        ) from error
    shape = getattr(found, "shape", None)
    if shape != ():
        raise InputError(
            f"the kernel returns shape {shape} for one pair of tokens; it must return one number"
        )


def check(kernel: AbstractKernel, mu: Measure) -> None:
    """See that a kernel is one of an energy on these tokens.

    **Raises:** `InputError` if labels are missing or do not fit, h(z, z′) ≠ h(z′, z), a gauge is
    not orthogonal at some label, or a distance bias is negative at some distance of labels.
    """
    states = (mu.points.reshape(-1, mu.dimension)[: mu.size], mu.labels)
    check_pair(kernel, states, states)
    if known(states[0]) is None or (mu.labels is not None and known(mu.labels) is None):
        return
    chosen = np.unique(np.linspace(0, mu.size - 1, min(mu.size, LOOKED_AT)).astype(int))
    for gauge in _parts(kernel, AbstractGauge):
        _check_gauge(gauge, mu.labels, mu.dimension)
    for bias in _parts(kernel, AbstractDistanceBias):
        _check_bias(bias, mu.labels[chosen])
    _check_symmetric(kernel, jax.tree.map(lambda a: a[chosen], states), chosen)


def _parts(kernel: Any, kind: type) -> Iterator[Any]:
    """The outermost parts of this kind; not those that frozen tokens alone see."""
    stop = (kind, Frozen)
    leaves = jax.tree.leaves(kernel, is_leaf=lambda node: isinstance(node, stop))
    return (leaf for leaf in leaves if isinstance(leaf, kind))


def _check_gauge(gauge: AbstractGauge, labels: Shaped[Array, "n ..."] | None, d: int) -> None:
    columns = jax.vmap(gauge.apply, (None, 0), 1)
    over = None if labels is None else 0
    size = 1 if labels is None else len(labels)
    found = jax.vmap(columns, (over, None), axis_size=size)(labels, jnp.eye(d))
    values = known(found)
    if values is None:
        return
    defects = np.nan_to_num(orthogonality_defect(values), nan=np.inf)
    worst = int(np.argmax(defects))
    name = f"{type(gauge).__name__} at labels[{worst}]"
    if not np.all(np.isfinite(values[worst])):
        raise InputError(f"{name} is not finite; is {labels[worst]} a label that it knows?")
    check_orthogonal(name, defects[worst], values.dtype)


def _check_bias(bias: AbstractDistanceBias, labels: Shaped[Array, "n ..."]) -> None:
    pairs = jax.vmap(jax.vmap(bias.factor, (None, 0)), (0, None))(labels, labels)
    values = known(pairs)
    if values is not None and np.any(values < 0):
        i, j = np.unravel_index(np.argmin(values), values.shape)
        distance = float(bias.distance(labels[i], labels[j]))
        raise InputError(
            f"the distance bias is {values[i, j]:.3g} at distance {distance:.3g}; it must be ≥ 0 "
            "(a factor that changes sign is a Toeplitz kernel)"
        )


def _check_symmetric(kernel: AbstractKernel, states: tuple, names: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    count = len(names)
    i, j = rng.integers(count, size=(2, 4 * count))
    one, other = (jax.tree.map(lambda a, k=k: a[k], states) for k in (i, j))
    ahead, back = (
        known(jax.vmap(kernel.evaluate)(*a, *b)) for a, b in ((one, other), (other, one))
    )
    if ahead is None or back is None:
        return
    size = np.abs(ahead).max()
    difference = np.abs(ahead - back)
    tolerance = 1e4 * float(jnp.finfo(jnp.result_type(float, states[0])).eps)
    if np.any(difference > tolerance * size):
        k = int(np.argmax(difference))
        raise InputError(
            f"the kernel is not symmetric: h(z, z′) = {ahead[k]:.6g} and h(z′, z) = {back[k]:.6g} "
            f"for tokens {names[i[k]]} and {names[j[k]]}; an energy needs a symmetric kernel"
        )
