"""Wasserstein distances W₂ on the sphere, exact or with both ends certified."""

from .assignment import assignment as assignment
from .axis import to_axis as to_axis
from .costs import Chordal as Chordal
from .costs import Geodesic as Geodesic
from .coupling import coupling as coupling
from .wasserstein import Distance as Distance
from .wasserstein import wasserstein as wasserstein
