"""The tokens of a text under the heads of a real encoder: overlaps and cosines over time.

Each layer's tokens are the model's own hidden states at its input, normalised; β = R² with R the
root mean square of their norms; one layer of the model is a unit of time. The heads of a trained
model break Assumption 1 of arXiv:2605.10931 (B has rank d/heads, M is not symmetric); the summary
says so, and the run measures what happens all the same.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import xarray as xr
from pydantic import BeforeValidator, Field
from rich import box
from rich.table import Table

from .. import plot
from ..errors import InputError
from ..fields import AbstractField, HeadSum, SoftmaxAttention
from ..flows import AbstractMethod
from ..measure import Measure
from ..observables import cosine_histogram, resultant_length
from ..pretrained import Checkpoint, head_table, load_checkpoint
from ..spectra import Assumptions, Eigenspaces, assumptions, eigenspaces
from .config import Count, ExperimentConfig, Model, Positive, TimeConfig, listed
from .runner import CompileClock, Monitor, Result, on_sphere, stopped

Index = Annotated[int, Field(ge=0)]
Heads = Annotated[list[Index | Literal["sum"]], Field(min_length=1), BeforeValidator(listed)]


class TextConfig(Model):
    """How much of the text: its first `count` tokens, or all the model has positions for."""

    count: Count | None = None


class Config(ExperimentConfig):
    """The keys of a pretrained config."""

    experiment: Literal["pretrained"]
    checkpoint: str
    text: str
    tokens: TextConfig = TextConfig()
    layers: Annotated[list[Index], Field(min_length=1), BeforeValidator(listed)]
    heads: Heads = Field(default=["sum"], description="numbers of heads, or their sum")
    beta: Positive | None = Field(default=None, description="R² if left out")
    time: TimeConfig
    bins: Count = Field(default=80, description="of the cosine histogram")


class Journey(NamedTuple):
    """One layer's tokens under one of its heads, or all of them."""

    layer: int
    head: str
    measure: Measure
    radius: float
    beta: float
    field: AbstractField
    interaction: Eigenspaces
    value: Eigenspaces
    heads: tuple[Assumptions, ...]


class Prepared(NamedTuple):
    """Everything built from a config, checked, and ready to run."""

    config: Config
    checkpoint: Checkpoint
    journeys: list[Journey]
    tokens: list[str]
    method: AbstractMethod


def prepare(config: Config) -> Prepared:
    """Read the checkpoint and the text, and build every layer's tokens and fields.

    **Raises:** `InputError` if the checkpoint, the text, a layer or a head is not there.
    """
    checkpoint = load_checkpoint(config.checkpoint)
    text = _read_text(config.text)
    for name, indices, count in (
        ("layers", config.layers, checkpoint.layers),
        ("heads", [head for head in config.heads if head != "sum"], checkpoint.heads),
    ):
        for index in indices:
            if index >= count:
                raise InputError(
                    f"config key {name} asks for {index}; {checkpoint.name} has 0 to {count - 1}"
                )
    journeys = []
    for layer in dict.fromkeys(config.layers):
        measure, radius, strings = checkpoint.tokens(text, layer, config.tokens.count)
        if measure.size < 2:
            raise InputError("config key text gives a single token; cosines need at least two")
        beta = radius**2 if config.beta is None else config.beta
        for head in dict.fromkeys(config.heads):
            journeys.append(_journey(checkpoint, layer, head, measure, radius, beta))
    return Prepared(config, checkpoint, journeys, strings, config.time.build())


