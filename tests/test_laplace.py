"""The Laplace principle and its rate, through the experiment that measures it."""

import json

import numpy as np
import pytest
import xarray as xr
from oracles import MEAN_RESULTANT, uniform_rule
from scipy import stats

from jaxmf import InputError, experiments
from jaxmf.errors import NonFiniteError
from jaxmf.experiments import laplace
from jaxmf.experiments.regression import fit_line

V, B = np.diag([2.0, 1.0, 0.5]), np.diag([0.3, 1.0, 1.0])


def small(**changes):
    """A small laplace config, as a mapping."""
    config = {
        "experiment": "laplace",
        "law": {"name": "von_mises_fisher", "mean": [1, 1, 1], "kappa": 2},
        "tokens": {"count": 65536},
        "queries": 256,
        "dimension": 3,
        "attention": {"value": {"diag": [2, 1, 0.5]}, "key_query": {"diag": [0.3, 1, 1]}},
        "beta": [50, 1, 10],
        "fit": [1, 50],
        "precision": "float64",
    }
    return config | changes


def run(config, *overrides, out=None):
    return experiments.run(experiments.load(config, overrides), out)


def test_the_uniform_law_is_measured_as_its_closed_form_says():
    data = run(small()).dataset
    np.testing.assert_array_equal(data["beta"], [1, 10, 50])
    np.testing.assert_allclose(data["discrepancy_uniform"], data["discrepancy_exact"], rtol=1e-6)
    # The closed form itself, by a rule that is exact for polynomials: A₃(κ) = coth κ − 1/κ.
    x, w = uniform_rule(3, 200)
    length = np.linalg.norm(x @ B, axis=1)
    limit = x @ B @ V.T / length[:, None]
    limit -= np.sum(limit * x, axis=1)[:, None] * x
    for beta, found in zip((1, 10, 50), data["discrepancy_exact"].values, strict=True):
        left = 1 - 1 / np.tanh(beta * length) + 1 / (beta * length)
        expected = np.sqrt(w @ (left**2 * np.sum(limit**2, axis=1)))
        np.testing.assert_allclose(found, expected, rtol=1e-3)  # 256 queries
    np.testing.assert_allclose(data["bound_shape"][0], np.sqrt(np.log(2)), rtol=1e-14)


def test_a_smooth_law_falls_like_one_over_beta_by_laplaces_method():
    """β(v_β − v_∞)(x) → P_x V(∇log ρ(û) − (d−1)û/2)/|Bᵀx| with û = Bᵀx/|Bᵀx|."""
    config = small(beta=[125, 250, 500], fit=[125, 500], tokens={"count": 65536})
    result = run(config)
    x, w = uniform_rule(3, 100)
    mean = np.ones(3) / np.sqrt(3)
    w = w * np.exp(2 * x @ mean)
    length = np.linalg.norm(x @ B, axis=1)[:, None]
    u = x @ B / length
    slope = 2 * (mean - (u @ mean)[:, None] * u)  # ∇log ρ on the sphere
    error = (slope - u) @ V.T / length
    error -= np.sum(error * x, axis=1)[:, None] * x
    expected = np.sqrt(np.average(np.sum(error**2, axis=1), weights=w))
    scaled = result.dataset["discrepancy"] * result.dataset["beta"]
    # What is left is O(1/β): extrapolated from the two largest β.
    np.testing.assert_allclose(2 * scaled[2] - scaled[1], expected, rtol=2e-3)
    assert result.summary["slope_low"] <= result.summary["slope"] <= result.summary["slope_high"]
    np.testing.assert_allclose(result.summary["slope"], -1, atol=0.05)
    np.testing.assert_allclose(result.summary["slope_uniform"], -1, atol=1e-3)


