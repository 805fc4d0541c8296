"""How good is W₂, and what does it cost?

    python -m benchmarks.transport [--seconds 120]

float64. Independent samples on S² exactly and as an interval; a cloud in d = 4 to Π♯ρ₀ with
dim E = 2, with and without the tokens in correspondence; a million tokens to an axis.
"""

import argparse
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxmf as mf

from .timing import alternate, median


def main():
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="the longest interval may take"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of the cloud with dim E = 2")
    arguments = parser.parse_args()

    print(f"{'':46}{'seconds':>9}{'lower':>11}{'upper':>11}{'width':>8}  method")

    def row(what, seconds, found):
        low, high = float(found.lower), float(found.upper)
        width = (high - low) / high
        print(f"{what:46}{seconds:>9.3f}{low:>11.6f}{high:>11.6f}{width:>8.2%}  {found.method}")

    mu, nu = (mf.Uniform(3).sample(jax.random.key(seed), 1024) for seed in (0, 1))
    for cost in ("chordal", "geodesic"):
        for method, width in (("assignment", 0.05), ("interval", 0.05)):

            def distance(cost=cost, method=method, width=width):
                return jax.block_until_ready(
                    mf.wasserstein(mu, nu, cost=cost, method=method, width=width)
                )

            seconds = median(alternate({"": distance}, 1)[""])
            row(f"1,024 independent pairs, {cost}, {width:.0%}", seconds, distance())

    n = arguments.tokens
    attention = mf.Attention(np.diag([2.0, 1.5, 1.5, 0.5]), key_query=np.diag([0.5, 1, 1, 0.8]))
    mu0 = mf.Uniform(4).sample(jax.random.key(0), n)
    target = mf.spectrum(attention).project(mu0)
    mu = mf.flow(mf.ZeroTemperature(attention), mu0, 3.0)
    shuffled = target.move(jax.random.permutation(jax.random.key(1), target.points))
    for what, nu in (("", target), (", shuffled", shuffled)):
        start = time.perf_counter()
        found = mf.wasserstein(mu, nu, seconds=arguments.seconds)
        row(f"{n:,} tokens, d = 4, dim E = 2{what}", time.perf_counter() - start, found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory so far {peak:.2f} GiB")

    mu0 = mf.Uniform(3).sample(jax.random.key(0), 10**6)
    e = jnp.array([0.0, 1.0, 0.0])
    target = mu0.move(jnp.sign(mu0.points @ e)[:, None] * e)

    def to_axis():
        return jax.block_until_ready(mf.wasserstein(mu0, target))

    row("1,000,000 tokens, dim E = 1", median(alternate({"": to_axis}, 3)[""]), to_axis())


if __name__ == "__main__":
    main()
