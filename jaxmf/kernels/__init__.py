"""Kernels h((x, ξ), (y, ζ)) of unnormalised self-attention with auxiliary variables.

Small objects that say what h is on one pair of tokens, and an algebra: `+`, `*`, multiples, gauges.
Content kernels look at the tokens x, y; label kernels at the labels ξ, ζ; gauges turn tokens by an
orthogonal matrix of the label.
"""

from .algebra import AbstractContentKernel as AbstractContentKernel
from .algebra import AbstractGauge as AbstractGauge
from .algebra import AbstractKernel as AbstractKernel
from .algebra import AbstractLabelKernel as AbstractLabelKernel
from .content import Exponential as Exponential
from .content import Linear as Linear
from .content import Polynomial as Polynomial
from .frozen import Frozen as Frozen
from .gauges import Householder as Householder
from .gauges import OrthogonalMap as OrthogonalMap
from .gauges import Prefix as Prefix
from .gauges import RoPE as RoPE
from .gauges import Rotation as Rotation
from .labels import Alibi as Alibi
from .labels import Constant as Constant
from .labels import DistanceBias as DistanceBias
from .labels import FourierToeplitz as FourierToeplitz
from .labels import GaussianBias as GaussianBias
from .labels import Toeplitz as Toeplitz
from .labels import fourier as fourier
