"""The Laplace principle, with its rate: how far softmax attention is from its limit, against β.

Concentration at low temperature rests on v_β[ρ₀] → v_∞ (arXiv:2605.10931), and its bound on
D(β) = ‖v_β[ρ₀] − v_∞‖ in L²(ρ₀), of the shape √(log(β+1)/β), asks little of ρ₀. For the uniform
law v_β(x) = A_d(β|Bᵀx|) v_∞(x) with A_d(κ) = I_{d/2}(κ)/I_{d/2−1}(κ), so that D is known exactly
and falls like 1/β; other smooth laws are measured here beside it.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import xarray as xr
from pydantic import Field
from scipy import special

from .. import plot
from ..attention import Attention
from ..certificates import discrepancy
from ..errors import InputError, NonFiniteError
from ..fields import ZeroTemperature
from ..laws import Tokens, Uniform
from ..measure import Measure
from ..spectra import assumptions
from .approach import build_law, build_measure
from .config import AttentionConfig, Betas, Count, ExperimentConfig, Law, Positive, TokensConfig
from .inspect import assumptions_table
from .regression import Line, fit_line
from .runner import CompileClock, Monitor, Result


class Config(ExperimentConfig):
    """The keys of a laplace config."""

    experiment: Literal["laplace"]
    law: Law
    tokens: TokensConfig = Field(description="that stand for the law: spaced well below β^(−1/2)")
    queries: Count = Field(default=4096, description="points of the law to average over")
    dimension: Annotated[int, Field(ge=2)]
    attention: AttentionConfig
    beta: Betas
    fit: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(
        description="the least and the largest β of the points that the slope is fitted to"
    )


class Prepared(NamedTuple):
    """Everything built from a config, checked, and ready to run."""

    config: Config
    attention: Attention
    betas: list[float]
    measures: dict[str, Measure]
    queries: dict[str, Measure]


def prepare(config: Config) -> Prepared:
    """Place the nodes and the queries of the config's law and of the uniform one.

    **Raises:** `InputError` for a law, tokens or weights that do not fit, a law without density, B
    singular, or fewer than three β to fit the slope to.
    """
    law = build_law(config)
    if isinstance(law, Tokens):
        raise InputError("config key law: given tokens have no density, so there is no limit v_∞")
    attention = config.attention.build(config.dimension)
    try:
        ZeroTemperature(attention)
    except InputError as error:
        raise InputError(f"config key attention: {error}") from None
    betas = sorted(set(config.beta))
    fitted = sum(config.fit[0] <= beta <= config.fit[1] for beta in betas)
    if fitted < 3:
        raise InputError(
            f"config key fit: {fitted} of the β lie between {config.fit[0]:g} and "
            f"{config.fit[1]:g}; a slope and its interval need at least 3"
        )
    places = config.model_copy(update={"tokens": config.tokens.model_copy(
        update={"count": config.queries})})  # fmt: skip
    # Other samples than the tokens, where both are samples: a query must not be its own neighbour.
    places = places.model_copy(update={"seed": config.seed + 1})
    laws = {"": law, "_uniform": Uniform(config.dimension)}
    return Prepared(
        config=config,
        attention=attention,
        betas=betas,
        measures={name: build_measure(law, config) for name, law in laws.items()},
        queries={name: build_measure(law, places) for name, law in laws.items()},
    )


def mean_resultant(d: int, kappa: np.ndarray) -> np.ndarray:
    """A_d(κ) = I_{d/2}(κ)/I_{d/2−1}(κ), the length of the mean of the uniform law tilted by κ."""
    low, high = special.ive(d / 2 - 1, kappa), special.ive(d / 2, kappa)
    # Both underflow for κ far below d, where A_d(κ) = κ/d (1 + O(κ²/d²)).
    return np.where(low > 0, high / np.where(low > 0, low, 1), kappa / d)


def exact_uniform(attention: Attention, beta: float, queries: Measure) -> float:
    """D(β) for the uniform law, by its closed form at the queries."""
    x = queries.points
    length = np.linalg.norm(np.asarray(attention.logit(x), np.float64), axis=-1)
    limit = np.linalg.norm(np.asarray(ZeroTemperature(attention)(x), np.float64), axis=-1)
    left = 1 - mean_resultant(attention.dimension, beta * length)
    return math.sqrt(np.average((left * limit) ** 2, weights=np.asarray(queries.weights)))


def run(prepared: Prepared, monitor: Monitor) -> Result:
    """D at every β for the config's law and for the uniform one."""
    attention = prepared.attention
    clock = CompileClock()
    dataset = _empty(prepared)
    measured: Any = None

    def result():
        return Result(_fitted(dataset), _summary(prepared, dataset, clock))

    monitor.start(2 * len(prepared.betas))
    for i, beta in enumerate(prepared.betas):
        for name in ("", "_uniform"):
            mu, queries = prepared.measures[name], prepared.queries[name]
            arguments = attention, jnp.asarray(beta, mu.points.dtype), mu, queries
            if measured is None:  # one program for both laws and every β
                measured = clock(discrepancy, *arguments)
            found = float(measured(*arguments))
            if not math.isfinite(found):
                monitor.keep(result())
                raise NonFiniteError(
                    f"the discrepancy is not finite at beta = {beta:g}; smaller weights or "
                    "precision: float64 may help"
                )
            dataset[f"discrepancy{name}"][i] = found
            monitor.advance(f"β = {beta:g}")
        monitor.keep(result())
    return result()


