"""The spectrum of M = VBᵀ, the projection Π it defines, and the assumptions of the concentration
theorem, checked with their numbers (arXiv:2605.10931, Assumptions 1 to 3 and Corollary 2).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from . import sphere
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
    asymmetry: float = eqx.field(static=True)

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
        if not isinstance(length, jax.core.Tracer):
            lost = np.argwhere(np.asarray(length) == 0)
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


def eigenspaces(matrix: ArrayLike, tolerance: float | None = None) -> Eigenspaces:
    """Eigenvalues of (M + Mᵀ)/2, grouped: neighbours closer than `tolerance`·‖M‖₂ are one.

    Computed in double precision, whatever the matrix comes in; `tolerance` defaults to ε^{2/3} of
    the precision it comes in. Not differentiable: the grouping decides shapes.
    """
    matrix = np.asarray(matrix)
    if matrix.dtype not in (np.float32, np.float64):
        matrix = matrix.astype(np.float64)
    if tolerance is None:
        tolerance = float(np.finfo(matrix.dtype).eps) ** (2 / 3)
    matrix = matrix.astype(np.float64)
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    values, vectors = values[::-1], vectors[:, ::-1]
    scale = np.linalg.norm(matrix)
    breaks = np.flatnonzero(values[:-1] - values[1:] > tolerance * np.abs(values).max()) + 1
    groups = np.split(np.arange(len(values)), breaks)
    dtype = jnp.zeros(()).dtype
    return Eigenspaces(
        eigenvalues=jnp.asarray([values[group].mean() for group in groups], dtype),
        vectors=jnp.asarray(vectors, dtype),
        multiplicities=tuple(len(group) for group in groups),
        asymmetry=float(np.linalg.norm(matrix - matrix.T) / scale) if scale > 0 else 0.0,
    )


def spectrum(attention: Attention, tolerance: float | None = None) -> Eigenspaces:
    """The eigenspaces of M = VBᵀ: its gap γ, its dominant eigenspace E and the projection Π."""
    return eigenspaces(attention.interaction, tolerance)


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
    gap, multiplicity = float(spaces.gap), spaces.multiplicities[0]

    failures = []
    if rank < len(b):
        failures.append("B is singular")
    if spaces.asymmetry > eps ** (2 / 3):
        failures.append("M is not symmetric")
    if gap == 0:
        failures.append("the gap is zero")
    first = Finding(
        "A1",
        not failures,
        ", ".join(failures) or "B is invertible, M = VBᵀ is symmetric, the gap is positive",
        {
            "asymmetry": spaces.asymmetry,
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
