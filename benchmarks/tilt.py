"""How many pairs of tokens does a softmax field sum in a second, beside textbook code?

    python -m benchmarks.tilt [--tokens 32768] [--dimension 3] [--beta 100] [--rounds 3]

The field of n tokens at themselves, float32: jaxmf's streamed tilt, jaxmf's dense tilt, and the
few lines one would write in NumPy and in PyTorch (`pip install torch`; left out if absent). All of
them in one process, taking turns; medians, and ratios to the streamed tilt.
"""

import argparse
import json

import jax
import numpy as np

import jaxmf as mf
from jaxmf.tilt import Dense, Streamed

from .timing import alternate, median


def textbook_numpy(x, beta):
    logits = beta * (x @ x.T)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights @ x / weights.sum(axis=1, keepdims=True)


def textbook_torch(x, beta):
    import torch

    return torch.softmax(beta * (x @ x.T), dim=1) @ x


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dimension", type=int, default=3)
    parser.add_argument("--beta", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    n, beta = arguments.tokens, arguments.beta

    mu = mf.Uniform(arguments.dimension).sample(jax.random.key(0), n)
    x = np.array(mu.points)

    def jitted(tilt):
        mean = jax.jit(lambda mu: tilt(beta * mu.points, mu).mean)
        return lambda: mean(mu).block_until_ready()

    contenders = {
        "jaxmf streamed": jitted(Streamed()),
        "jaxmf dense": jitted(Dense()),
        "NumPy textbook": lambda: textbook_numpy(x, np.float32(beta)),
    }
    versions = {"jax": jax.__version__, "numpy": np.__version__}
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed; its row is left out (pip install torch)")
    else:
        tensor = torch.from_numpy(x)
        contenders["PyTorch textbook"] = lambda: textbook_torch(tensor, beta)
        versions["torch"] = torch.__version__

    answers = {name: np.asarray(contender()) for name, contender in contenders.items()}
    truth = answers["jaxmf streamed"]
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, truth, atol=1e-4, err_msg=name)

    seconds = {
        name: median(values) for name, values in alternate(contenders, arguments.rounds).items()
    }
    fastest = seconds["jaxmf streamed"]
    print(
        f"softmax field, n = {n}, d = {arguments.dimension}, β = {beta:g}, float32, "
        f"{jax.devices()[0].device_kind}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    print(f"{'':20}{'seconds':>10}{'pairs/s':>12}{'streamed is':>14}")
    for name, s in seconds.items():
        print(f"{name:20}{s:>10.3f}{n * n / s:>12.2e}{s / fastest:>13.1f}×")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            rows = {
                name: {"seconds": s, "pairs_per_second": n * n / s} for name, s in seconds.items()
            }
            json.dump({"tokens": n, "versions": versions, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