def _empty(prepared: Prepared) -> xr.Dataset:
    """The dataset before anything is measured, labelled."""
    betas, law = np.asarray(prepared.betas), prepared.config.law.name
    units = "softmax attention velocity, |P V m|"
    unknown = np.full(len(betas), np.nan)
    exact = [
        exact_uniform(prepared.attention, beta, prepared.queries["_uniform"]) for beta in betas
    ]

    def labelled(values, long_name, units=units):
        return "beta", values.copy(), {"long_name": long_name, "units": units}

    return xr.Dataset(
        {
            "discrepancy": labelled(unknown, f"‖v_β[ρ₀] − v_∞‖ in L²(ρ₀), ρ₀ {law}"),
            "discrepancy_uniform": labelled(unknown, "‖v_β[σ] − v_∞‖ in L²(σ), σ uniform"),
            "discrepancy_exact": labelled(
                np.asarray(exact), "‖(1 − A_d(β|Bᵀx|)) v_∞‖ in L²(σ), σ uniform: the closed form"
            ),
            "bound_shape": labelled(
                np.sqrt(np.log1p(betas) / betas), "√(log(β+1)/β), the bound up to a constant", "1"
            ),
        },
        coords={"beta": ("beta", betas, {"long_name": "inverse temperature β", "units": "1"})},
        attrs={
            "title": "The Laplace principle and its rate",
            "experiment": "laplace",
            "source": "arXiv:2605.10931",
            "law": law,
            "fit": prepared.config.fit,
        },
    )


def _fitted(dataset: xr.Dataset) -> xr.Dataset:
    """With the line through the measured points of the fit's range, as far as they are known."""
    for name in ("discrepancy", "discrepancy_uniform"):
        dataset[name].attrs |= _slope(dataset, name)._asdict()
    return dataset


def _slope(dataset: xr.Dataset, name: str) -> Line:
    low, high = dataset.attrs["fit"]
    known = dataset[name].sel(beta=slice(low, high))
    with np.errstate(divide="ignore"):
        return fit_line(np.log(known["beta"].values), np.log(known.values))


def _summary(prepared: Prepared, dataset: xr.Dataset, clock: CompileClock) -> dict[str, Any]:
    line, uniform = (_slope(dataset, f"discrepancy{name}") for name in ("", "_uniform"))
    error = np.abs(dataset["discrepancy_uniform"] / dataset["discrepancy_exact"] - 1).values
    return {
        "experiment": "laplace",
        "beta": dataset["beta"].values,
        "discrepancy": dataset["discrepancy"].values,
        "slope": line.slope,
        "slope_low": line.low,
        "slope_high": line.high,
        "slope_uniform": uniform.slope,
        "fit": prepared.config.fit,
        "uniform_error": float(np.nanmax(error, initial=0)),
        "tokens": prepared.measures[""].size,
        "queries": prepared.queries[""].size,
        **clock.summary(),
    }


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """The discrepancy against β."""
    return {"laplace": draw(dataset)}


@plot.styled
def draw(dataset: xr.Dataset) -> Any:
    """D(β) of both laws, the closed form of the uniform one, the bound's shape, the fitted line."""
    figure, axes = plot.subplots(1, 1, (8.2, 4.4))
    ax = axes[0, 0]
    beta, measured = dataset["beta"].values, dataset["discrepancy"].values
    blue, orange = plot.sequence(2)
    shape = dataset["bound_shape"].values
    if np.isfinite(measured[0]):
        scaled = shape * measured[0] / shape[0]
        ax.plot(beta, scaled, ":", color="grey", label="shape of the bound, √(log(β+1)/β)")
    exact = dataset["discrepancy_exact"].values
    ax.plot(beta, exact, color=orange, label="uniform law, closed form")
    ax.plot(
        beta, dataset["discrepancy_uniform"], "o", color=orange, markerfacecolor="white",
        label="uniform law, measured",
    )  # fmt: skip
    law = dataset.attrs["law"].replace("von_mises_fisher", "von Mises–Fisher")
    ax.plot(beta, measured, "s", color=blue, label=f"{law} law, measured")
    found, (low, high) = dataset["discrepancy"].attrs, dataset.attrs["fit"]
    fitted = beta[(beta >= low) & (beta <= high)]
    half = (found["high"] - found["low"]) / 2
    ax.plot(
        fitted, np.exp(found["intercept"]) * fitted ** found["slope"], color=blue,
        label=f"fitted slope {found['slope']:.4f} ± {half:.4f}".replace("-", "−"),
    )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("inverse temperature β")
    ax.set_ylabel("$D(\\beta) = \\|v_\\beta[\\rho_0] - v_\\infty\\|_{L^2(\\rho_0)}$")
    ax.set_title("The Laplace principle and its rate")
    ax.legend(loc="lower left")
    return figure


def inspect(config: Config) -> list[Any]:
    """The assumptions of the weights and the law, without running anything."""
    found = assumptions(config.attention.build(config.dimension), build_law(config))
    return [assumptions_table(found)]
