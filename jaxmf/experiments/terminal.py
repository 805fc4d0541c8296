"""The terminal phase: where tokens are in the end, for a family of random V and B.

Conjecture 1 of arXiv:2605.10931: at finite β, long after concentrating on the dominant eigenspace
of M = VBᵀ, the mass sits in the dominant eigenspace of V, or of the counterpart that is dominant in
magnitude. Behind it: a Dirac at x follows ẋ = P_xVx, also when its counterpart at −x is there and
⟨Bᵀx, x⟩ > 0; if ⟨Bᵀx, x⟩ < 0 the two attend to each other and follow ẋ = −P_xVx.

Draws satisfy Assumption 1: B = ±R diag(b) Rᵀ is positive or negative definite, M = Q diag(m) Qᵀ,
and V = MB^{−T}, which is similar to the symmetric ±|B|^{−1/2} M |B|^{−1/2}: its eigenvalues are
real, its eigenvectors not orthogonal unless Q = R. What is counted, per run, with λ₁ > … > λ_d the
eigenvalues of V (the mass along a unit vector v is Σ wᵢ⟨v, xᵢ⟩²):

- *conjectured*: for B > 0 the eigenvector of λ₁; for B < 0 that of the largest |λⱼ|, which is λ₁
  or, of the flipped flow, λ_d;
- *unsettled*: some token still moves faster than `speed`;
- *dominant*: settled, with at least `mass` along the conjectured eigenvector;
- *other*: settled, with at least `mass` along one of the others;
- *several*: settled, and neither.

A cluster at v with Vv = λv draws its tokens together if they attend to it and λ > 0, or to its
antipode and λ < 0, and pushes them apart otherwise. So V with eigenvalues of both signs is counted
apart (`…_mixed_runs`): a V of one sign may leave tokens nothing to settle on.
"""

from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from pydantic import AfterValidator, Field
from rich import box
from rich.table import Table
from scipy import stats

from .. import plot, sphere
from ..attention import Attention
from ..errors import InputError, NonFiniteError
from ..fields import SoftmaxAttention
from ..flows import AbstractMethod, flow
from ..laws import AbstractLaw
from ..measure import Measure
from ..observables import count_clusters
from .approach import build_law, build_measure
from .config import Count, ExperimentConfig, Law, Number, Positive, TimeConfig, TokensConfig
from .runner import CompileClock, Monitor, Result, on_sphere

SIGNS = ("positive", "negative")
OUTCOMES = ("dominant", "other", "several", "unsettled")
NOT_RUN = -1


def _increasing(value: list[float]) -> list[float]:
    if value[0] > value[1]:
        raise ValueError(f"it must be a range [least, largest], not {value}")
    return value


def _positive(value: list[float]) -> list[float]:
    if value[0] <= 0:
        raise ValueError(f"it must be a range of positive numbers, not {value}")
    return value


Range = Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(_increasing)]


class Config(ExperimentConfig):
    """The keys of a terminal config."""

    experiment: Literal["terminal"]
    law: Law
    tokens: TokensConfig
    dimension: Annotated[int, Field(ge=2)]
    runs: Count = Field(description="random draws for each sign of B")
    family: Literal["general", "commuting"] = Field(
        default="general", description="commuting: V and B share their eigenvectors"
    )
    key_query: Annotated[Range, AfterValidator(_positive)] = Field(
        default=[0.3, 1.0], description="range of the eigenvalues of |B|, uniform"
    )
    interaction: Range = Field(
        default=[-1.0, 1.0], description="range of the eigenvalues of M = VBᵀ, uniform"
    )
    gap: Positive = Field(
        default=0.1,
        description="least difference of eigenvalues of V, and of the two largest of M, "
        "relative to the largest in magnitude; other draws are drawn again",
    )
    beta: Positive
    time: TimeConfig
    mass: Annotated[float, Field(gt=0.5, le=1)] = Field(
        default=0.99, description="along an eigenvector, to count as in it"
    )
    speed: Positive = Field(default=1e-4, description="of the fastest token, to count as settled")
    chunk: Count = Field(default=8, description="runs computed, and kept, together")