def _journey(
    checkpoint: Checkpoint,
    layer: int,
    head: int | str,
    measure: Measure,
    radius: float,
    beta: float,
) -> Journey:
    if head == "sum":
        heads = checkpoint.layer_heads(layer, radius)
    else:
        heads = (checkpoint.head(layer, head, radius),)
    fields = [SoftmaxAttention(attention, beta) for attention in heads]
    found = tuple(assumptions(attention) for attention in heads)
    # For several heads M and V stand for Σ VₕBₕᵀ and Σ Vₕ.
    interaction = sum(np.asarray(attention.interaction, np.float64) for attention in heads)
    value = sum(np.asarray(attention.value, np.float64) for attention in heads)
    return Journey(
        layer=layer,
        head=str(head),
        measure=measure,
        radius=radius,
        beta=beta,
        field=HeadSum(fields) if head == "sum" else fields[0],
        # Every eigenvector by itself, equal eigenvalues or not: one shape for every layer and head.
        interaction=eigenspaces(interaction, multiplicities=(1,) * measure.dimension),
        value=eigenspaces(value, multiplicities=(1,) * measure.dimension),
        heads=found,
    )


def run(prepared: Prepared, monitor: Monitor) -> Result:
    """Flow every layer's tokens under its heads, and watch them at the saved times."""
    config, journeys = prepared.config, prepared.journeys
    clock = CompileClock()
    times = config.time.times()
    edges = np.linspace(-1, 1, config.bins + 1)
    layers = list(dict.fromkeys(journey.layer for journey in journeys))
    heads = list(dict.fromkeys(journey.head for journey in journeys))
    dataset = _empty(prepared, layers, heads, times, edges)

    def observe(mu, spaces):
        return {
            "finite": on_sphere(mu),
            "overlap_m": spaces[0].overlap(mu),
            "overlap_v": spaces[1].overlap(mu),
            "cosine_density": cosine_histogram(mu, jnp.asarray(edges)) / (edges[1] - edges[0]),
            "resultant_length": resultant_length(mu),
        }

    def advance(field, mu, interval):
        return prepared.method.advance(field, mu, interval)

    def result():
        return Result(dataset, _summary(prepared, dataset, clock))

    monitor.start(len(journeys) * config.time.save)
    programs: dict[bool, Any] = {}  # one for a single head, one for a sum, whatever the layer
    for journey in journeys:
        mu, place = journey.measure, {"layer": journey.layer, "head": journey.head}
        interval = jnp.asarray(times[1], mu.points.dtype)
        spaces = (journey.interaction, journey.value)
        kind = journey.head == "sum"
        if not programs:
            look = clock(observe, mu, spaces)
        if kind not in programs:
            programs[kind] = clock(advance, journey.field, mu, interval)
        step = programs[kind]
        seen = look(mu, spaces)
        for j, t in enumerate(times):
            if j:
                mu = step(journey.field, mu, interval)
                seen = look(mu, spaces)
                if not seen["finite"]:
                    monitor.keep(result())
                    raise stopped(t, journey.beta, kept=j, of=len(times))
                monitor.advance(f"layer {journey.layer}, head {journey.head}")
            for name in ("overlap_m", "overlap_v", "cosine_density", "resultant_length"):
                dataset[name].loc[place | {"time": t}] = np.asarray(seen[name])
        dataset["tokens_final"].loc[place] = np.asarray(mu.points)
        monitor.keep(result())
    return result()


