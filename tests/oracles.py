"""Independent truths, in NumPy, SciPy and mpmath: nothing here is computed by the package."""

import equinox as eqx
import jax.numpy as jnp
import mpmath
import numpy as np
import scipy.linalg
import scipy.special
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)

DTYPES = (jnp.float32, jnp.float64)


@eqx.filter_jit
def call(f, *args):
    """f(*args), compiled once for all arguments of the same shapes."""
    return f(*args)


def eps(dtype) -> float:
    """The unit of rounding."""
    return float(jnp.finfo(dtype).eps)


# Random inputs


def sphere_points(rng, *shape) -> np.ndarray:
    """Independent uniform unit vectors along the last axis."""
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def simplex(rng, n) -> np.ndarray:
    """Positive weights that sum to one and differ by a factor of up to ten."""
    w = rng.uniform(0.2, 2.0, n)
    return w / w.sum()


def rotation(rng, d) -> np.ndarray:
    """A random orthogonal matrix."""
    return np.linalg.qr(rng.normal(size=(d, d)))[0]


def invertible(rng, d) -> np.ndarray:
    """A matrix without symmetry whose singular values lie in [1/2, 3/2]."""
    return rotation(rng, d) * rng.uniform(0.5, 1.5, d) @ rotation(rng, d)


# The exponential tilt


def tilt_truth(u, points, weights):
    """(log Σ wⱼ e^⟨u,yⱼ⟩, Σ yⱼ wⱼ e^⟨u,yⱼ⟩ / Σ wⱼ e^⟨u,yⱼ⟩) to 50 digits, in mpmath."""
    log_mass, mean = [], []
    with mpmath.workdps(50):
        points = [[mpmath.mpf(float(c)) for c in y] for y in points]
        weights = [mpmath.mpf(float(w)) for w in weights]
        for one in u:
            row = [mpmath.mpf(float(c)) for c in one]
            terms = [
                w * mpmath.exp(mpmath.fdot(row, y)) for y, w in zip(points, weights, strict=True)
            ]
            mass = mpmath.fsum(terms)
            log_mass.append(float(mpmath.log(mass)))
            moment = (mpmath.fdot(terms, column) for column in zip(*points, strict=True))
            mean.append([float(m / mass) for m in moment])
    return np.array(log_mass), np.array(mean)


# The uniform law, by rules that are exact for polynomials


def gegenbauer(count, d):
    """Gauss's rule for ⟨y, e⟩, y uniform on S^{d−1}: density ∝ (1 − t²)^{(d−3)/2} on [−1, 1].

    Golub and Welsch: the nodes are the eigenvalues of the Jacobi matrix of the Gegenbauer
    polynomials with λ = d/2 − 1. Exact for polynomials of degree 2·count − 1.
    """
    k = np.arange(1, count)
    lam = d / 2 - 1
    if d == 2:  # Chebyshev, the limit λ → 0
        off = np.where(k == 1, np.sqrt(0.5), 0.5)
    else:
        off = np.sqrt(k * (k + 2 * lam - 1) / ((k + lam) * (k + lam - 1))) / 2
    t, vectors = scipy.linalg.eigh_tridiagonal(np.zeros(count), off)
    return t, vectors[0] ** 2