class Draw(NamedTuple):
    """One V and B of the family, and their eigenvectors as columns, largest eigenvalue first."""

    value: np.ndarray
    key_query: np.ndarray
    value_eigenvalues: np.ndarray
    value_vectors: np.ndarray
    interaction_eigenvalues: np.ndarray
    interaction_vectors: np.ndarray

    @property
    def conjectured(self) -> int:
        """Which eigenvector of V the conjecture names."""
        positive = np.trace(self.key_query) > 0
        return 0 if positive else int(np.argmax(np.abs(self.value_eigenvalues)))


class Prepared(NamedTuple):
    """Everything built from a config, checked, and ready to run."""

    config: Config
    measure: Measure
    points: np.ndarray
    draws: list[Draw]
    redrawn: int
    method: AbstractMethod


def compose(
    rotation: np.ndarray, b: np.ndarray, other: np.ndarray, m: np.ndarray, sign: int
) -> Draw:
    """B = ±R diag(b) Rᵀ with b > 0, M = Q diag(m) Qᵀ and V = MB^{−T}, with their spectra."""
    root, inverse = ((rotation * b**power) @ rotation.T for power in (0.5, -0.5))
    interaction = (other * m) @ other.T
    order = np.argsort(-m)
    # V = ±|B|^{1/2} (|B|^{−1/2} M |B|^{−1/2}) |B|^{−1/2}.
    values, vectors = np.linalg.eigh(sign * inverse @ interaction @ inverse)
    vectors = root @ vectors[:, ::-1]
    return Draw(
        value=sign * interaction @ inverse @ inverse,
        key_query=sign * (rotation * b) @ rotation.T,
        value_eigenvalues=values[::-1],
        value_vectors=vectors / np.linalg.norm(vectors, axis=0),
        interaction_eigenvalues=m[order],
        interaction_vectors=other[:, order],
    )


def draw_family(config: Config) -> tuple[list[Draw], int]:
    """`runs` draws for each sign of B, one sign after the other; and how many were drawn again.

    **Raises:** `InputError` if hardly any draw has the gaps asked for.
    """
    rng = np.random.default_rng(config.seed)
    d, draws, redrawn = config.dimension, [], 0

    def rotation():
        q, r = np.linalg.qr(rng.normal(size=(d, d)))
        return q * np.sign(np.diag(r))

    while len(draws) < 2 * config.runs:
        r = rotation()
        other = r if config.family == "commuting" else rotation()
        b, m = rng.uniform(*config.key_query, d), rng.uniform(*config.interaction, d)
        new = compose(r, b, other, m, (1, -1)[len(draws) % 2])
        v, m = new.value_eigenvalues, new.interaction_eigenvalues
        if np.min(v[:-1] - v[1:]) > config.gap * np.abs(v).max() and (
            m[0] - m[1] > config.gap * np.abs(m).max()
        ):
            draws.append(new)
            continue
        redrawn += 1
        if redrawn > 1000 * (1 + len(draws)):
            raise InputError(
                "config key gap: hardly any draw has eigenvalues of V and M apart by "
                f"{config.gap:g} of the largest; ask for less, or widen the range of interaction"
            )
    return draws, redrawn


def prepare(config: Config) -> Prepared:
    """Draw the family and the tokens; sampled tokens are other ones in every run.

    **Raises:** `InputError` for a law or tokens that do not fit, or gaps that no draw has.
    """
    law = build_law(config)
    draws, redrawn = draw_family(config)
    measure = build_measure(law, config)
    measure = Measure(measure.points, measure.weights)
    return Prepared(
        config=config,
        measure=measure,
        points=_starts(config, law, measure, len(draws)),
        draws=draws,
        redrawn=redrawn,
        method=config.time.build(),
    )