def _empty(
    prepared: Prepared, layers: list[int], heads: list[str], times: np.ndarray, edges: np.ndarray
) -> xr.Dataset:
    mu0 = prepared.journeys[0].measure
    d, n = mu0.dimension, mu0.size
    dtype = np.asarray(mu0.points).dtype
    shape = (len(layers), len(heads))

    def unknown(dims, shape, long_name, units="1"):
        attrs = {"long_name": long_name, "units": units}
        return dims, np.full(shape, np.nan, dtype), attrs

    where, when = ("layer", "head"), ("layer", "head", "time")
    dataset = xr.Dataset(
        {
            "overlap_m": unknown(
                (*when, "eigenspace"),
                (*shape, len(times), d),
                "Σ wᵢ⟨e, xᵢ⟩² for the eigenvectors e of the symmetric part of M = Σ VBᵀ",
            ),
            "overlap_v": unknown(
                (*when, "eigenspace"),
                (*shape, len(times), d),
                "Σ wᵢ⟨e, xᵢ⟩² for the eigenvectors e of the symmetric part of Σ V",
            ),
            "cosine_density": unknown(
                (*when, "cosine"),
                (*shape, len(times), len(edges) - 1),
                "density of ⟨x, y⟩ for two different tokens",
            ),
            "resultant_length": unknown(when, (*shape, len(times)), "|Σ wᵢ xᵢ|"),
            "eigenvalue_m": unknown(
                (*where, "eigenspace"), (*shape, d), "eigenvalues of the symmetric part of M"
            ),
            "eigenvalue_v": unknown(
                (*where, "eigenspace"), (*shape, d), "eigenvalues of the symmetric part of V"
            ),
            "tokens_initial": unknown(
                ("layer", "token", "component"),
                (len(layers), n, d),
                "hidden states over their norm",
            ),
            "tokens_final": unknown(
                (*where, "token", "component"), (*shape, n, d), "tokens at the last time"
            ),
            "radius": unknown(
                "layer", len(layers), "R, root mean square norm of the hidden states"
            ),
            "beta": unknown("layer", len(layers), "inverse temperature β"),
        },
        coords={
            "layer": layers,
            "head": heads,
            "time": (
                "time",
                times,
                {"long_name": "time t", "units": "layers of the model (softmax attention time)"},
            ),
            "eigenspace": np.arange(d),
            "cosine": ("cosine", (edges[1:] + edges[:-1]) / 2, {"long_name": "⟨x, y⟩"}),
            "token": np.arange(n),
            "string": ("token", prepared.tokens),
        },
        attrs={
            "title": f"Tokens of a text under heads of {prepared.checkpoint.name}",
            "experiment": "pretrained",
            "checkpoint": prepared.checkpoint.name,
        },
    )
    for journey in prepared.journeys:
        place = {"layer": journey.layer, "head": journey.head}
        dataset["eigenvalue_m"].loc[place] = np.asarray(journey.interaction.eigenvalues)
        dataset["eigenvalue_v"].loc[place] = np.asarray(journey.value.eigenvalues)
        dataset["tokens_initial"].loc[{"layer": journey.layer}] = np.asarray(journey.measure.points)
        dataset["radius"].loc[{"layer": journey.layer}] = journey.radius
        dataset["beta"].loc[{"layer": journey.layer}] = journey.beta
    return dataset


