"""Tokens with auxiliary variables, over many seeds: what the experiments on USA-AV share.

(arXiv:2605.30229.) Tokens climb the energy E = ½∬ h dμ dμ of a kernel h((x, ξ), (y, ζ)) while their
labels ξ stay. An experiment says by its `Theory` which kernel that is, and which law of the tokens
the theory predicts; here tokens start from samples of a law, other ones for every seed, flow, and
are held against it. Time is that of the kernel e^{β⟨x,y⟩}/β as given.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Array, Float
from pydantic import BeforeValidator, Field
from rich import box
from rich.table import Table

from .. import sphere
from ..energies import curve, observer
from ..errors import InputError, NonFiniteError
from ..fields import Ascent
from ..flows import AbstractMethod, flow
from ..interaction import Automatic
from ..kernels import AbstractGauge, AbstractKernel
from ..kernels.check import check
from ..laws import AbstractLaw
from ..measure import Measure
from ..observables import conditional_variance, count_clusters, effective_rank, resultant_length
from ..transport import coupling, wasserstein
from ..transport.wasserstein import COSTS
from .approach import build_law
from .config import (
    Betas,
    Count,
    DistanceConfig,
    ExperimentConfig,
    Law,
    Model,
    TimeConfig,
    UniformLaw,
    listed,
)
from .labels import Labels
from .runner import CompileClock, Monitor, Result, on_sphere


class CountsConfig(Model):
    """How many tokens; several numbers are as many runs."""

    count: Annotated[list[Count], Field(min_length=1), BeforeValidator(listed)]


class AuxiliaryConfig(ExperimentConfig):
    """The keys that these experiments share."""

    dimension: Annotated[int, Field(ge=2)]
    tokens: CountsConfig
    beta: Betas
    seeds: Count = Field(default=20, description="runs, each from another sample of the law")
    law: Law = UniformLaw(name="uniform")
    time: TimeConfig
    distance: DistanceConfig = DistanceConfig()
    chunk: Count = Field(default=5, description="seeds computed, and kept, together")

    @pydantic.model_validator(mode="after")
    def _one_list(self):
        if len(set(self.tokens.count)) > 1 and len(set(self.beta)) > 1:
            raise ValueError("tokens.count and beta are both lists; at most one of them may be")
        # e^β/β, the size of a velocity, must be a number.
        largest = math.log(np.finfo(self.precision).max)
        if max(self.beta) > largest - 1:
            raise ValueError(
                f"beta = {max(self.beta):g} is too large: e^β overflows in {self.precision} from "
                f"β = {largest:.0f}"
            )
        return self


class LabelledConfig(AuxiliaryConfig):
    """The keys of an experiment whose labels are positions."""

    labels: Labels


class Theory(NamedTuple):
    """What an experiment says at one β: the kernel, and what becomes of the tokens.

    - `predict`: the points of the law predicted, from the tokens at the end.
    - `energies`: known values of the energy, by their names in the dataset.
    - `kernel_text`, `law_text`: both in words.
    """

    kernel: AbstractKernel
    predict: Callable[[Measure], Float[Array, "n d"]]
    energies: dict[str, float]
    kernel_text: str
    law_text: str


ENERGIES = {
    "energy_bound": "no measure with these labels has more energy",
    "energy_great_circle": "energy of the great circle",
    "energy_searched": "the largest energy that a search of many starts has found",
}


class Placed(NamedTuple):
    """Labels (None without), weights (None if equal), what kind of labels, and their period."""

    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    kind: str = "none"
    period: float | None = None


def labelled(config: LabelledConfig, count: int) -> Placed:
    """Labels as the config's `labels` has them, equal weights."""
    labels = config.labels
    return Placed(
        labels.build(count, config.seed),
        kind=labels.name,
        period=2 * math.pi if labels.name == "circle" else None,
    )


class Orbit(eqx.Module):
    """The law of U_ξᵀu, u the direction of Σ wᵢ U_{ξᵢ}xᵢ: the maximisers of a gauged exponential
    kernel, any u being as good as another; without a gauge the single point u.
    """

    gauge: AbstractGauge | None = None

    def __call__(self, mu: Measure) -> Float[Array, "n d"]:
        turned = mu.points
        if self.gauge is not None:
            turned = jax.vmap(self.gauge.apply)(mu.labels, mu.points)
        u = sphere.normalise(jnp.matmul(mu.weights, turned, precision="highest"))
        if self.gauge is None:
            return jnp.broadcast_to(u, mu.points.shape)
        return jax.vmap(self.gauge.undo, (0, None))(mu.labels, u)


def exponential_bound(beta: float) -> float:
    """e^β/(2β), the most energy that e^{β⟨x,y⟩}/β has, with any gauge."""
    return math.exp(beta) / (2 * beta)


