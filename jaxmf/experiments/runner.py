"""Running an experiment into a folder: config.yaml, result.nc, summary.json and figures.

Everything that can be wrong is found before the folder is made. While the run goes on, the dataset
is rewritten whole (to a temporary name, then renamed) as parts of it are finished, so that a kill
at any moment leaves a readable file with all finished work.
"""

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
import yaml
from jaxtyping import Array, Bool

from .. import __version__, sphere
from ..errors import InputError, NonFiniteError
from ..measure import Measure
from .config import ExperimentConfig, module


class Result(NamedTuple):
    """What a run leaves: a labelled dataset, and the few numbers one looks at first."""

    dataset: xr.Dataset
    summary: dict[str, Any]


@runtime_checkable
class Monitor(Protocol):
    """Who watches a run."""

    def start(self, total: int) -> None:
        """There will be `total` pieces of work."""

    def advance(self, what: str) -> None:
        """One piece is done; `what` says what the run is at."""

    def keep(self, result: Result) -> None:
        """So much is finished, and should survive whatever comes."""


class Silent(Monitor):
    """A monitor that does nothing."""


class CompileClock:
    """Times a run: compiles functions ahead of time, and adds up what that took.

    Tracing (Python to StableHLO) happens in every run; compiling proper only until the compilation
    cache knows the program.
    """

    def __init__(self):
        self.started = time.perf_counter()
        self.tracing = self.compiling = 0.0

    def __call__(self, function, *arguments):
        start = time.perf_counter()
        lowered = jax.jit(function).lower(*arguments)
        traced = time.perf_counter()
        compiled = lowered.compile()
        self.tracing += traced - start
        self.compiling += time.perf_counter() - traced
        return compiled

    def summary(self) -> dict[str, float]:
        """The seconds, as they stand in a summary."""
        return {
            "wall_seconds": time.perf_counter() - self.started,
            "compile_seconds": self.compiling,
            "trace_seconds": self.tracing,
        }


@contextlib.contextmanager
def precision(config: ExperimentConfig) -> Iterator[None]:
    """JAX's default float type, as the config asks."""
    with jax.enable_x64(config.precision == "float64"):
        yield


def run(
    config: ExperimentConfig,
    out: str | Path | None = None,
    monitor: Monitor | None = None,
    command: str | None = None,
) -> Result:
    """Run an experiment; with `out`, write it into that new or empty folder.

    **Raises:** `InputError` for anything wrong with the config or the folder, before anything is
    written; `NonFiniteError` if the run stops being finite, after keeping what was saved.
    """
    experiment = module(config.experiment)
    monitor = Silent() if monitor is None else monitor
    with precision(config):
        if out is not None:
            check_folder(Path(out))
        prepared = experiment.prepare(config)
        if out is None:
            return experiment.run(prepared, monitor)
        folder = Path(out)
        make_folder(folder)
        _write(folder / "config.yaml", resolved(config, command))
        watched = _Keeper(folder, monitor)
        result = experiment.run(prepared, watched)
        watched.keep(result)
        _draw(experiment, result.dataset, folder)
        return result


class _Keeper:
    """Passes a run's reports on, and writes to the folder what is to be kept."""

    def __init__(self, folder: Path, monitor: Monitor):
        self.folder, self.monitor = folder, monitor
        self.start, self.advance = monitor.start, monitor.advance

    def keep(self, result: Result) -> None:
        target = self.folder / "result.nc"
        temporary = self.folder / ".result.nc.tmp"
        result.dataset.to_netcdf(temporary, engine="h5netcdf")
        os.replace(temporary, target)
        _write(self.folder / "summary.json", json.dumps(_plain(result.summary), indent=2) + "\n")
        self.monitor.keep(result)


def check_folder(folder: Path) -> None:
    """**Raises:** `InputError` if the folder is not new or empty, or could not be made."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; give a new or an empty folder")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--out {folder} is not empty; give a new or an empty folder")
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {folder} cannot be written: no permission to write in {parent}")


def make_folder(folder: Path) -> None:
    """Make the folder, and show that files can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out {folder} cannot be written: {error.strerror}") from None


def resolved(config: ExperimentConfig, command: str | None = None) -> str:
    """The config with every default filled in, and what it was run with; itself a config."""
    packages = ("jax", "jaxlib", "equinox", "diffrax", "ott-jax", "numpy", "scipy")
    device = jax.devices()[0]
    provenance = {
        "jaxmf": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()} device(s)",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command or " ".join(sys.argv),
    }
    content = config.model_dump(exclude_none=True) | {"provenance": provenance}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _draw(experiment: Any, dataset: xr.Dataset, folder: Path) -> None:
    for name, figure in experiment.figures(dataset).items():
        figure.savefig(folder / f"{name}.png", dpi=150)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """NumPy and JAX numbers as Python's; what is not finite as null, which JSON has."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, jax.Array)):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def on_sphere(mu: Measure) -> Bool[Array, ""]:
    """Whether every token is still a finite unit vector.

    Overflow shows in either way: as NaN, or as a token of length zero (x/|x| with |x| = ∞).
    """
    return jnp.all(jnp.abs(sphere.norm(mu.points) - 1) < 0.01)


def stopped(t: float, beta: float | None, kept: int, of: int) -> NonFiniteError:
    """The error of a run whose tokens left the sphere at time t."""
    where = "zero temperature" if beta is None else f"beta = {beta:g}"
    return NonFiniteError(
        f"the tokens stopped being finite before time {t:g} at {where}; {kept} of {of} saved times "
        "there were kept, and all that was finished before; smaller weights, smaller steps or "
        "precision: float64 may help"
    )