def _starts(config: Config, law: AbstractLaw, measure: Measure, count: int) -> np.ndarray:
    if config.tokens.placement == "quadrature":
        return np.broadcast_to(np.asarray(measure.points), (count, *measure.points.shape))
    keys = jax.random.split(jax.random.key(config.seed), count)
    return np.stack([np.asarray(law.sample(key, measure.size).points) for key in keys])


def classify(
    mass: np.ndarray, conjectured: np.ndarray, speed: np.ndarray, least: float, fastest: float
) -> np.ndarray:
    """Outcomes, as indices of `OUTCOMES`: `mass` (…, d) along every eigenvector of V at the end."""
    inside = mass >= least
    named = np.take_along_axis(inside, np.asarray(conjectured)[..., None], -1)[..., 0]
    settled = np.asarray(speed) <= fastest  # not so for a speed that is not a number
    return np.select([~settled, named, inside.any(-1)], [3, 0, 1], 2).astype(np.int8)


def run(prepared: Prepared, monitor: Monitor) -> Result:
    """Flow every run's tokens under its own V and B, a chunk of runs at a time."""
    config, mu0 = prepared.config, prepared.measure
    clock = CompileClock()
    times = config.time.times()
    dtype = np.asarray(mu0.points).dtype
    dataset = _empty(prepared, times)
    evolve: Any = None

    def one(points, v, b, vectors_v, vectors_m):
        field = SoftmaxAttention(Attention(v, b), config.beta)
        mu = flow(field, mu0.move(points), jnp.asarray(times, dtype), prepared.method)
        last = mu.move(mu.points[-1])
        squares = {
            name: jnp.matmul(mu.points, vectors, precision="highest") ** 2
            for name, vectors in (("overlap_v", vectors_v), ("overlap_m", vectors_m))
        }
        attended = jnp.sum(field.attention.logit(last.points) * last.points, axis=-1)
        return {
            **{
                name: jnp.einsum("n,tnd->td", mu0.weights, square, precision="highest")
                for name, square in squares.items()
            },
            "speed": jnp.max(sphere.norm(field(last.points, last))),
            "attending": mu0.integrate(attended),
            "tokens_final": last.points,
            "finite": on_sphere(last),
        }

    def result():
        return Result(dataset, _summary(prepared, dataset, clock))

    count = len(prepared.draws)
    size = min(config.chunk, count)
    monitor.start(count)
    for start in range(0, count, size):
        # The last chunk goes over runs again, so that one program does for all.
        index = np.arange(min(start, count - size), min(start, count - size) + size)
        draws = [prepared.draws[i] for i in index]
        arguments = (
            prepared.points[index],
            *(
                np.stack([getattr(draw, name) for draw in draws]).astype(dtype)
                for name in ("value", "key_query", "value_vectors", "interaction_vectors")
            ),
        )
        if evolve is None:
            evolve = clock(jax.vmap(one), *arguments)
        seen = {name: np.asarray(value) for name, value in evolve(*arguments).items()}
        for k, i in enumerate(index):
            place = {"sign": i % 2, "run": i // 2}
            finite = bool(seen["finite"][k])
            for name in ("overlap_v", "overlap_m", "speed", "attending", "tokens_final"):
                dataset[name][place] = seen[name][k] if finite else np.nan
            points = seen["tokens_final"][k]
            for name, up_to_sign in (("clusters", False), ("clusters_up_to_sign", True)):
                dataset[name][place] = count_clusters(points, up_to_sign) if finite else 0
            dataset["outcome"][place] = classify(
                dataset["overlap_v"][place][-1].values,
                dataset["conjectured"][place].values,
                dataset["speed"][place].values,
                config.mass,
                config.speed,
            )
            if i >= start:
                monitor.advance(f"B {SIGNS[i % 2]}, run {i // 2}")
        monitor.keep(result())
        if not np.all(seen["finite"]):
            raise NonFiniteError(
                f"the tokens of {np.sum(~seen['finite'])} runs stopped being finite; all that was "
                "finished is kept; smaller steps or precision: float64 may help"
            )
    return result()


def _empty(prepared: Prepared, times: np.ndarray) -> xr.Dataset:
    """The dataset before anything is known but the draws, labelled."""
    config, mu0 = prepared.config, prepared.measure
    runs, d = config.runs, config.dimension
    dtype = np.asarray(mu0.points).dtype
    each, components = ("sign", "run"), ("component", "column")

    def drawn(name):
        values = np.stack([getattr(draw, name) for draw in prepared.draws])
        return np.moveaxis(values.reshape(runs, 2, *values.shape[1:]), 1, 0)

    def unknown(dims, shape, long_name, units="1"):
        values = np.full((2, runs, *shape), np.nan, dtype)
        return (*each, *dims), values, {"long_name": long_name, "units": units}

    def uncounted(long_name, **attrs):
        return each, np.full((2, runs), NOT_RUN), {"long_name": long_name, "units": "1", **attrs}

    def known(name, dims, long_name):
        return (*each, *dims), drawn(name), {"long_name": long_name, "units": "1"}

    shape = (len(times), d)
    criteria = (
        f"unsettled: some token faster than {config.speed:g}; dominant: settled, mass of at least "
        f"{config.mass:g} along the conjectured eigenvector of V; other: settled, that mass along "
        "another one; several: settled, and neither"
    )
    return xr.Dataset(
        {
            "outcome": uncounted(
                "where the tokens are at the end",
                flag_values=np.arange(len(OUTCOMES)),
                flag_meanings=" ".join(OUTCOMES),
                criteria=criteria,
            ),
            "conjectured": known(
                "conjectured", (), "eigenvector of V the conjecture names (largest eigenvalue if "
                "B > 0, largest in magnitude if B < 0)"
            ),
            "overlap_v": unknown(
                ("time", "eigenvector"), shape, "Σ wᵢ⟨v, xᵢ⟩² for the unit eigenvectors v of V"
            ),
            "overlap_m": unknown(
                ("time", "eigenvector"), shape, "Σ wᵢ⟨e, xᵢ⟩² for the unit eigenvectors e of VBᵀ"
            ),
            "eigenvalue_v": known("value_eigenvalues", ("eigenvector",), "eigenvalues of V"),
            "eigenvalue_m": known(
                "interaction_eigenvalues", ("eigenvector",), "eigenvalues of M = VBᵀ"
            ),
            "speed": unknown((), (), "largest |v_β[ρ](x)| at the end", "softmax attention time⁻¹"),
            "attending": unknown((), (), "Σ wᵢ⟨Bᵀxᵢ, xᵢ⟩ at the end"),
            "clusters": uncounted("groups of tokens linked by steps of at most 0.05, at the end"),
            "clusters_up_to_sign": uncounted("the same, x and −x being one"),
            "tokens_final": unknown(
                ("token", "component"), mu0.points.shape, "tokens at the last time"
            ),
            "weight": ("token", np.asarray(mu0.weights), {"long_name": "weights", "units": "1"}),
            "value": known("value", components, "V"),
            "key_query": known("key_query", components, "B"),
        },
        coords={
            "sign": ("sign", list(SIGNS), {"long_name": "B is definite, of this sign"}),
            "run": np.arange(runs),
            "time": (
                "time",
                times,
                {"long_name": "time t", "units": "softmax attention time, ẋ = P V m"},
            ),
            "eigenvector": np.arange(d),
        },
        attrs={
            "title": "The terminal phase",
            "experiment": "terminal",
            "source": "arXiv:2605.10931, Conjecture 1",
            "family": config.family,
            "beta": config.beta,
            "redrawn": prepared.redrawn,
            "mass": config.mass,
        },
    )  # fmt: skip


def _summary(prepared: Prepared, dataset: xr.Dataset, clock: CompileClock) -> dict[str, Any]:
    config = prepared.config
    summary: dict[str, Any] = {
        "experiment": "terminal",
        "family": config.family,
        "beta": config.beta,
        "runs": config.runs,
        "redrawn": prepared.redrawn,
    }
    for sign in SIGNS:
        here = dataset.sel(sign=sign)
        here = here.isel(run=here["outcome"].values != NOT_RUN)
        outcome = here["outcome"].values
        for code, name in enumerate(OUTCOMES):
            summary[f"{sign}_{name}"] = int(np.sum(outcome == code))
        summary |= _fraction(f"{sign}_fraction", summary[f"{sign}_{OUTCOMES[0]}"], len(outcome))
        # Which eigenvector it was, whatever the conjecture; and the draws with clusters of either
        # kind: those at ±v hold together if λ > 0 and they attend to themselves, or if λ < 0 and
        # they attend to each other, so that V of one sign may have nothing to settle on.
        settled = here.isel(run=outcome != OUTCOMES.index("unsettled"))
        end, values = settled["overlap_v"].values[:, -1], here["eigenvalue_v"].values
        summary[f"{sign}_in_largest"] = int(np.sum(end[:, 0] >= config.mass))
        summary[f"{sign}_in_least"] = int(np.sum(end[:, -1] >= config.mass))
        mixed = (values[:, 0] > 0) & (values[:, -1] < 0)
        summary[f"{sign}_mixed_runs"] = int(np.sum(mixed))
        summary[f"{sign}_mixed_dominant"] = int(np.sum(outcome[mixed] == 0))
    return summary | {
        "tokens": prepared.measure.size,
        **clock.summary(),
    }


def _fraction(name: str, count: int, of: int) -> dict[str, float]:
    """A fraction with its 95 % interval (Clopper and Pearson)."""
    if of == 0:
        return {name: np.nan, f"{name}_low": np.nan, f"{name}_high": np.nan}
    low, high = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    return {name: count / of, f"{name}_low": float(low), f"{name}_high": float(high)}


def figures(dataset: xr.Dataset) -> dict[str, Any]:
    """How the runs ended, where their eigenvalues lie, and the way there."""
    return {"outcomes": draw_outcomes(dataset), "overlaps": draw_overlaps(dataset)}


COLOURS = {
    "dominant": "#2a788e", "other": "#f0a43a", "several": "#b5497b", "unsettled": "#a0a0a0",
}  # fmt: skip
MARKERS = {"o": "along $v_1$", "v": "along $v_d$", "x": "elsewhere"}


def _names(outcome: Any) -> np.ndarray:
    return np.array([*OUTCOMES, "not run"])[np.asarray(outcome)]


@plot.styled
def draw_outcomes(dataset: xr.Dataset) -> Any:
    """Outcomes for each sign of B, and where they lie in the plane of V's extreme eigenvalues."""
    figure, axes = plot.subplots(1, 3, (12.4, 4.4), width_ratios=(0.7, 1, 1))
    bars, *planes = axes[0]
    names = dict(zip(SIGNS, map(_names, dataset["outcome"].values), strict=True))
    for k, sign in enumerate(SIGNS):
        below = 0
        for name in OUTCOMES:
            count = int(np.sum(names[sign] == name))
            bars.bar(k, count, bottom=below, color=COLOURS[name], width=0.6)
            if count:
                bars.text(k, below + count / 2, str(count), ha="center", va="center")
            below += count
    bars.set_xticks((0, 1), ("B > 0", "B < 0"))
    bars.set_ylabel("runs")
    bars.grid(axis="x", visible=False)
    extremes = [dataset["eigenvalue_v"].values[..., j] for j in (0, -1)]
    limits = [(min(0, x.min()) - 0.2, max(0, x.max()) + 0.2) for x in extremes]
    for k, (ax, sign) in enumerate(zip(planes, SIGNS, strict=True)):
        end = dataset["overlap_v"].sel(sign=sign).values[:, -1]
        inside = end[:, [0, -1]] >= dataset.attrs["mass"]
        kinds = (inside[:, 0], inside[:, 1], ~inside.any(1))
        for name in OUTCOMES:
            for marker, kind in zip(MARKERS, kinds, strict=True):
                shown = (names[sign] == name) & kind
                x, y = (values[k, shown] for values in extremes)
                ax.scatter(x, y, 34, COLOURS[name], marker=marker, linewidths=1.4)
        for straight in (ax.axhline, ax.axvline):
            straight(0, color="black", linewidth=0.6)
        if sign == "negative":
            ax.axline((0, 0), slope=-1, linestyle="--", color="black", linewidth=1)
        ax.set_xlim(*limits[0])
        ax.set_ylim(*limits[1])
        ax.set_xlabel("$\\lambda_1$, largest eigenvalue of V")
        ax.set_title(f"B {'><'[k]} 0")
    planes[0].set_ylabel("$\\lambda_d$, least eigenvalue of V")
    handles = [plot.handle(color=COLOURS[name], linewidth=8, label=name) for name in OUTCOMES]
    handles += [
        plot.handle(color="black", marker=marker, linestyle="none", label=f"tokens {where}")
        for marker, where in MARKERS.items()
    ]
    handles.append(
        plot.handle(
            color="black", linestyle="--", linewidth=1, label="$|\\lambda_1| = |\\lambda_d|$"
        )
    )
    figure.legend(handles=handles, loc="outside right center")
    figure.suptitle(f"Where tokens end, by V and the sign of B (β = {dataset.attrs['beta']:g})")
    return figure


@plot.styled
def draw_overlaps(dataset: xr.Dataset) -> Any:
    """What is not along V's conjectured and M's dominant eigenvector: median and quartiles."""
    last = dataset.sizes["eigenvector"] - 1
    panels = []
    for sign, conjectured, title in (
        ("positive", 0, "B > 0"),
        ("negative", 0, "B < 0, $|\\lambda_1| > |\\lambda_d|$"),
        ("negative", last, "B < 0, $|\\lambda_d| > |\\lambda_1|$"),
    ):
        here = dataset.sel(sign=sign).isel(time=slice(1, None))
        here = here.isel(run=here["conjectured"].values == conjectured)
        if here.sizes["run"]:
            panels.append((here, conjectured, title))
    figure, axes = plot.subplots(1, len(panels), (4.1 * len(panels) + 0.4, 4.2), sharey=True)
    violet, green = plot.sequence(2)
    for ax, (here, conjectured, title) in zip(axes[0], panels, strict=True):
        for name, k, colour, label in (
            ("overlap_m", 0, green, "dominant eigenvector of M = VBᵀ"),
            ("overlap_v", conjectured, violet, "conjectured eigenvector of V"),
        ):
            missing = 1 - here[name].isel(eigenvector=k).astype(float)
            low, middle, high = missing.quantile((0.25, 0.5, 0.75), "run").values
            ax.fill_between(here["time"], low, high, color=colour, alpha=0.2, linewidth=0)
            ax.plot(here["time"], middle, color=colour, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_ylim(1e-4, 1.3)
        ax.set_xlabel("time t")
        ax.set_title(f"{title}: {here.sizes['run']} runs")
    axes[0, 0].set_ylabel("mass not along it (median and quartiles of runs)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def inspect(config: Config) -> list[Any]:
    """The spectra of the first draws, without running anything."""
    draws, redrawn = draw_family(config)
    table = Table(
        title=f"{config.family} family: {config.runs} draws for each sign of B, the first of them",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("B", "run", "eigenvalues of V", "eigenvalues of M = VBᵀ", "‖B‖₂", "cond B"):
        table.add_column(column, justify="right")
    table.add_column("conjectured", justify="right")
    for i, draw in enumerate(draws[:16]):
        b = np.linalg.svd(draw.key_query, compute_uv=False)
        table.add_row(
            SIGNS[i % 2],
            str(i // 2),
            " ".join(f"{value:.3f}" for value in draw.value_eigenvalues[:6]),
            " ".join(f"{value:.3f}" for value in draw.interaction_eigenvalues[:6]),
            f"{b[0]:.3f}",
            f"{b[0] / b[-1]:.2f}",
            f"{draw.value_eigenvalues[draw.conjectured]:.3f}",
        )
    table.caption = f"{redrawn} draws were drawn again for want of a gap"
    table.caption_justify = "left"
    return [table]
