"""Prompts as prefixes: every prompt turns its tokens by an orthogonal matrix of its own.

With U_k for prompt k the tokens of that prompt end at U_kᵀu: as many clusters as prompts, with the
prompts' masses (arXiv:2605.30229).
"""

from typing import Annotated, Any, Literal

import numpy as np
import xarray as xr
from pydantic import Field

from ..errors import InputError
from ..kernels import AbstractGauge, Exponential, Householder, Prefix
from . import auxiliary, portraits
from .auxiliary import AuxiliaryConfig, Orbit, Placed, Theory, exponential_bound
from .config import Count, Matrix, Model, Number, Positive, as_array

Weights = Annotated[list[Positive], Field(min_length=1)]


class RandomPrompts(Model):
    """`count` orthogonal matrices from the seed, with independent uniform directions."""

    name: Literal["random"]
    count: Count
    weights: Weights | None = None

    def build(self, dimension: int, seed: int) -> AbstractGauge:
        rng = np.random.default_rng([seed, 2])
        q, r = np.linalg.qr(rng.normal(size=(self.count, dimension, dimension)))
        return Prefix(q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None])


class ReflectedPrompts(Model):
    """The reflections I − 2vvᵀ/|v|² of some vectors; the identity for a vector of zeros."""

    name: Literal["householder"]
    vectors: Annotated[list[list[Number]], Field(min_length=1)]
    weights: Weights | None = None

    @property
    def count(self) -> int:
        return len(self.vectors)

    def build(self, dimension: int, seed: int) -> AbstractGauge:
        for k, vector in enumerate(self.vectors):
            if len(vector) != dimension:
                raise InputError(
                    f"config key prompts.vectors[{k}] has {len(vector)} numbers; dimension = "
                    f"{dimension}"
                )
        return Householder(np.asarray(self.vectors, np.float64))


class GivenPrompts(Model):
    """Orthogonal matrices."""

    name: Literal["matrices"]
    matrices: Annotated[list[Matrix], Field(min_length=1)]
    weights: Weights | None = None

    @property
    def count(self) -> int:
        return len(self.matrices)

    def build(self, dimension: int, seed: int) -> AbstractGauge:
        matrices = [as_array(matrix, dimension) for matrix in self.matrices]
        for k, matrix in enumerate(matrices):
            if matrix.shape != (dimension, dimension):
                raise InputError(
                    f"config key prompts.matrices[{k}] has shape {matrix.shape}; it must be "
                    f"{(dimension, dimension)} (dimension = {dimension})"
                )
        try:
            return Prefix(np.stack(matrices))
        except InputError as error:
            raise InputError(f"config key prompts.{error}") from None


Prompts = Annotated[RandomPrompts | ReflectedPrompts | GivenPrompts, Field(discriminator="name")]


class Config(AuxiliaryConfig):
    """The keys of a prefix config."""

    experiment: Literal["prefix"]
    prompts: Prompts


def shares(weights: np.ndarray, count: int) -> np.ndarray:
    """Whole numbers that sum to `count`, as nearly in these proportions as can be, all ≥ 1."""
    exact = count * weights / weights.sum()
    whole = np.maximum(np.floor(exact + 1e-9), 1).astype(int)
    while whole.sum() > count:
        whole[np.argmax(np.where(whole > 1, whole - exact, -np.inf))] -= 1
    while whole.sum() < count:
        whole[np.argmax(exact - whole)] += 1
    return whole


def place(config: Config, count: int) -> Placed:
    """Tokens shared out over the prompts; their weights make up what does not come out even."""
    prompts = config.prompts
    weights = np.ones(prompts.count) if prompts.weights is None else np.asarray(prompts.weights)
    if len(weights) != prompts.count:
        raise InputError(
            f"config key prompts.weights has {len(weights)} numbers for {prompts.count} prompts"
        )
    if count < prompts.count:
        raise InputError(
            f"config key tokens.count is {count}, too few for {prompts.count} prompts; each needs "
            "a token"
        )
    weights = weights / weights.sum()
    whole = shares(weights, count)
    labels = np.repeat(np.arange(prompts.count), whole)
    return Placed(labels, (weights / whole)[labels], "prompts")


def theory(config: Config, beta: float, mu: Any) -> Theory:
    """One cluster for every prompt."""
    gauge = config.prompts.build(config.dimension, config.seed)
    return Theory(
        kernel=Exponential(beta).gauge(gauge),
        predict=Orbit(gauge),
        energies={"energy_bound": exponential_bound(beta)},
        kernel_text="e^{β⟨U_kx, U_ly⟩}/β for tokens of prompts k, l",
        law_text="the clusters U_kᵀu, u the direction of Σ w U_kx, with the masses of the prompts",
    )


def prepare(config: Config) -> auxiliary.Prepared:
    """**Raises:** `InputError` for prompts that do not fit, or are not orthogonal."""
    return auxiliary.prepare(config, theory, place)


run = auxiliary.run


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Tokens in their clusters, and the way there."""
    return {"prefix": portraits.draw(dataset)}


def inspect(config: Config) -> list[Any]:
    """The bound, without running anything."""
    return auxiliary.inspect(prepare(config))
