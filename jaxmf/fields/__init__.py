"""Velocity fields of tokens: v[μ](x) for any query point x against any measure μ.

A field says what is computed; the tilt it holds says how the sum over tokens is done.
"""

from .ascent import Ascent as Ascent
from .ascent import NormalisedAscent as NormalisedAscent
from .base import AbstractField as AbstractField
from .base import HeadSum as HeadSum
from .limits import HardmaxAttention as HardmaxAttention
from .limits import ZeroTemperature as ZeroTemperature
from .softmax import SoftmaxAttention as SoftmaxAttention
from .unnormalised import UnnormalisedAttention as UnnormalisedAttention
