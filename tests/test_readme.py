"""What the README shows works as shown."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxmf import experiments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_examples_run():
    first, distances, optimisation, auxiliary = blocks("python")
    shown = re.search(r"# W₂ = (\S+), dW₂/dβ = (\S+)\n", first)
    scope = {}
    exec(first.replace("4096", "512"), scope)  # fewer tokens, for time
    assert float(scope["w"]) == pytest.approx(float(shown[1]), abs=0.01)
    # Differences of W₂ in β agree with the derivative the example prints.
    h = 0.01
    slope = (scope["distance"](100 + h) - scope["distance"](100 - h)) / (2 * h)
    assert float(scope["dw"]) == pytest.approx(float(slope), rel=1e-5)

    exec(distances, scope)
    found = scope["found"]
    assert found.method == "axis" and found.value.shape == (13,)
    assert np.all(scope["bound"](100.0, scope["times"]) >= found.upper)
    # At t = 0 they are one number.
    assert np.all(scope["certified"].upper >= found.value - 1e-12)

    exec(optimisation.replace("1024", "256").replace("range(30)", "range(20)"), scope)
    assert max(scope["durations"]) > 2 * scope["durations"][0]

    exec(auxiliary, scope)
    assert scope["curve"].largest_drop < 1e-14
    assert float(scope["curve"].energy[-1]) == pytest.approx(1.8473, abs=1e-4)
    assert scope["best"].energy == pytest.approx(0.411211, abs=1e-6)
    assert scope["best"].reached == 16 and scope["best"].curvature < 1e-10
    assert abs(scope["made"].certificate.gap) < 1e-14
    assert float(scope["made"].certificate.distance.upper) == pytest.approx(0.001, abs=1e-4)


def test_the_keys_shown_are_a_valid_config():
    (text,) = blocks("yaml")
    shown = experiments.load(yaml.safe_load(text))
    shipped = experiments.load(ROOT / "configs" / "concentration.yaml")
    assert shown == shipped


def test_every_file_and_name_it_mentions_exists():
    for path in re.findall(r"configs/[\w./-]+\.(?:yaml|png)", README):
        assert (ROOT / path).exists(), path
    import jaxmf

    for name in set(re.findall(r"\bmf\.(\w+)", README)):
        assert hasattr(jaxmf, name), name
