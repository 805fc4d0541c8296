import jax.numpy as jnp
import numpy as np

from jaxmf import Measure
from jaxmf.observables import cosine_histogram, resultant_length


def test_resultant_length_of_two_weighted_points():
    # |p e₁ + (1 − p) e₂|² = p² + (1 − p)², also along a batch axis.
    points = np.stack([np.eye(3)[:2], np.eye(3)[[0, 0]]])
    mu = Measure(points, [0.3, 0.7])
    np.testing.assert_allclose(resultant_length(mu), [np.sqrt(0.3**2 + 0.7**2), 1], rtol=1e-15)


def test_cosine_histogram_counts_pairs_of_different_tokens_with_their_weights():
    # Cosines: e₁·e₂ = 0, e₁·(−e₁) = −1, e₂·(−e₁) = 0.
    mu = Measure(np.array([[1.0, 0], [0, 1], [-1, 0]]), [0.5, 0.3, 0.2])
    edges = jnp.array([-1, -0.5, 0.5, 1.0])
    opposite, orthogonal = 2 * 0.5 * 0.2, 2 * 0.3 * (0.5 + 0.2)
    total = opposite + orthogonal
    expected = [opposite / total, orthogonal / total, 0]
    np.testing.assert_allclose(cosine_histogram(mu, edges), expected, rtol=1e-14)


def test_cosines_of_coincident_tokens_fall_into_the_last_bin():
    x = np.full((5, 7), 7**-0.5)  # its square rounds to a little more than one
    histogram = cosine_histogram(Measure(x), jnp.linspace(-1, 1, 11))
    np.testing.assert_allclose(histogram, np.eye(10)[-1], rtol=1e-14)
