"""What does the derivative in β of a whole run cost, beside the run itself?

    python -m benchmarks.derivative [--tokens 65536] [--steps 200] [--method euler] [--rounds 1]

W₂ to Π♯ρ₀ after a softmax flow of independent tokens on S², float32, and its derivative in β by
`jax.jvp`, taking turns in one process; then the derivative once more in a process of its own, for
its peak memory.
"""

import argparse
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp

import jaxmf as mf

from .timing import alternate, median

METHODS = {"euler": mf.Euler, "midpoint": mf.Midpoint, "rk4": mf.RK4}


def programs(tokens: int, steps: int, method: str):
    """W₂ at the end as a function of β, compiled, and its derivative."""
    value, key_query = jnp.diag(jnp.array([2.0, 1.0, 0.5])), jnp.diag(jnp.array([0.3, 1.0, 1.0]))
    attention = mf.Attention(value=value, key_query=key_query)
    mu0 = mf.Uniform(3).sample(jax.random.key(0), tokens)
    target = mf.spectrum(attention).project(mu0)

    def distance(beta):
        field = mf.SoftmaxAttention(attention, beta)
        mu = mf.flow(field, mu0, 0.05 * steps, METHODS[method](steps=steps))
        return mf.wasserstein(mu, target).value

    plain = jax.jit(distance)
    derivative = jax.jit(lambda beta: jax.jvp(distance, (beta,), (jnp.ones_like(beta),)))
    beta = jnp.asarray(100.0)
    return (
        lambda: plain(beta).block_until_ready(),
        lambda: jax.block_until_ready(derivative(beta)),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--method", choices=METHODS, default="euler")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="only run the derivative once")
    arguments = parser.parse_args()
    n, steps, method = arguments.tokens, arguments.steps, arguments.method
    plain, derivative = programs(n, steps, method)
    if arguments.memory:
        derivative()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    contenders = {"run": plain, "derivative in β": derivative}
    seconds = {name: median(s) for name, s in alternate(contenders, arguments.rounds).items()}
    command = [sys.executable, "-m", "benchmarks.derivative", "--memory"]
    command += ["--tokens", str(n), "--steps", "1", "--method", method]
    memory = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"n = {n}, {steps} steps of {method}, float32, {jax.devices()[0].device_kind}")
    for name, s in seconds.items():
        print(f"{name:20}{s:>10.1f} s{s / seconds['run']:>8.2f}×")
    print(f"peak memory of the derivative {memory:.2f} GiB, whatever the number of steps")


if __name__ == "__main__":
    main()