class Case(NamedTuple):
    """One number of tokens at one β: labels and weights, and the starts of every seed."""

    count: int
    beta: float
    measure: Measure
    starts: np.ndarray
    theory: Theory


class Prepared(NamedTuple):
    """Everything built from a config, checked, and ready to run."""

    config: Any
    cases: list[Case]
    placed: Placed
    method: AbstractMethod

    @property
    def axis(self) -> str | None:
        """What tells the cases apart, if there are several: count or beta."""
        if len(self.cases) == 1:
            return None
        return "count" if self.cases[0].count != self.cases[1].count else "beta"


def prepare(
    config: AuxiliaryConfig,
    theory: Callable[[Any, float, Measure], Theory],
    place: Callable[[Any, int], Placed] = labelled,
) -> Prepared:
    """Place the labels, draw the starts and build the kernels.

    **Raises:** `InputError` for a law, labels or a kernel that do not fit each other.
    """
    law = build_law(config)
    cases = []
    for count in sorted(set(config.tokens.count)):
        placed = place(config, count)
        keys = jax.random.split(jax.random.key(config.seed), config.seeds)
        starts = np.asarray(jax.jit(jax.vmap(lambda key, n=count: law.sample(key, n).points))(keys))
        labels = placed.labels
        if labels is not None and labels.dtype.kind == "f":
            labels = labels.astype(starts.dtype)
        mu = Measure(starts[0], placed.weights, labels)
        for beta in sorted(set(config.beta)):
            said = theory(config, beta, mu)
            try:
                check(said.kernel, mu)
            except InputError as error:
                raise InputError(f"config key labels: {error}") from None
            cases.append(Case(count, beta, mu, starts, said))
    return Prepared(config, cases, placed, config.time.build())


@eqx.filter_jit
def _sample(law: AbstractLaw, keys: Array, count: int) -> Float[Array, "seeds n d"]:
    return jax.vmap(lambda key: law.sample(key, count).points)(keys)


def run(prepared: Prepared, monitor: Monitor) -> Result:
    """Flow the tokens of every seed, a chunk of seeds at a time, one case after another."""
    config = prepared.config
    clock = CompileClock()
    times = config.time.times()
    dataset = _empty(prepared, times)
    programs: dict[Any, Any] = {}

    def one(mu, kernel, predict, start):
        energies = observer(kernel)

        def observe(mu):
            return {
                "tokens": mu.points,
                "energies": energies(mu),
                "resultant_length": resultant_length(mu),
                "effective_rank": effective_rank(mu),
                "conditional_variance": conditional_variance(mu),
            }

        seen = flow(Ascent(kernel), mu.move(start), times, prepared.method, observe)
        climb = curve(jnp.asarray(times, start.dtype), *seen.pop("energies"))
        last = mu.move(seen.pop("tokens")[-1])
        return seen | {
            "energy": climb.energy,
            "dissipation": climb.dissipation,
            "identity_error": climb.identity_error,
            "largest_drop": climb.largest_drop,
            "tokens_final": last.points,
            "predicted": predict(last),
            "finite": on_sphere(last),
        }

    def result():
        return Result(dataset, _summary(prepared, dataset, clock))

    monitor.start(len(prepared.cases) * config.seeds)
    size = min(config.chunk, config.seeds)
    for i, case in enumerate(prepared.cases):
        place = {} if prepared.axis is None else {prepared.axis: i}
        arguments = case.theory.kernel, case.theory.predict
        program = jax.tree.structure(arguments), case.count
        for start in range(0, config.seeds, size):
            # The last chunk goes over seeds again, so that one program does for all.
            first = min(start, config.seeds - size)
            starts = case.starts[first : first + size]
            if program not in programs:
                mapped = jax.vmap(partial(one, case.measure), (None, None, 0))
                programs[program] = clock(mapped, *arguments, starts)
            found = programs[program](*arguments, starts)
            found = {name: np.asarray(value) for name, value in found.items()}
            for k, seed in enumerate(range(first, first + size)):
                if seed < start:
                    continue
                if found["finite"][k]:
                    seen = {name: value[k] for name, value in found.items() if name != "finite"}
                    _store(dataset, place | {"seed": seed}, seen | _compared(config, case, seen))
                monitor.advance(f"{case.count} tokens, β = {case.beta:g}, seed {seed}")
            monitor.keep(result())
            if not np.all(found["finite"]):
                raise NonFiniteError(
                    f"the tokens of {np.sum(~found['finite'])} seeds stopped being finite at "
                    f"beta = {case.beta:g}; all that was finished is kept; smaller steps or "
                    "precision: float64 may help"
                )
    return result()


