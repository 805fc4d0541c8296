"""`jaxmf inspect`: the spectrum and the assumptions as tables."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from ..spectra import Assumptions, Eigenspaces
from .config import ExperimentConfig, module
from .runner import precision


def tables(source: ExperimentConfig | str) -> Iterable[Table]:
    """The tables for a config, or for the model of that name or path."""
    if isinstance(source, str):
        yield from module("pretrained").inspect_model(source)
        return
    with precision(source):
        yield from module(source.experiment).inspect(source)


def spectrum_table(title: str, spaces: Eigenspaces) -> Table:
    """Eigenvalues of the symmetric part, with their multiplicities."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("eigenspace", "eigenvalue", "multiplicity"):
        table.add_column(column, justify="right")
    rows = zip(spaces.eigenvalues, spaces.multiplicities, strict=True)
    for k, (value, multiplicity) in enumerate(rows):
        table.add_row(str(k), f"{float(value):.6g}", str(multiplicity))
    return table


def assumptions_table(found: Assumptions) -> Table:
    """The three assumptions of the concentration theorem, and what follows from them."""
    table = Table(
        title="Assumptions of the concentration theorem",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("assumption", "holds", "why", "numbers"):
        table.add_column(column)
    words = {True: "yes", False: "no", None: "unknown"}
    for finding in found.findings:
        numbers = ", ".join(f"{name} = {value:.4g}" for name, value in finding.numbers.items())
        table.add_row(finding.name, words[finding.holds], finding.statement, numbers)
    table.caption = (
        f"gap γ = {found.gap:.6g}, dim E = {found.multiplicity}, predicted rate pγ/(2‖B‖₂) = "
        f"{found.rate:.6g} with p = {found.moment:g}"
    )
    table.caption_justify = "left"
    return table
