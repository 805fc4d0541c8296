"""What a public signature takes as an array: also nested lists of numbers, as configs hold them."""

from collections.abc import Sequence

import jaxtyping

ArrayLike = jaxtyping.ArrayLike | Sequence