def _compared(config: AuxiliaryConfig, case: Case, seen: dict[str, np.ndarray]) -> dict[str, Any]:
    """Clusters, and W₂ to the predicted law, of one seed's last tokens."""
    mu, nu = (case.measure.move(jnp.asarray(seen[name])) for name in ("tokens_final", "predicted"))
    cosine = np.asarray(mu.points, np.float64) @ np.asarray(nu.points, np.float64).T
    if np.all(np.diagonal(cosine) >= cosine.max(axis=1) - 1e-14):
        # No token is nearer to another point of the predicted law than to its own: there is no
        # better plan than to stay, whatever the weights.
        lower = value = upper = coupling(mu, nu, COSTS[config.distance.cost])
    else:
        found = wasserstein(mu, nu, **config.distance.model_dump())
        lower, value, upper = found.lower, found.value, found.upper
    return {
        "clusters": count_clusters(seen["tokens_final"]),
        "w2_predicted": value,
        "w2_predicted_lower": lower,
        "w2_predicted_upper": upper,
    }


def _store(dataset: xr.Dataset, place: dict[str, int], seen: dict[str, Any]) -> None:
    for name, value in seen.items():
        here = dict(place)
        if "token" in dataset[name].dims:  # fewer than in the largest case
            here["token"] = slice(len(value))
        dataset[name][here] = value


def _empty(prepared: Prepared, times: np.ndarray) -> xr.Dataset:
    """The dataset before anything is known but the starts, labelled."""
    config, cases, axis, placed = prepared.config, prepared.cases, prepared.axis, prepared.placed
    dtype = cases[0].starts.dtype
    n, d = max(case.count for case in cases), config.dimension
    lead = {} if axis is None else {axis: len(cases)}
    own = lead if axis == "count" else {}  # what is the same for every β is there once
    sizes = {"seed": config.seeds, "time": len(times), "token": n, "component": d}
    energy, squared = "energy of the kernel", "energy of the kernel per time"

    def unknown(dims, long_name, units="1", kind=dtype):
        shape = lead | {dim: sizes[dim] for dim in dims}
        return tuple(shape), np.full(tuple(shape.values()), np.nan, kind), named(long_name, units)

    def named(long_name, units="1", **attrs):
        return {"long_name": long_name, "units": units, **attrs}

    def padded(values, fill):
        """One array for every case, as one: shorter ones filled up."""
        values = [np.asarray(value) for value in values]
        if not own:
            return values[0]
        rest = values[0].shape[1:]
        return np.stack([np.concatenate([v, np.full((n - len(v), *rest), fill)]) for v in values])

    each, when, tokens = ("seed",), ("seed", "time"), ("seed", "token", "component")
    starts = padded([np.swapaxes(case.starts, 0, 1) for case in cases], np.nan)
    initial = np.swapaxes(starts, -3, -2).astype(dtype)
    distance = config.distance.units
    variables = {
        "tokens_initial": ((*own, *tokens), initial, named("tokens at the first time")),
        "tokens_final": unknown(tokens, "tokens at the last time"),
        "predicted": unknown(tokens, f"predicted law at the last time: {cases[0].theory.law_text}"),
        "weight": (
            (*own, "token"), padded([c.measure.weights for c in cases], 0),
            named("weights; 0 where a case has fewer tokens"),
        ),
        "resultant_length": unknown(when, "|Σ wᵢxᵢ|"),
        "energy": unknown(when, "½ Σ wᵢwⱼ h((xᵢ, ξᵢ), (xⱼ, ξⱼ))", energy),
        "dissipation": unknown(when, "Σ wᵢ|∇ᵢ|², which is dE/dt", squared),
        "effective_rank": unknown(when, "exp of the entropy of the eigenvalues of Σ wᵢxᵢxᵢᵀ"),
        "conditional_variance": unknown(when, "Σ ρ(ξ)(1 − |E[x | ξ]|²)"),
        "clusters": unknown(
            each, "groups of tokens linked by steps of at most 0.05, at the end", kind=np.float64
        ),
        "w2_predicted": unknown(each, "W₂ to the predicted law at the end", distance),
        "w2_predicted_lower": unknown(each, "W₂ to the predicted law, at least", distance),
        "w2_predicted_upper": unknown(each, "W₂ to the predicted law, at most", distance),
        "identity_error": unknown(
            each, "largest |E(t) − E(0) − ∫ dissipation|, relative to all that was gained"
        ),
        "largest_drop": unknown(each, "largest fall of E from one saved time to the next", energy),
    }  # fmt: skip
    if cases[0].measure.labels is not None:
        labels = padded([case.measure.labels for case in cases], np.nan)
        dims = ("token", *(f"label_component_{k}" for k in range(cases[0].measure.labels.ndim - 1)))
        attrs = named("labels ξ", kind=placed.kind)
        if placed.period is not None:
            attrs["period"] = placed.period
        variables["label"] = ((*own, *dims), labels, attrs)
    for name in cases[0].theory.energies:
        values = np.array([case.theory.energies[name] for case in cases])
        values = values if lead else values[0]
        variables[name] = (tuple(lead), values, named(ENERGIES[name], energy))
    clock = "USA-AV time, ẋ = P Σ w ∇h, of the kernel as given"
    coordinates: dict[str, Any] = {
        "seed": np.arange(config.seeds),
        "time": ("time", times, named("time t", clock)),
    }
    if axis is not None:
        text = {"count": "number of tokens n", "beta": "inverse temperature β"}[axis]
        coordinates[axis] = (axis, [getattr(case, axis) for case in cases], named(text))
    known = {name: getattr(cases[0], name) for name in ("beta", "count") if name != axis}
    return xr.Dataset(
        variables,
        coordinates,
        {
            "title": TITLES[config.experiment],
            "experiment": config.experiment,
            "source": "arXiv:2605.30229",
            "kernel": cases[0].theory.kernel_text,
            **known,
        },
    )


