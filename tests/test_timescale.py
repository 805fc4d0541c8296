"""The experiment on how long concentration lasts."""

import json

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from jaxmf import ConcentrationBound, InputError, experiments

CONFIG = {
    "experiment": "timescale",
    "law": {"name": "von_mises_fisher", "mean": [0.6, 0.8], "kappa": 1},
    "tokens": {"count": 256, "placement": "graded"},
    "dimension": 2,
    "attention": {"value": {"diag": [2, 1]}, "key_query": {"diag": [0.3, 1]}},
    "beta": [200, 50, 100],
    "tolerance": 0.5,
    "time": {"end": 12, "steps": 60, "save": 60},
    "precision": "float64",
}


def run(**changes):
    return experiments.run(experiments.load(CONFIG | changes))


@pytest.fixture(scope="module")
def result():
    return run()


def test_windows_are_those_of_the_measured_curves(result):
    data, summary = result
    assert list(data["beta"]) == [50, 100, 200]
    t = data["time"].values
    for i in range(3):
        w2 = data["w2"].values[i]
        inside = np.flatnonzero(w2 <= 0.5)
        entry, exit = float(data["entry_time"][i]), float(data["exit_time"][i])
        assert t[inside[0] - 1] < entry <= t[inside[0]]
        assert t[inside[-1]] <= exit < t[inside[-1] + 1]
        # The interpolated curve is at the tolerance there.
        np.testing.assert_allclose(np.interp([entry, exit], t, w2), 0.5, atol=1e-6)
    # Later with β, as the theorem says; the beginning hardly moves.
    assert np.all(np.diff(data["exit_time"]) > 1) and np.ptp(data["entry_time"].values) < 0.1
    line = stats.linregress(np.log(data["beta"]), data["exit_time"])
    half = stats.t.ppf(0.975, 1) * line.stderr
    np.testing.assert_allclose(summary["slope"], line.slope)
    np.testing.assert_allclose(summary["slope_low"], line.slope - half)
    np.testing.assert_allclose(summary["slope_high"], line.slope + half)
    assert summary["never_entered"] == summary["not_left_by_the_end"] == 0


def test_the_bound_is_above_every_point_and_its_window_inside(result):
    data, summary = result
    assert np.all(data["bound"] >= data["w2_upper"])
    constants = (summary[f"bound_{name}"] for name in ("K1", "C1", "K2", "c"))
    bound = ConcentrationBound(*constants)
    expected = bound(data["beta"].values[:, None], data["time"].values)
    np.testing.assert_allclose(data["bound"], expected, rtol=1e-12)
    np.testing.assert_allclose((data["bound"] / data["w2"]).mean(), summary["bound_mean_ratio"])
    for i in np.flatnonzero(np.isfinite(data["bound_exit_time"])):
        assert data["entry_time"][i] <= data["bound_entry_time"][i]
        assert data["bound_exit_time"][i] <= data["exit_time"][i]


def test_the_exit_has_converged_in_the_number_of_nodes(result):
    """Equispaced nodes would be an hour off here, in the time of the flow: 12 % at this count."""
    finer = run(tokens={"count": 512, "placement": "graded"}).dataset
    np.testing.assert_allclose(finer["exit_time"], result.dataset["exit_time"], atol=0.03)


def test_what_is_not_seen_is_counted(result):
    summary = run(tolerance=0.2, time={"end": 6, "steps": 30, "save": 30}).summary
    assert summary["never_entered"] == 2 and summary["not_left_by_the_end"] == 1
    assert np.isnan(summary["slope"])


def test_writes_everything_and_draws(tmp_path, result):
    out = tmp_path / "run"
    experiments.run(experiments.load(CONFIG), out)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.yaml", "result.nc", "summary.json", "timescale.png"}
    kept = xr.load_dataset(out / "result.nc")
    np.testing.assert_array_equal(kept["exit_time"], result.dataset["exit_time"])
    summary = json.loads((out / "summary.json").read_text())
    assert {"slope", "slope_low", "slope_high", "entry_time", "exit_time"} <= set(summary)


def test_interrupted_runs_keep_what_is_finished():
    class Stop(experiments.runner.Silent):
        kept = None

        def keep(self, result):
            self.kept = result.dataset.copy(deep=True)
            if np.sum(np.isfinite(self.kept["exit_time"])) == 2:
                raise KeyboardInterrupt

    monitor = Stop()
    with pytest.raises(KeyboardInterrupt):
        experiments.run(experiments.load(CONFIG), monitor=monitor)
    assert np.all(np.isfinite(monitor.kept["w2"][:2])) and np.all(np.isnan(monitor.kept["w2"][2]))
    known = monitor.kept["w2"].notnull()
    assert np.all((monitor.kept["bound"] >= monitor.kept["w2"]).where(known, True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": [10, 10, 20]}, "config key beta has 2 different values"),
        ({"tolerance": 0}, "config key tolerance must be greater than 0"),
        ({"tokens": {"count": 10, "placement": "graded"}}, "tokens: count is 10; .* of four"),
        (
            {
                "dimension": 3,
                "law": {"name": "uniform"},
                "attention": {"value": {"diag": [2, 1, 1]}, "key_query": "identity"},
            },
            "graded nodes are for concentration on the circle",
        ),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(InputError, match=message):
        run(**changes)
