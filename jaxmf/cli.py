"""The command line: run a config, look into a config or a model.

JAX and all that needs it are imported inside the commands, so that help is instant.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Mean-field transformer dynamics: measure what the theorems say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# A table in a file or a pipe is not cut to a terminal's 80 columns.
out_console = Console(width=None if sys.stdout.isatty() else 120)
err_console = Console(stderr=True)

Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a config key: --set time.steps=800"),
]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    set_: Override = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new or empty folder; by default a new one under runs/."),
    ] = None,
) -> None:
    """Run an experiment: write its resolved config, dataset, summary and figures."""
    from . import experiments

    use_compilation_cache()
    loaded = experiments.load(config, set_ or [])
    folder = new_folder(loaded.experiment) if out is None else out
    with ProgressBar() as monitor:
        result = experiments.run(loaded, folder, monitor)
    show_summary(result.summary)
    out_console.print(f"written to {folder}", highlight=False, soft_wrap=True)


@app.command()
def inspect(
    source: Annotated[
        str, typer.Argument(metavar="CONFIG|MODEL", help="A YAML file, or a checkpoint.")
    ],
    set_: Override = None,
) -> None:
    """The spectrum and the assumptions of a config's weights, or of a model's, head by head."""
    from . import experiments
    from .experiments.inspect import tables

    use_compilation_cache()
    if source.endswith((".yaml", ".yml")):
        found = tables(experiments.load(source, set_ or []))
    elif set_:
        raise typer.BadParameter("--set changes a config, and a model has none")
    else:
        found = tables(source)
    for table in found:
        out_console.print(table)


def main() -> None:
    """Bad input ends in one sentence and status 2, never in a traceback."""
    # Before NumPy is imported: eigenproblems of a few hundred rows gain nothing from OpenBLAS's
    # threads, which on a busy machine wait for each other and take forty times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .errors import InputError, NonFiniteError

    try:
        app()
    except (InputError, NonFiniteError) as error:
        err_console.print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except KeyboardInterrupt:
        err_console.print("interrupted; what was finished is kept", highlight=False)
        sys.exit(130)


def escape(text: str) -> str:
    """Text in which rich sees no markup."""
    from rich.markup import escape

    return escape(text)


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless JAX was told where (or not) to keep them."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxmf" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def new_folder(experiment: str) -> Path:
    """A folder under runs/ named after the time and the experiment, not there yet."""
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{experiment}"
    folder, again = stem, 1
    while folder.exists():
        again += 1
        folder = stem.with_name(f"{stem.name}-{again}")
    return folder


class ProgressBar:
    """A monitor that draws a progress bar on standard error, from the start of the work."""

    def __init__(self):
        self.bar = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.bar is not None:
            self.bar.stop()

    def start(self, total: int) -> None:
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("elapsed,"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("to go"),
            console=err_console,
            transient=True,
        )
        self.bar.start()
        self.task = self.bar.add_task("compiling", total=total)

    def advance(self, what: str) -> None:
        self.bar.update(self.task, advance=1, description=what)

    def keep(self, result: Any) -> None:
        pass


def show_summary(summary: dict[str, Any]) -> None:
    """The numbers of a summary, a line each; what is a list of runs, side by side."""
    width = max(20, *map(len, summary))
    for key, value in summary.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, list) and value and isinstance(value[0], dict):
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(justify="right", min_width=width)
            for name in value[0]:
                table.add_row(name, *(brief(row[name]) for row in value))
            out_console.print(table, highlight=False)
        elif not isinstance(value, dict):
            items = value if isinstance(value, list) else [value]
            line = f"{key:>{width}}  {', '.join(brief(item) for item in items)}"
            out_console.print(line, highlight=False, soft_wrap=True)


def brief(value: Any) -> str:
    """A number in six digits; anything else as it is."""
    return f"{value:.6g}" if isinstance(value, float) else "–" if value is None else str(value)
