"""The two limits β → ∞: of the mean field, and of finitely many tokens."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import sphere
from ..attention import Attention
from ..errors import InputError
from ..tilt import AbstractTilt, Automatic
from .base import AbstractField


class ZeroTemperature(AbstractField):
    """v_∞(x) = P_x (V Bᵀx/|Bᵀx| + b_v), the limit of v_β[μ] when μ has full support.

    (arXiv:2605.10931, equation (3); Kᵀb_q is added to Bᵀx under biases.) Tokens do not interact: μ
    is ignored and the cost is O(n). Without biases the flow is
    x(t) = e^{sM}x₀/|e^{sM}x₀| with ds/dt = 1/|Bᵀx|.

    **Raises:** `InputError` if B is singular, where Bᵀx/|Bᵀx| is undefined on its kernel.
    """

    attention: Attention

    def __check_init__(self):
        b = self.attention.key_query
        if isinstance(b, jax.core.Tracer):
            return
        rank = np.linalg.matrix_rank(np.asarray(b))
        if rank < len(b):
            raise InputError(
                f"the zero-temperature field needs B = QᵀK invertible, but its rank is {rank} "
                f"of {len(b)}"
            )

    def __call__(self, x, mu=None, labels=None):
        direction = sphere.normalise(self.attention.logit(x))
        return sphere.tangent(x, self.attention.output(direction))


class HardmaxAttention(AbstractField):
    """v[μ](x) = P_x (V m + b_v), m the weighted mean of the tokens that maximise ⟨Bᵀx + Kᵀb_q, y⟩.

    The limit β → ∞ for a *finite* measure; not `ZeroTemperature`, whose measure fills the sphere.

    **Arguments:** `tolerance`: logits within tolerance·|Bᵀx + Kᵀb_q| of the largest tie with it;
    by default 32 units of rounding.
    """

    attention: Attention
    tolerance: float | None = eqx.field(static=True, default=None)
    tilt: AbstractTilt = Automatic()

    def __call__(self, x, mu, labels=None):
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = 32 * float(jnp.finfo(x.dtype).eps)
        mean = self.tilt.exposed(self.attention.logit(x), mu, tolerance)
        return sphere.tangent(x, self.attention.output(mean))
