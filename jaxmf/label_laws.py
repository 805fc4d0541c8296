"""Laws ρ of the labels: the fixed marginal of the auxiliary variable (arXiv:2605.30229).

A law without atoms can be carried to any other law; that is what exact realisation rests on.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ._tracing import known
from ._typing import ArrayLike
from .errors import InputError

Number = float | int | np.number | Float[Array, ""]


class AbstractLabelLaw(eqx.Module):
    """A probability law ρ of labels. `atomic` says whether single labels have mass."""

    atomic: eqx.AbstractClassVar[bool]

    @abc.abstractmethod
    def nodes(self, count: int | None = None) -> tuple[Shaped[Array, "n ..."], Float[Array, " n"]]:
        """Labels and weights that stand for the law."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, count: int) -> Shaped[Array, "count ..."]:
        """`count` independent labels."""

    @abc.abstractmethod
    def cdf(self, xi: ArrayLike) -> Float[Array, "*n"]:
        """F(ξ) = ρ((−∞, ξ]), differentiable where it has a derivative."""

    @abc.abstractmethod
    def rank(self, xi: ArrayLike) -> Float[Array, "*n"]:
        """(F(ξ−) + F(ξ))/2: F itself without atoms, the middle of its jump at an atom."""

    @abc.abstractmethod
    def quantile(self, p: ArrayLike) -> Shaped[Array, "*n"]:
        """The smallest label ξ with F(ξ) ≥ p."""


class Interval(AbstractLabelLaw):
    """The uniform law on [low, high], which has no atoms; both ends are differentiable leaves.

    **Raises:** `InputError` unless low < high, both finite.
    """

    low: Number = 0.0
    high: Number = 1.0
    atomic: ClassVar[bool] = False

    def __check_init__(self):
        low, high = known(self.low), known(self.high)
        if low is not None and high is not None and not -np.inf < low < high < np.inf:
            raise InputError(f"the interval is [{low}, {high}]; it must be finite with low < high")

    def nodes(self, count=None):
        """The midpoints of `count` equal pieces, of equal weight: the quantiles (i + ½)/count."""
        if count is None or count < 1:
            raise InputError(f"count is {count}; labels on an interval need at least one node")
        return self.quantile((np.arange(count) + 0.5) / count), jnp.full(count, 1 / count)

    def sample(self, key, count):
        return self.quantile(jax.random.uniform(key, (count,)))

    def cdf(self, xi):
        return jnp.clip((jnp.asarray(xi) - self.low) / (self.high - self.low), 0, 1)

    def rank(self, xi):
        return self.cdf(xi)

    def quantile(self, p):
        return self.low + (self.high - self.low) * jnp.asarray(p)


class Atoms(AbstractLabelLaw):
    """Σ wₖ δ_ξₖ for finitely many different labels ξₖ: numbers, or vectors (k, m).

    Vectors have no order, so only `nodes` and `sample`. Weights are uniform if left out.

    **Raises:** `InputError` for no labels, labels that are not finite or not different, or weights
    that do not fit.
    """

    values: Shaped[Array, "k ..."]
    weights: Float[Array, " k"]
    atomic: ClassVar[bool] = True

    def __init__(self, values: ArrayLike, weights: ArrayLike | None = None):
        values = jnp.asarray(values)
        if values.ndim == 0 or not values.shape[0]:
            raise InputError(f"values have shape {values.shape}; give at least one label")
        k = len(values)
        w = jnp.full(k, 1 / k) if weights is None else jnp.asarray(weights, jnp.result_type(float))
        if w.shape != (k,):
            raise InputError(f"weights have shape {w.shape}; they must be ({k},), one a label")
        _check_values(known(values))
        _check_weights(known(w))
        self.values, self.weights = values, w

    def nodes(self, count=None):
        """The atoms themselves; `count`, if given, must be their number."""
        if count not in (None, len(self.values)):
            raise InputError(
                f"the law has {len(self.values)} atoms, which are its nodes, not {count}; leave "
                "the count out, or sample"
            )
        return self.values, self.weights

    def sample(self, key, count):
        return self.values[jax.random.choice(key, len(self.values), (count,), p=self.weights)]

    def cdf(self, xi):
        return self._mass(xi, jnp.less_equal)

    def rank(self, xi):
        return (self.cdf(xi) + self._mass(xi, jnp.less)) / 2

    def quantile(self, p):
        self._check_numbers()
        order = jnp.argsort(self.values)
        index = jnp.searchsorted(jnp.cumsum(self.weights[order]), jnp.asarray(p))
        return self.values[order][jnp.minimum(index, len(order) - 1)]

    def _mass(self, xi, precedes):
        self._check_numbers()
        below = precedes(self.values, jnp.asarray(xi)[..., None])
        return jnp.sum(jnp.where(below, self.weights, 0), axis=-1)

    def _check_numbers(self):
        if self.values.ndim > 1:
            raise InputError(
                f"labels have shape {self.values.shape[1:]}; only numbers have an order, and so a "
                "distribution function"
            )


def _check_values(values: np.ndarray | None) -> None:
    if values is None:
        return
    finite = np.isfinite(values.reshape(len(values), -1)).all(1)
    if not finite.all():
        raise InputError(f"values[{np.argmin(finite)}] is not finite; every label must be")
    _, first = np.unique(values, axis=0, return_index=True)
    if len(first) < len(values):
        again = np.setdiff1d(np.arange(len(values)), first)[0]
        raise InputError(
            f"values[{again}] occurs before; atoms must be different labels, their mass in weights"
        )


def _check_weights(w: np.ndarray | None) -> None:
    if w is None:
        return
    bad = ~(np.isfinite(w) & (w >= 0))
    if bad.any():
        k = int(np.argmax(bad))
        raise InputError(f"weights[{k}] is {w[k]:.6g}; weights must be finite and ≥ 0")
    if abs(w.sum(dtype=np.float64) - 1) > 1e-5:
        raise InputError(f"weights sum to {w.sum(dtype=np.float64):.8g}; they must sum to one")
