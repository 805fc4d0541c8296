"""Experiments: one file each, with its config, its run and its figures.

An experiment is a module with

- `Config`, a pydantic model: the keys of its YAML file;
- `prepare(config)`, which builds everything that can be wrong, before anything is written;
- `run(prepared, monitor)`, which returns a `Result`, reporting and keeping as it goes;
- `figures(dataset)`, which draws a dataset, whoever made it;
- `inspect(config)`, what can be said without running it.
"""

from .config import load as load
from .runner import Result as Result
from .runner import run as run
