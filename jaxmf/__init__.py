"""jaxmf: mean-field transformer dynamics in JAX.

Tokens are particles on a sphere, flowing through self-attention. A law becomes a measure; a field
is evaluated against the measure; a flow carries the measure through time; distances read it.
"""

import importlib
import sys
import types

# The public names and the modules they live in. They load on first use, so that the command line
# can answer `--help` without importing JAX.
_PUBLIC = {
    "Attention": "attention",
    "Measure": "measure",
    "InputError": "errors",
    # laws
    "Uniform": "laws",
    "VonMisesFisher": "laws",
    "Mixture": "laws",
    "Tokens": "laws",
    # fields
    "SoftmaxAttention": "fields",
    "UnnormalisedAttention": "fields",
    "ZeroTemperature": "fields",
    "HardmaxAttention": "fields",
    "HeadSum": "fields",
    # flows
    "flow": "flow",
    "Euler": "flow",
    "Midpoint": "flow",
    "RK4": "flow",
    "Adaptive": "flow",
    # spectra
    "spectrum": "spectrum",
    "eigenspaces": "spectrum",
    "assumptions": "spectrum",
    # distances
    "wasserstein": "transport",
    "coupling": "transport",
    # real models
    "load_checkpoint": "pretrained",
}
_MODULES = ("experiments", "pretrained", "sphere", "tilt", "transport")

__version__ = "0.1.0"
__all__ = [*_PUBLIC, *_MODULES]


def __getattr__(name):
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Importing a submodule sets it as an attribute of the package. Where a public function has the
    name of its module (`flow`, `spectrum`) the function must win, whatever was imported first.
    """

    def __setattr__(self, name, value):
        if name in _PUBLIC and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