TITLES = {
    "collapse": "Unnormalised self-attention collapses",
    "rope": "Rotary positions: tokens end on a latitude circle",
    "rope_generalised": "Generalised rotary positions: tokens end on a wavy curve",
    "prefix": "Prompts as prefixes: tokens end in as many clusters",
    "distance_bias": "A distance bias does not prevent collapse",
    "toeplitz": "A Toeplitz kernel that changes sign: no collapse",
    "orbit_law": "A law of one's choice on an orbit",
    "gauge_law": "A drawing of one's choice",
}

SPREAD = (
    "resultant_length", "effective_rank", "conditional_variance", "clusters", "w2_predicted",
    "energy",
)  # fmt: skip


def _summary(prepared: Prepared, dataset: xr.Dataset, clock: CompileClock) -> dict[str, Any]:
    """The spread over seeds of what is seen at the end, and the worst of what should be small."""
    config, axis = prepared.config, prepared.axis
    summary: dict[str, Any] = {
        "experiment": config.experiment,
        "tokens": sorted({case.count for case in prepared.cases}),
        "beta": sorted({case.beta for case in prepared.cases}),
        "seeds": config.seeds,
    }
    for i, case in enumerate(prepared.cases):
        here = dataset if axis is None else dataset.isel({axis: i})
        name = "at_the_end" if axis is None else f"at_the_end_{axis}_{getattr(case, axis):g}"
        summary[name] = _spread(here, {} if axis is None else {axis: getattr(case, axis)})
    summary |= {name: dataset[name].values for name in prepared.cases[0].theory.energies}
    for name in ("w2_predicted_upper", "identity_error", "largest_drop"):
        summary[f"worst_{name}"] = float(np.fmax.reduce(dataset[name].values, None, initial=0))
    return summary | clock.summary()


STATISTICS = {
    "mean": np.mean,
    "deviation": lambda values: np.std(values, ddof=1) if len(values) > 1 else np.nan,
    "min": np.min,
    "max": np.max,
}


def _spread(here: xr.Dataset, case: dict[str, Any]) -> list[dict[str, Any]]:
    """What is seen at the end: mean, deviation, least and largest over the finished seeds."""
    end = {name: here[name].values.astype(float) for name in SPREAD if name in here}
    end = {name: values if values.ndim == 1 else values[:, -1] for name, values in end.items()}
    if "energy_bound" in here:
        end["energy_gap"] = float(here["energy_bound"]) - end["energy"]
    end = {name: values[np.isfinite(values)] for name, values in end.items()}
    return [
        case
        | {"over_seeds": statistic}
        | {name: float(of(values)) if len(values) else np.nan for name, values in end.items()}
        for statistic, of in STATISTICS.items()
    ]


def inspect(prepared: Prepared) -> list[Any]:
    """What the theory says of every case, and how its kernel is summed."""
    table = Table(
        title=TITLES[prepared.config.experiment],
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    first = prepared.cases[0].theory
    for column in ("tokens", "β", *first.energies):
        table.add_column(column.replace("_", " "), justify="right")
    table.add_column("summed by")
    for case in prepared.cases:
        _, way = Automatic().choose(case.theory.kernel, case.count, case.count)
        energies = (f"{value:.8g}" for value in case.theory.energies.values())
        table.add_row(str(case.count), f"{case.beta:g}", *energies, way)
    table.caption = f"kernel {first.kernel_text}; predicted: {first.law_text}"
    table.caption_justify = "left"
    return [table]