def _summary(prepared: Prepared, dataset: xr.Dataset, clock: CompileClock) -> dict[str, Any]:
    rows = []
    for journey in prepared.journeys:
        here = dataset.sel(layer=journey.layer, head=journey.head)
        length = here["resultant_length"].values
        first = [found.findings[0] for found in journey.heads]
        failing = [finding.statement for finding in first if not finding.holds]
        rows.append(
            {
                "layer": journey.layer,
                "head": journey.head,
                "radius": journey.radius,
                "beta": journey.beta,
                "rank_B": max(finding.numbers["rank_B"] for finding in first),
                "asymmetry": max(finding.numbers["asymmetry"] for finding in first),
                "gap": float(journey.interaction.gap),
                "rate_predicted": journey.heads[0].rate if len(first) == 1 else None,
                "resultant_start": float(length[0]),
                "resultant_end": float(length[-1]),
                "assumptions": f"A1 fails for {len(failing)} of {len(first)}: {failing[0]}"
                if failing
                else "A1 holds",
            }
        )
    return {
        "experiment": "pretrained",
        "checkpoint": prepared.checkpoint.name,
        "beta": [row["beta"] for row in rows],
        "tokens": prepared.journeys[0].measure.size,
        "runs": rows,
        **clock.summary(),
    }


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Where the tokens are in the eigenvectors of M and V, and their cosines, over time."""
    return {"overlaps": draw_overlaps(dataset), "cosines": draw_cosines(dataset)}


def _places(dataset: xr.Dataset) -> list[tuple[Any, Any]]:
    return [(layer, head) for layer in dataset["layer"].values for head in dataset["head"].values]


def _title(layer: Any, head: Any, beta: float) -> str:
    what = "all heads" if head == "sum" else f"head {head}"
    return f"layer {layer}, {what}, β = {beta:.0f}"


@plot.styled
def draw_overlaps(dataset: xr.Dataset) -> Any:
    """The five eigenvectors of M (above) and V (below) that ever hold the most mass."""
    places = _places(dataset)
    size = (5.4 * len(places), 5.6)
    figure, axes = plot.subplots(2, len(places), size, sharex=True)
    for row, matrix in enumerate("mv"):
        for ax, (layer, head) in zip(axes[row], places, strict=True):
            here = dataset.sel(layer=layer, head=head)
            overlap = here[f"overlap_{matrix}"]
            top = np.argsort(-np.nan_to_num(overlap.max("time").values), kind="stable")[:5]
            for k in sorted(top):
                value = float(here[f"eigenvalue_{matrix}"][k])
                ax.plot(dataset["time"], overlap[:, k], label=f"{value:.2f} (no. {k + 1})")
            ax.set_ylim(bottom=0)
            ax.legend(title="eigenvalue", loc="center left", bbox_to_anchor=(1, 0.5))
            if row == 0:
                ax.set_title(_title(layer, head, float(here["beta"])))
            else:
                ax.set_xlabel("time t (layers)")
        axes[row, 0].set_ylabel(f"mass along eigenvectors of {matrix.upper()}")
    return figure


@plot.styled
def draw_cosines(dataset: xr.Dataset) -> Any:
    """The histogram of pairwise cosines (colour) against time."""
    places = _places(dataset)
    figure, axes = plot.subplots(1, len(places), (4.4 * len(places) + 0.6, 3.6), sharey=True)
    for ax, (layer, head) in zip(axes[0], places, strict=True):
        here = dataset.sel(layer=layer, head=head)
        width = float(here["cosine"][1] - here["cosine"][0])
        mesh = ax.pcolormesh(
            dataset["time"],
            here["cosine"],
            here["cosine_density"].T * width,
            shading="nearest",
            norm="log",
            vmin=1e-4,
            vmax=1,
            rasterized=True,
        )
        ax.set_title(_title(layer, head, float(here["beta"])))
        ax.set_xlabel("time t (layers)")
        ax.grid(False)
    axes[0, 0].set_ylabel("cosine of two tokens")
    figure.colorbar(mesh, ax=axes, label="fraction of pairs in a bin")
    return figure


def inspect(config: Config) -> Iterator[Table]:
    """The table of every head of the config's checkpoint."""
    return inspect_model(config.checkpoint)


def inspect_model(source: str) -> Iterator[Table]:
    """Per layer and head: rank of B, asymmetry, top of the spectrum, gap, rate, what fails."""
    checkpoint = load_checkpoint(source)
    title = (
        f"{checkpoint.name}: {checkpoint.layers} layers, {checkpoint.heads} heads, "
        f"d = {checkpoint.dimension}, M = VBᵀ"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("layer", "head", "rank B", "asymmetry", "top eigenvalues", "gap γ", "rate"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("assumptions that fail", min_width=20)
    for row in head_table(checkpoint):
        table.add_row(
            str(row.layer),
            str(row.head),
            str(row.rank),
            f"{row.asymmetry:.3f}",
            " ".join(f"{value:.3f}" for value in row.eigenvalues),
            f"{row.gap:.4f}",
            f"{row.rate:.4f}",
            row.failures or "none",
        )
    table.caption = (
        "asymmetry: ‖M − Mᵀ‖/‖M‖; eigenvalues: of (M + Mᵀ)/2; rate: pγ/(2‖B‖₂), p = min(dim E, 2)"
    )
    yield table


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"config key text: the file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config key text: the file {path} cannot be read: {error}") from None