def uniform_rule(d, degree):
    """Points and weights on S^{d−1} that integrate polynomials up to `degree` exactly.

    Equispaced on S¹; above it y = (t, √(1 − t²) z), t by Gauss's rule and z by the rule below.
    """
    if d == 2:
        angle = 2 * np.pi * (np.arange(degree + 1) + 0.3) / (degree + 1)
        return np.stack([np.cos(angle), np.sin(angle)], 1), np.full(degree + 1, 1 / (degree + 1))
    t, a = gegenbauer(degree // 2 + 1, d)
    z, b = uniform_rule(d - 1, degree)
    ring = np.sqrt(1 - t**2)[:, None, None] * z
    points = np.concatenate([np.broadcast_to(t[:, None, None], (*ring.shape[:2], 1)), ring], 2)
    return points.reshape(-1, d), np.outer(a, b).ravel()


def zonal_rule(e, count):
    """Σⱼ aⱼ (δ_(cos θⱼ e + sin θⱼ f) + δ_(cos θⱼ e − sin θⱼ f))/2 for one f ⟂ e.

    The tilt of the uniform law at u ∥ e only sees the law of ⟨y, e⟩ = cos θ, and its mean lies
    along e, so for such u these few points do for the uniform law, in any dimension. θ has density
    ∝ sin^{d−2} θ on [0, π]; Gauss–Legendre in θ, since Golub and Welsch's weights are right to ε
    in absolute terms only, and at d = 384 the tilt lives where they are far smaller than that.
    """
    d = len(e)
    t, a = scipy.special.roots_legendre(count)
    angle = np.pi / 2 * (1 + t)
    a = a * np.sin(angle) ** (d - 2)
    a = np.concatenate([a, a]) / (2 * a.sum())
    along, across = np.cos(angle)[:, None] * e, np.sin(angle)[:, None] * perpendicular(e)
    return np.concatenate([along + across, along - across]), a


def perpendicular(e) -> np.ndarray:
    """A unit vector at right angles to e."""
    f = np.eye(len(e))[np.argmin(np.abs(e))]
    f = f - (f @ e) * e
    return f / np.linalg.norm(f)


# Closed forms for the uniform law


def mean_resultant(d, kappa) -> float:
    """A_d(κ) = I_{d/2}(κ)/I_{d/2−1}(κ)."""
    return float(mpmath.besseli(mpmath.mpf(d) / 2, kappa) / _bessel(d, kappa))


def log_uniform_mass(d, kappa) -> float:
    """log ∫ e^{κ⟨e,y⟩} dσ(y) = log(Γ(d/2)(2/κ)^{d/2−1} I_{d/2−1}(κ)), σ uniform."""
    half = mpmath.mpf(d) / 2
    return float(
        mpmath.loggamma(half) + (half - 1) * mpmath.log(2 / mpmath.mpf(kappa))
        + mpmath.log(_bessel(d, kappa))
    )  # fmt: skip


def _bessel(d, kappa):
    return mpmath.besseli(mpmath.mpf(d) / 2 - 1, kappa)


# A_d(κ) at 15 digits.
MEAN_RESULTANT = {
    (2, 0.5): 0.24249961258080194,
    (2, 8.0): 0.9352354935294386,
    (3, 1.0): 0.3130352854993313,
    (3, 8.0): 0.8750002250703748,
    (3, 50.0): 0.98,
    (5, 20.0): 0.9026315789473685,
    (384, 100.0): 0.24487320285520353,
}

# Growth rate l(l+d−2) c_l(β)/β of a perturbation of degree l of the uniform law, Q = K = V = I,
# c_l = Γ(d/2)(2/β)^{d/2−1} I_{l+d/2−1}(β), divided by c₀ for softmax: (d, β, l, softmax).
GROWTH_RATE = {
    (2, 4.0, 3, True): 0.6643888122078582,
    (2, 9.0, 4, True): 0.7044970292995967,
    (3, 4.0, 2, True): 0.6554949557981072,
    (3, 10.0, 3, False): 707.0495568211481,
    (5, 6.0, 2, True): 0.694469021082452,
}

# W₂(ρₜ, Π♯ρ₀) at zero temperature for B = I, V = diag(μ₁, μ₂, …, μ₂), ρ₀ uniform: (d, γ, t).
# d = 3: √(2/(1 + e^{γt})); d = 2: √(2 − (4/π) arcsin(a)/a), a² = 1 − e^{−2γt}.
W2_UNIFORM = {
    (2, 0.8, 0.0): 0.8525024664274218,
    (2, 0.8, 2.0): 0.47141493971344495,
    (3, 0.8, 0.0): 1.0,
    (3, 0.8, 0.5): 0.8958932301201388,
    (3, 0.8, 5.0): 0.18966396580316228,
    (3, 1.5, 10.0): 0.0007821792977644252,
}
