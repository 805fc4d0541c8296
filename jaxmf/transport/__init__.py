"""Wasserstein distances W₂ on the sphere, exact or with both ends certified."""

from .assignment import assignment as assignment
from .axis import to_axis as to_axis
from .costs import Chordal as Chordal
from .costs import Geodesic as Geodesic
from .coupling import coupling as coupling
from .wasserstein import Distance as Distance
from .wasserstein import wasserstein as wasserstein

# What uses ott, which takes two seconds to import, is loaded on first use.
_WITH_OTT = {
    "interval": "certified",
    "Interval": "certified",
}


def __getattr__(name):
    if name in _WITH_OTT:
        from importlib import import_module

        return getattr(import_module(f".{_WITH_OTT[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
