"""Wasserstein distances W₂ on the sphere, cost |x − y|² (chordal).

Every number says by which method it was found; one that is regularised says with which ε.
"""

from .assignment import assignment as assignment
from .axis import to_axis as to_axis
from .coupling import coupling as coupling
from .wasserstein import Distance as Distance
from .wasserstein import wasserstein as wasserstein


def __getattr__(name):
    if name in ("sinkhorn", "Sinkhorn"):
        from . import entropic  # imports ott, which takes two seconds

        return getattr(entropic, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