def test_a_run_writes_its_files(tmp_path):
    result = run(small(), out=tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.yaml", "result.nc", "summary.json", "laplace.png"}
    with xr.open_dataset(tmp_path / "out" / "result.nc", engine="h5netcdf") as found:
        xr.testing.assert_identical(found.load(), result.dataset)
        assert all(v.attrs["units"] and v.attrs["long_name"] for v in found.data_vars.values())
        assert found["discrepancy"].attrs["slope"] == result.summary["slope"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["uniform_error"] < 1e-6 and summary["queries"] == 256
    (ax,) = laplace.figures(result.dataset)["laplace"].axes
    assert ax.get_xscale() == ax.get_yscale() == "log"
    lines = {line.get_label(): line for line in ax.lines}
    for label, name in (
        ("von Mises–Fisher law, measured", "discrepancy"),
        ("uniform law, measured", "discrepancy_uniform"),
        ("uniform law, closed form", "discrepancy_exact"),
    ):
        np.testing.assert_array_equal(lines[label].get_ydata(), result.dataset[name])


def test_samples_do_where_quadrature_is_not_known():
    attention = {"value": {"diag": [2, 1, 1, 1, 1]}, "key_query": "identity"}
    law = {"name": "uniform"}
    config = small(dimension=5, attention=attention, law=law, beta=[1, 2, 4], fit=[1, 4])
    config["tokens"] = {"count": 20000, "placement": "sample"}
    data = run(config).dataset
    np.testing.assert_allclose(data["discrepancy"], data["discrepancy_exact"], rtol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fit=[20, 200]", "config key fit: 1 of the β lie between 20 and 200"),
        ("fit=[50]", "config key fit must have at least 2"),
        ("attention.key_query={diag: [0, 1, 1]}", "attention: the zero-temperature field needs B"),
        ("tokens.count=9", "config key tokens: 9 quadrature nodes do not resolve the law"),
        ("queres=9", "queres is unknown; did you mean queries"),
        ("law={name: file, path: t.npy}", "config key law: given tokens have no density"),
    ],
)
def test_bad_configs(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("t.npy", np.eye(3))
    with pytest.raises(InputError, match=message):
        run(small(), *([change] if "9 quad" not in message else [change, "law.kappa=40"]))


def test_what_is_not_finite_is_reported():
    change = "attention.value={diag: [3e38, 1, 1]}", "precision=float32"
    with pytest.raises(NonFiniteError, match="the discrepancy is not finite at beta = 1;"):
        run(small(), *change)


@pytest.mark.parametrize(("d", "kappa"), MEAN_RESULTANT)
def test_mean_resultant(d, kappa):
    found = laplace.mean_resultant(d, np.array([kappa]))
    np.testing.assert_allclose(found, MEAN_RESULTANT[d, kappa], rtol=1e-12)
    # Far below d both Bessel functions underflow.
    np.testing.assert_allclose(laplace.mean_resultant(384, np.array([1e-3])), 1e-3 / 384)


def test_a_line_and_its_interval(rng):
    x = np.linspace(0, 3, 7)
    line = fit_line(x, 2 - 3 * x)
    np.testing.assert_allclose(line, (-3, 2, -3, -3), atol=1e-12)
    # The interval from the textbook: s² = Σr²/(n−2), half-width t·s/√Σ(x−x̄)².
    y = 2 - 3 * x + rng.normal(size=7)
    line = fit_line(x, y)
    slope, intercept = np.polyfit(x, y, 1)
    s = np.sqrt(np.sum((y - slope * x - intercept) ** 2) / 5)
    half = stats.t.ppf(0.975, 5) * s / np.sqrt(np.sum((x - x.mean()) ** 2))
    np.testing.assert_allclose(line, (slope, intercept, slope - half, slope + half))
    # What is not finite is left out, and what cannot be known is not a number.
    assert fit_line(np.append(x, 9), np.append(y, np.nan)) == line
    assert np.isnan(fit_line(x[:2], y[:2]).low) and np.isfinite(fit_line(x[:2], y[:2]).slope)
    assert np.isnan(fit_line(x[:1], y[:1]).slope)
