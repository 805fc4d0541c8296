"""The spectrum of M = VBᵀ, the projection Π it defines, and the assumptions of the concentration
theorem, checked with their numbers (arXiv:2605.10931, Assumptions 1 to 3 and Corollary 2).
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from . import sphere
from ._tracing import known
from ._typing import ArrayLike
from .attention import Attention
from .errors import InputError
from .laws import AbstractLaw
from .measure import Measure


class Eigenspaces(eqx.Module):
    """The eigenspaces of the symmetric part of a matrix, largest eigenvalue first.

    - `eigenvalues`: the distinct eigenvalues μ₁ > μ₂ > …
    - `multiplicities`: the dimension of each eigenspace.
    - `vectors`: an orthonormal basis of eigenvectors, as columns, in the same order.
    - `asymmetry`: ‖M − Mᵀ‖/‖M‖ (Frobenius), zero for a symmetric matrix.
    """

    eigenvalues: Float[Array, " k"]
    vectors: Float[Array, "d d"]
    multiplicities: tuple[int, ...] = eqx.field(static=True)
    asymmetry: Float[Array, ""]

    @property
    def bases(self) -> list[Float[Array, "d _"]]:
        """An orthonormal basis of each eigenspace, as columns."""
        return jnp.split(self.vectors, np.cumsum(self.multiplicities)[:-1], axis=1)

    @property
    def gap(self) -> Float[Array, ""]:
        """γ = μ₁ − μ₂, between the two largest distinct eigenvalues; zero if there is only one."""
        if len(self.multiplicities) == 1:
            return jnp.zeros(())
        return self.eigenvalues[0] - self.eigenvalues[1]

    @property
    def dominant(self) -> Float[Array, "d k"]:
        """An orthonormal basis of E, the eigenspace of the largest eigenvalue."""
        return self.vectors[:, : self.multiplicities[0]]

    def project(self, mu: Measure) -> Measure:
        """Π♯μ with Π(x) = P_E x/|P_E x|: each token goes to the nearest unit vector of E.

        **Raises:** `InputError` naming the tokens with P_E x = 0, which have no nearest one.
        """
        shadow = jnp.matmul(mu.points, self.dominant, precision="highest")
        length = sphere.norm(shadow)
        values = known(length)
        lost = [] if values is None else np.argwhere(values == 0)
        if len(lost):
            where = ", ".join(str(i[0]) for i in lost[:5]) + (", …" if len(lost) > 5 else "")
            raise InputError(
                f"{len(lost)} tokens are orthogonal to E, where Π is not defined: indices "
                f"{where}; move them, or draw the tokens with another seed or count"
            )
        image = jnp.matmul(shadow / length[..., None], self.dominant.T, precision="highest")
        return mu.move(image.astype(mu.points.dtype))

    def overlap(self, mu: Measure) -> Float[Array, "*batch k"]:
        """Σᵢ wᵢ |P_E xᵢ|² for every eigenspace E; they sum to one."""

        squares = jnp.matmul(mu.points, self.vectors, precision="highest") ** 2
        mass = jnp.einsum("n,...nd->...d", mu.weights, squares, precision="highest")
        first = np.cumsum((0, *self.multiplicities[:-1]))
        return jnp.add.reduceat(mass, first, axis=-1)


def eigenspaces(
    matrix: ArrayLike,
    tolerance: float | None = None,
    multiplicities: tuple[int, ...] | None = None,
) -> Eigenspaces:
    """Eigenvalues of S = (M + Mᵀ)/2, grouped: neighbours closer than `tolerance`·‖M‖₂ are one.

    Computed in double precision, whatever the matrix comes in; `tolerance` defaults to ε^{2/3} of
    the precision it comes in. `multiplicities` says instead how many eigenvalues, from the largest
    on, make each group. Under `jax.jit` and `jax.vmap` it must, and the precision is JAX's default.

    Differentiable in M, once and twice, as far as eigenspaces are: the mean of a group and every
    function of the projectors P_E have their derivatives, also where a group splits. A basis of an
    eigenspace of dimension above one has none; its vectors are moved without turning inside it.

    **Raises:** `InputError` for multiplicities that do not sum to d, or that are not given where
    the matrix is traced.
    """
    values = known(matrix)
    dtype = jnp.zeros(()).dtype
    if values is None:
        if multiplicities is None:
            raise InputError(
                "the dimensions of the eigenspaces must be known when compiling: under jax.jit or "
                "jax.vmap give `multiplicities`, those of all eigenvalues from the largest on"
            )
        values, vectors = jnp.linalg.eigh(_symmetric(lax.stop_gradient(matrix).astype(dtype)))
    else:
        if values.dtype not in (np.float32, np.float64):
            values = values.astype(np.float64)
        if tolerance is None:
            tolerance = float(np.finfo(values.dtype).eps) ** (2 / 3)
        double = values.astype(np.float64)
        values, vectors = np.linalg.eigh(_symmetric(double))
    values, vectors = values[::-1], vectors[:, ::-1]
    if multiplicities is None:
        breaks = np.flatnonzero(values[:-1] - values[1:] > tolerance * np.abs(values).max()) + 1
        multiplicities = tuple(np.diff((0, *breaks, len(values))).tolist())
    elif min(multiplicities, default=0) < 1 or sum(multiplicities) != len(values):
        raise InputError(
            f"multiplicities is {tuple(multiplicities)}; it must be positive integers that sum to "
            f"the dimension {len(values)}"
        )
    first = np.cumsum((0, *multiplicities[:-1]))
    if isinstance(matrix, jax.core.Tracer):
        matrix = matrix.astype(dtype)
        values, vectors = (jnp.asarray(a, dtype) for a in (values, vectors))
        start = jnp.diag(values), vectors
        blocks, vectors = _eigenbasis(_symmetric(matrix), *start, tuple(multiplicities))
        means = jnp.add.reduceat(jnp.diagonal(blocks), first) / np.asarray(multiplicities, dtype)
        scale = sphere.norm(matrix.ravel())
        asymmetry = sphere.norm((matrix - matrix.T).ravel()) / jnp.where(scale > 0, scale, 1)
    else:
        means = np.add.reduceat(values, first) / multiplicities
        scale = np.linalg.norm(double)
        asymmetry = np.linalg.norm(double - double.T) / scale if scale > 0 else 0.0
    return Eigenspaces(
        eigenvalues=jnp.asarray(means, dtype),
        vectors=jnp.asarray(vectors, dtype),
        multiplicities=tuple(multiplicities),
        asymmetry=jnp.asarray(asymmetry, dtype),
    )


def spectrum(
    attention: Attention,
    tolerance: float | None = None,
    multiplicities: tuple[int, ...] | None = None,
) -> Eigenspaces:
    """The eigenspaces of M = VBᵀ: its gap γ, its dominant eigenspace E and the projection Π.

    Arguments, derivatives and errors as for `eigenspaces`.
    """
    return eigenspaces(attention.interaction, tolerance, multiplicities)


def _symmetric(matrix):
    return (matrix + matrix.T) / 2


# Eigenvectors of one group carry no derivative of their own: only the space they span moves. Let T
# be VᵀSV, block diagonal with one block a group, and at the point itself diagonal. Then dV = VX
# with X zero inside the groups and XT − TX = VᵀdSV outside them, where nothing is divided by
# differences inside a group; dT is VᵀdSV inside the groups.


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _eigenbasis(symmetric, blocks, vectors, multiplicities):
    """(T, V) at S, which are already known: here only to be given their derivatives."""
    return blocks, vectors


@_eigenbasis.defjvp
def _eigenbasis_jvp(multiplicities, primals, tangents):
    symmetric, blocks, vectors = primals
    blocks, vectors = _eigenbasis(symmetric, blocks, vectors, multiplicities)
    change = _product(_product(vectors.T, tangents[0]), vectors)
    inside = _inside(multiplicities)
    turn = _product(vectors, _sylvester(blocks, change, multiplicities))
    return (blocks, vectors), (jnp.where(inside, change, 0), turn)


def _sylvester(blocks, right, multiplicities):
    """X with XT − TX = C outside the groups and X = 0 inside, for T that has become diagonal."""
    inside = _inside(multiplicities)
    values = jnp.diagonal(blocks)
    gaps = jnp.where(inside, 1, values - values[:, None])
    # T less its diagonal is zero, its derivative is not: the last line is for second derivatives.
    rest = blocks - jnp.diag(values)
    x = jnp.where(inside, 0, right / gaps)
    return x + jnp.where(inside, 0, (_product(rest, x) - _product(x, rest)) / gaps)


def _inside(multiplicities: tuple[int, ...]) -> np.ndarray:
    """Which entries of a matrix belong to a diagonal block."""
    group = np.repeat(np.arange(len(multiplicities)), multiplicities)
    return group == group[:, None]


def _product(a, b):
    return jnp.matmul(a, b, precision="highest")


class Finding(NamedTuple):
    """One assumption: whether it holds (None where not known), and the numbers behind it."""

    name: str
    holds: bool | None
    statement: str
    numbers: dict[str, float]


class Assumptions(NamedTuple):
    """What the concentration theorem assumes, checked for given weights and a given law.

    `rate` is the predicted exponent of the zero-temperature convergence to Π♯ρ₀,
    pγ/(2‖B‖₂) with the supremum of the admissible moments p ≤ 2 of 1/|P_E x|.
    """

    findings: tuple[Finding, Finding, Finding]
    spectrum: Eigenspaces
    gap: float
    multiplicity: int
    moment: float
    rate: float


def assumptions(attention: Attention, law: AbstractLaw | None = None) -> Assumptions:
    """Check Assumptions 1 to 3 of arXiv:2605.10931 and report their numbers.

    1. B invertible, M = VBᵀ symmetric, γ > 0.
    2. Some moment E|P_E x|^{−p} is finite. For a law with a bounded density that is so exactly for
       p < dim E; for a finite set of tokens for every p, unless one is orthogonal to E.
    3. The law has a positive Lipschitz density; numbers are relative to the uniform density.

    Without a law, 2 and 3 are left open and the rate is that of a law with a bounded density.
    """
    spaces = spectrum(attention)
    b = np.asarray(attention.key_query, np.float64)
    singular = np.linalg.svd(b, compute_uv=False)
    eps = float(jnp.finfo(attention.key_query.dtype).eps)
    rank = int(np.sum(singular > singular[0] * len(b) * eps))
    condition = float(singular[0] / singular[-1]) if rank == len(b) else float("inf")
    asymmetry = float(spaces.asymmetry)
    gap, multiplicity = float(spaces.gap), spaces.multiplicities[0]

    failures = []
    if rank < len(b):
        failures.append("B is singular")
    if asymmetry > eps ** (2 / 3):
        failures.append("M is not symmetric")
    if gap == 0:
        failures.append("the gap is zero")
    first = Finding(
        "A1",
        not failures,
        ", ".join(failures) or "B is invertible, M = VBᵀ is symmetric, the gap is positive",
        {
            "asymmetry": asymmetry,
            "cond_B": condition,
            "norm_B": float(singular[0]),
            "rank_B": rank,
            "gap": gap,
        },
    )

    moment = float(multiplicity)
    if law is not None:
        moment = law.inverse_moment_limit(spaces.dominant)
    if law is None:
        second = Finding("A2", None, "unknown: no law was given", {})
        third = Finding("A3", None, "unknown: no law was given", {})
    else:
        second = Finding(
            "A2",
            moment > 0,
            f"E|P_E x|^(−p) is finite for p < {moment:g}, dim E = {multiplicity}"
            if moment > 0
            else "no moment of 1/|P_E x| is finite: some tokens are orthogonal to E",
            {"dim_E": multiplicity, "moment_limit": moment},
        )
        bounds = law.density_bounds()
        if bounds is None:
            third = Finding("A3", None, "unknown: a finite set of tokens has no density", {})
        else:
            least, lipschitz = bounds
            third = Finding(
                "A3",
                True,
                f"density at least {least:.3g} of the uniform one, Lipschitz constant at most "
                f"{lipschitz:.3g}",
                {"density_min": least, "lipschitz": lipschitz},
            )
    moment = min(moment, 2.0)
    rate = moment * gap / (2 * float(singular[0])) if singular[0] > 0 else 0.0
    return Assumptions((first, second, third), spaces, gap, multiplicity, moment, rate)
