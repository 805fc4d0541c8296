"""Any cost between two clouds as a geometry of ott-jax, its kernel applied without n × m arrays."""

import jax
import jax.numpy as jnp
from ott.geometry import geometry

from ..tilt.base import log_weight


@jax.tree_util.register_pytree_node_class
class Clouds(geometry.Geometry):
    """The kernel e^{−c(xᵢ, yⱼ)/ε} of a cost softened by a tilt (see `AbstractCost.soften`)."""

    def __init__(self, x, y, cost, tilt, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.cost, self.tilt = x, y, cost, tilt

    @property
    def shape(self):
        return len(self.x), len(self.y)

    @property
    def dtype(self):
        return self.x.dtype

    def apply_lse_kernel(self, f, g, eps, vec=None, axis=0):
        x, y, potential = (self.x, self.y, g) if axis == 1 else (self.y, self.x, f)
        if vec is None:
            sign = jnp.ones(())
        else:
            sign = jnp.sign(vec)
            potential = potential + eps * log_weight(jnp.abs(vec))
        return eps * self.cost.soften(x, y, potential / eps, eps, self.tilt)[0], sign

    def tree_flatten(self):
        return (self.x, self.y, self.cost, self.tilt, self._epsilon_init), {}

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        *content, epsilon = children
        return cls(*content, epsilon=epsilon)
