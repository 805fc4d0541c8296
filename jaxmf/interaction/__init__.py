"""Ways of summing a kernel h against a measure.

For a state (x, ξ) and a measure μ,

    Φ_μ(x, ξ) = ∫ h((x, ξ), z) dμ(z),      ∇ₓΦ_μ,

the first variation of the energy ½∬ h dμ dμ and its gradient. An `interaction` is a *way of
summing*: `interaction(kernel, x, mu, labels)` returns `(value, gradient)` at every query. Ways
differ in time and memory, not in what they compute; each has its own file here.
"""

from .base import AbstractInteraction as AbstractInteraction
from .base import Potential as Potential
from .choose import Automatic as Automatic
from .dense import Dense as Dense
from .streamed import Streamed as Streamed
from .structured import Structured as Structured
