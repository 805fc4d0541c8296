"""jaxmf: mean-field transformer dynamics in JAX.

Tokens are particles on a sphere, flowing through self-attention. A law becomes a measure; a field
is evaluated against the measure; a flow carries the measure through time; distances read it.
"""

import importlib

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
    "load_tokens": "laws",
    # fields
    "SoftmaxAttention": "fields",
    "UnnormalisedAttention": "fields",
    "ZeroTemperature": "fields",
    "HardmaxAttention": "fields",
    "HeadSum": "fields",
    "Ascent": "fields",
    "NormalisedAscent": "fields",
    # flows
    "flow": "flows",
    "Euler": "flows",
    "Midpoint": "flows",
    "RK4": "flows",
    "Adaptive": "flows",
    # spectra
    "spectrum": "spectra",
    "eigenspaces": "spectra",
    "assumptions": "spectra",
    # distances
    "wasserstein": "transport",
    "coupling": "transport",
    # what the theorem promises, and what can be certified
    "ConcentrationBound": "bounds",
    "fit_bound": "fits",
    "zero_temperature_bound": "bounds",
    "inverse_moment": "bounds",
    "discrepancy": "certificates",
    "certificate": "certificates",
    # energies
    "energy": "energies",
    "dissipation": "energies",
    "energy_curve": "energies",
    "energy_bound": "kernels.bound",
    "maximise": "maximisers",
    "maximise_graph": "graphs",
    # laws of labels, exact realisation
    "Interval": "label_laws",
    "Atoms": "label_laws",
    "realise_on_orbit": "realisation",
    "realise_by_gauge": "realisation",
    "Realisation": "realisation",
    # collapse or not, by the spectrum of the labels' kernel
    "dichotomy": "dichotomies",
    # observables
    "window": "observables",
    # real models
    "load_checkpoint": "pretrained",
}
_MODULES = ("experiments", "interaction", "kernels", "pretrained", "sphere", "tilt", "transport")

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
