"""Tokens on their way to Π♯ρ₀: what every experiment on concentration builds, and follows."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from ..attention import Attention
from ..errors import InputError
from ..fields import SoftmaxAttention, ZeroTemperature
from ..flows import AbstractMethod
from ..laws import AbstractLaw
from ..measure import Measure
from ..spectra import Assumptions, Eigenspaces, assumptions, eigenspaces
from ..transport import coupling, to_axis, wasserstein
from ..transport.axis import on_axis
from ..transport.wasserstein import COSTS
from .config import (
    AttentionConfig,
    Betas,
    DistanceConfig,
    ExperimentConfig,
    Law,
    TimeConfig,
    TokensConfig,
)
from .inspect import assumptions_table, spectrum_table
from .runner import CompileClock, Monitor, on_sphere, stopped


class ApproachConfig(ExperimentConfig):
    """The keys that these experiments share."""

    law: Law
    tokens: TokensConfig = TokensConfig()
    dimension: Annotated[int, Field(ge=2)]
    attention: AttentionConfig
    beta: Betas
    time: TimeConfig
    distance: DistanceConfig = DistanceConfig()


class Approach(NamedTuple):
    """Everything built from such a config, checked, and ready to run."""

    config: Any
    law: AbstractLaw
    measure: Measure
    attention: Attention
    spectrum: Eigenspaces
    assumptions: Assumptions
    target: Measure
    limit: ZeroTemperature
    method: AbstractMethod


def build_law(config: Any) -> AbstractLaw:
    """The config's law, of the config's dimension."""
    law = config.law.build(config.dimension)
    if law.dimension != config.dimension:
        raise InputError(
            f"config key law is of dimension {law.dimension}, but dimension = {config.dimension}"
        )
    return law


def build_measure(law: AbstractLaw, config: Any, spectrum: Eigenspaces | None = None) -> Measure:
    """The config's tokens, drawn from the law; `graded` ones need the spectrum of M = VBᵀ."""
    tokens = config.tokens
    given = config.law.name == "file" and tokens.placement == "quadrature"
    if tokens.count is None and not given:
        raise InputError("config key tokens.count is missing; say how many tokens to place")
    try:
        if tokens.placement == "quadrature":
            return law.quadrature(tokens.count)
        if tokens.placement == "graded":
            if spectrum is None or law.dimension != 2:
                raise InputError("graded nodes are for concentration on the circle, dimension = 2")
            return law.quadrature(tokens.count, spectrum.dominant[:, 0])
        return law.sample(jax.random.key(config.seed), tokens.count)
    except InputError as error:
        raise InputError(f"config key tokens: {error}") from None


def build(config: Any) -> Approach:
    """Build what the run needs.

    **Raises:** `InputError` for a law, tokens or weights that do not fit, B singular, gap zero, or
    tokens without Π.
    """
    law = build_law(config)
    v, b = config.attention.arrays(config.dimension)
    attention = config.attention.build(config.dimension)
    spectrum = eigenspaces(v @ b.T)
    try:
        limit = ZeroTemperature(attention)
    except InputError as error:
        raise InputError(f"config key attention: {error}") from None
    if spectrum.gap == 0:
        raise InputError(
            "config key attention: M = VBᵀ has a single eigenvalue, "
            f"{float(spectrum.eigenvalues[0]):g}, so its gap is zero and there is nothing to "
            "concentrate on; choose V and B so that VBᵀ has two distinct eigenvalues"
        )
    measure = build_measure(law, config, spectrum)
    try:
        target = spectrum.project(measure)
    except InputError as error:
        raise InputError(f"config key tokens: {error}") from None
    return Approach(
        config=config,
        law=law,
        measure=measure,
        attention=attention,
        spectrum=spectrum,
        assumptions=assumptions(attention, law),
        target=target,
        limit=limit,
        method=config.time.build(),
    )


class Seen(NamedTuple):
    """The tokens at one saved time, W₂ to Π♯ρ₀ with its ends, and what else was observed."""

    measure: Measure
    w2: Any
    w2_lower: Any
    w2_upper: Any
    others: dict[str, Any]


