"""The exponential tilt of a measure, the one sum that attention, energies and kernels are made of.

For u ∈ R^d and a measure μ,

    F_μ(u) = ∫ e^⟨u,y⟩ dμ(y),      m_μ(u) = ∫ y e^⟨u,y⟩ dμ(y) / F_μ(u) = ∇_u log F_μ(u).

A `tilt` is a *way of summing*: `tilt(u, mu)` returns `(log_mass, mean)` = (log F_μ(u), m_μ(u)) for
every query u, never F itself, which overflows. Ways differ in time and memory, not in what they
compute; each has its own file here.
"""

from .base import AbstractTilt as AbstractTilt
from .base import Tilted as Tilted
from .choose import Automatic as Automatic
from .dense import Dense as Dense
from .streamed import Streamed as Streamed
