"""Labels of tokens, as a config gives them: positions, a circle, an interval, samples, a file."""

import math
from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import Field

from ..errors import InputError
from .config import Count, Model, Number, Positive


class _Labels(Model):
    """What all labels have: `per_label` tokens with each."""

    per_label: Count = 1

    def build(self, count: int, seed: int) -> np.ndarray:
        """The labels of `count` tokens, in double precision.

        **Raises:** `InputError` if they cannot be shared out evenly, or do not fit.
        """
        if count % self.per_label:
            raise InputError(
                f"config key labels.per_label is {self.per_label}, which does not divide the "
                f"{count} tokens"
            )
        distinct = self.distinct(count // self.per_label, np.random.default_rng([seed, 1]))
        return np.repeat(distinct, self.per_label, axis=0)


class Positions(_Labels):
    """scale·i for i = 0, 1, 2, …."""

    name: Literal["positions"]
    scale: Number = 1.0

    def distinct(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.scale * np.arange(count)


class Circle(_Labels):
    """2πi/n, or independent and uniform on [0, 2π)."""

    name: Literal["circle"]
    placement: Literal["equispaced", "sample"] = "equispaced"

    def distinct(self, count: int, rng: np.random.Generator) -> np.ndarray:
        sampled = self.placement == "sample"
        return 2 * math.pi * (rng.random(count) if sampled else np.arange(count) / count)


class Interval(_Labels):
    """Equispaced from `low` to `high`, both included, or independent and uniform between them."""

    name: Literal["interval"]
    low: Number = 0.0
    high: Number = 1.0
    placement: Literal["equispaced", "sample"] = "equispaced"

    @pydantic.model_validator(mode="after")
    def _ordered(self):
        if not self.low < self.high:
            raise ValueError(f"low = {self.low:g} must be less than high = {self.high:g}")
        return self

    def distinct(self, count: int, rng: np.random.Generator) -> np.ndarray:
        if self.placement == "sample":
            return rng.uniform(self.low, self.high, count)
        return np.linspace(self.low, self.high, count)


class Normal(_Labels):
    """Independent and normal."""

    name: Literal["normal"]
    mean: Number = 0.0
    deviation: Positive = 1.0

    def distinct(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(self.mean, self.deviation, count)


class File(_Labels):
    """The rows of a `.npy` file, numbers or vectors, one for each label."""

    name: Literal["file"]
    path: str

    def distinct(self, count: int, rng: np.random.Generator) -> np.ndarray:
        try:
            rows = np.load(self.path, allow_pickle=False)
        except FileNotFoundError:
            raise InputError(
                f"config key labels.path: label file {self.path} does not exist"
            ) from None
        except (OSError, ValueError, EOFError):
            rows = None
        if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "fiu":
            raise InputError(
                f"config key labels.path: label file {self.path} is not a .npy file of numbers"
            )
        if rows.ndim == 0 or len(rows) != count or not np.all(np.isfinite(rows)):
            raise InputError(
                f"config key labels.path: label file {self.path} has shape {rows.shape}; it must "
                f"hold {count} rows of finite numbers, one for each label"
            )
        return rows.astype(np.float64)


Labels = Annotated[Positions | Circle | Interval | Normal | File, Field(discriminator="name")]
