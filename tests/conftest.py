"""One precision and one hypothesis profile for the whole session.

Tests run in float64; a test of float32 says so, by the dtype of what it puts in.
"""

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)

# No deadline: the first example compiles. Few examples: each is an array, not a number.
hypothesis.settings.register_profile(
    "jaxmf", deadline=None, max_examples=15, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxmf")


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's name and parameters alone."""
    return np.random.default_rng(list(request.node.name.encode()))