class Follower:
    """Follows the tokens through the saved times, at one β after another, in one program."""

    def __init__(
        self,
        approach: Approach,
        monitor: Monitor,
        clock: CompileClock,
        observe: Callable[[Measure], dict[str, Any]] = lambda mu: {},
    ):
        self.approach, self.monitor, self.clock = approach, monitor, clock
        self.distance = approach.config.distance
        self.times = approach.config.time.times()
        self.steps: dict[bool, Any] = {}
        self.method = "axis" if on_axis(approach.target) else "unknown"
        self.exact = self.method == "axis"
        cost, target = COSTS[self.distance.cost], approach.target

        def look(mu):
            seen = observe(mu) | {"finite": on_sphere(mu), "coupling": coupling(mu, target, cost)}
            return seen | {"w2": to_axis(mu, target, cost)} if self.exact else seen

        self.look = clock(look, approach.measure)
        self.start = self._see(approach.measure)

    def __call__(self, beta: float | None) -> Iterator[Seen]:
        """What is seen at the saved times, at this β or (None) at zero temperature.

        **Raises:** `NonFiniteError` when the tokens leave the sphere.
        """
        approach = self.approach
        limit = beta is None
        field = approach.limit if limit else SoftmaxAttention(approach.attention, beta)
        mu = approach.measure
        interval = jnp.asarray(self.times[1] - self.times[0], mu.points.dtype)
        if limit not in self.steps:
            self.steps[limit] = self.clock(approach.method.advance, field, mu, interval)
        yield self.start
        for kept, t in enumerate(self.times[1:], start=1):
            mu = self.steps[limit](field, mu, interval)
            seen = self._see(mu)
            if seen is None:
                raise stopped(t, beta, kept=kept, of=len(self.times))
            yield seen
            self.monitor.advance("zero temperature" if limit else f"β = {beta:g}")

    def _see(self, mu):
        seen = self.look(mu)
        if not seen["finite"]:
            return None
        if self.exact:
            return Seen(mu, *(seen["w2"],) * 3, seen)
        found = wasserstein(mu, self.approach.target, **self.distance.model_dump())
        self.method = found.method
        return Seen(mu, found.value, found.lower, found.upper, seen)


def distances(approach: Approach, name: str, what: str, shape: dict[str, int]) -> dict[str, Any]:
    """Empty dataset entries for a W₂ and its two ends."""
    units = approach.config.distance.units
    dtype = np.asarray(approach.measure.points).dtype
    return {
        f"{name}{end}": (
            tuple(shape),
            np.full(tuple(shape.values()), np.nan, dtype),
            {"long_name": f"{what}{text}", "units": units},
        )
        for end, text in (("", ""), ("_lower", ", at least"), ("_upper", ", at most"))
    }


def coordinates(betas: list[float], times: np.ndarray) -> dict[str, Any]:
    """β and t, labelled."""
    return {
        "beta": ("beta", betas, {"long_name": "inverse temperature β", "units": "1"}),
        "time": (
            "time",
            times,
            {"long_name": "time t", "units": "softmax attention time, ẋ = P V m"},
        ),
    }


def quality(approach: Approach, dataset: Any, method: str) -> dict[str, Any]:
    """How W₂ was found, for a summary: the widest interval, and how many are wider than asked."""
    widths = (1 - dataset["w2_lower"] / dataset["w2_upper"].where(dataset["w2_upper"] > 0)).values
    return {
        "w2_method": method,
        "w2_widest": float(np.fmax.reduce(widths, axis=None, initial=0.0)),
        "w2_wider_than_asked": int(np.sum(widths > approach.config.distance.width)),
        "tokens": approach.measure.size,
    }


def inspect(config: ApproachConfig) -> list[Any]:
    """The spectra of M and V, and the assumptions, without running anything."""
    law = build_law(config)
    v, b = config.attention.arrays(config.dimension)
    return [
        spectrum_table("M = VBᵀ (symmetric part)", eigenspaces(v @ b.T)),
        spectrum_table("V (symmetric part)", eigenspaces(v)),
        assumptions_table(assumptions(config.attention.build(config.dimension), law)),
    ]
