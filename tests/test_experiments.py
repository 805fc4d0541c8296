"""Experiments through their configs: the files they write, the numbers, and what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
import yaml
from checkpoints import LAYERS, TEXT, random_tensors, write

from jaxmf import InputError, Uniform, experiments
from jaxmf.errors import NonFiniteError

CONFIGS = Path(__file__).parent.parent / "configs"


def concentration(**changes):
    """A small concentration config, as a mapping."""
    config = {
        "experiment": "concentration",
        "law": {"name": "uniform"},
        "tokens": {"count": 200, "placement": "quadrature"},
        "dimension": 3,
        "attention": {"value": {"diag": [2, 1, 0.5]}, "key_query": {"diag": [0.3, 1, 1]}},
        "beta": [5, 50],
        "time": {"end": 2, "steps": 20, "save": 10},
        "precision": "float64",
    }
    return config | changes


def run(config, *overrides, out=None):
    return experiments.run(experiments.load(config, overrides), out)


# What a run leaves behind


def test_a_run_writes_a_labelled_dataset_a_summary_a_config_and_figures(tmp_path):
    out = tmp_path / "new" / "folder"
    result = run(concentration(), out=out)
    names = {path.name for path in out.iterdir()}
    expected = {"config.yaml", "result.nc", "summary.json", "concentration.png", "overlaps.png"}
    assert names == expected
    with xr.open_dataset(out / "result.nc", engine="h5netcdf") as found:
        xr.testing.assert_identical(found.load(), result.dataset)
        assert found["w2"].dims == ("beta", "time")
        assert found["w2_coupling"].dims == ("beta", "time")
        assert found["w2_zero_temperature"].dims == ("time",)
        assert found["overlap_m"].dims == ("beta", "time", "eigenspace")
        assert found["overlap_v"].dims == ("beta", "time", "eigenspace")
        np.testing.assert_array_equal(found["beta"], [5, 50])
        np.testing.assert_allclose(found["time"], np.linspace(0, 2, 11))
        np.testing.assert_allclose(found["eigenvalue_m"], [1, 0.6, 0.5])
        np.testing.assert_allclose(found["eigenvalue_v"], [2, 1, 0.5])
        assert all(v.attrs["units"] and v.attrs["long_name"] for v in found.data_vars.values())
    summary = json.loads((out / "summary.json").read_text())
    np.testing.assert_allclose(summary["w2_min"], result.dataset["w2"].min("time"))
    assert summary["beta"] == [5, 50]
    assert summary["gap"] == pytest.approx(0.4)
    assert summary["rate_predicted"] == pytest.approx(0.2)
    assert summary["w2_min_time"] == [2, 2]
    assert summary["wall_seconds"] > summary["compile_seconds"] > 0


def test_the_written_config_reproduces_the_run_bit_for_bit(tmp_path):
    config = concentration(
        law={"name": "von_mises_fisher", "mean": [1, 2, 2], "kappa": 3},
        tokens={"count": 50, "placement": "sample"},
        seed=7,
    )
    first = run(config, out=tmp_path / "a").dataset
    written = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert written["provenance"]["packages"]["jax"] == jax.__version__
    assert written["provenance"]["device"].startswith("cpu")
    assert written["seed"] == 7
    again = run(tmp_path / "a" / "config.yaml", out=tmp_path / "b").dataset
    xr.testing.assert_identical(first, again)
    other = run(config, "seed=8").dataset
    assert not np.allclose(first["w2"], other["w2"])


def test_float32_and_float64_differ_by_rounding():
    single, double = (
        run(concentration(), f"precision={precision}").dataset
        for precision in ("float32", "float64")
    )
    assert single["w2"].dtype == np.float32 and double["w2"].dtype == np.float64
    # 20 RK4 steps of a field with logits up to 50, each off by 50 units of rounding.
    np.testing.assert_allclose(single["w2"], double["w2"], rtol=2e-5)


# The numbers


def test_concentration_on_the_sphere():
    """S², V = diag(2, 1, ½), B = diag(.3, 1, 1): values from 16,384 nodes, each ± 0.004."""
    config = concentration(
        tokens={"count": 4096},
        beta=[100, 500],
        time={"end": 6, "steps": 60, "save": 3},
        precision="float32",
    )
    w2 = run(config).dataset["w2"]
    np.testing.assert_allclose(w2.sel(beta=100)[1:], [0.678, 0.378, 0.184], atol=0.004)
    np.testing.assert_allclose(w2.sel(beta=500)[1:], [0.689, 0.412, 0.227], atol=0.004)
    # The uniform law on S² and a pole: W₂² = 2 − 2E|⟨x, e⟩| = 1.
    np.testing.assert_allclose(w2[:, 0], 1, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"law": {"name": "von_mises_fisher", "mean": [0, 1, 1], "kappa": 4}},
        {"tokens": {"count": 77, "placement": "sample"}},
        {"time": {"end": 2, "steps": 20, "save": 5, "method": "adaptive", "rtol": 1e-8}},
        {"time": {"end": 2, "steps": 20, "save": 5, "method": "euler"}},
        {
            "dimension": 4,
            "law": {
                "name": "mixture",
                "components": [
                    {"name": "uniform"},
                    {"name": "von_mises_fisher", "mean": [0, 0, 0, 1], "kappa": 9},
                ],
                "weights": [1, 3],
            },
            "tokens": {"count": 60, "placement": "sample"},
            "attention": {
                "value": {"diag": [3, 3, 1, 0.5]},  # dim E = 2: an assignment problem
                "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
                "key": "identity",
            },
        },
    ],
    ids=["quadrature", "weighted", "sample", "adaptive", "euler", "dim E = 2"],
)
def test_distances_and_overlaps_are_consistent(changes):
    data = run(concentration(**changes)).dataset
    assert np.all(np.isfinite(data["w2"])) and np.all(data["w2"] > 0)
    assert np.all(data["w2"] <= data["w2_coupling"] + 1e-12)
    for name in ("overlap_m", "overlap_v"):
        np.testing.assert_allclose(data[name].sum("eigenspace"), 1, atol=1e-12)
    # Concentration: the mass of E grows while the limit is followed.
    assert np.all(data["overlap_m"][:, -1, 0] > data["overlap_m"][:, 0, 0])
    if data.sizes["token"] < 200:
        return  # so few independent tokens hide the limit
    # Lower temperature stays closer to the limit.
    error = np.abs(data["w2"] - data["w2_zero_temperature"]).max("time")
    assert error.sel(beta=50) < error.sel(beta=5)
    assert data["w2"].attrs["method"] in ("axis", "assignment")


def test_a_distance_is_never_reported_without_its_ends():
    config = concentration(
        dimension=2,
        tokens={"count": 1100},
        attention={"value": {"diag": [1, 0.5]}, "key_query": "identity"},
        time={"end": 1, "steps": 2, "save": 1},
    )
    exact = run(config).dataset
    assert exact["w2"].attrs["method"] == "axis"
    for name in ("w2", "w2_zero_temperature"):
        for end in ("lower", "upper"):
            np.testing.assert_array_equal(exact[f"{name}_{end}"], exact[name])
    angle = run(config | {"distance": {"cost": "geodesic"}}).dataset
    assert np.all(angle["w2"] > exact["w2"]) and np.all(angle["w2"] < np.pi / 2 * exact["w2"])
    assert "angle" in angle["w2"].attrs["units"]
    # dim E = 2 in d = 3 and weights that are not equal.
    config |= {
        "dimension": 3,
        "law": {"name": "von_mises_fisher", "mean": [1, 0, 1], "kappa": 1},
        "tokens": {"count": 300},
        "attention": {"value": {"diag": [1, 1, 0.5]}, "key_query": "identity"},
        "distance": {"width": 0.1},
        "beta": 5,
    }
    found = run(config)
    data = found.dataset
    assert data["w2"].attrs["method"] == "interval"
    for name in ("w2", "w2_zero_temperature"):
        lower, value, upper = (data[f"{name}{end}"] for end in ("_lower", "", "_upper"))
        assert np.all(lower < value) and np.all(value < upper) and np.all(lower >= 0.9 * upper)
    assert 0 < found.summary["w2_widest"] <= 0.1 and found.summary["w2_wider_than_asked"] == 0
    # A width that no time budget reaches is not reached, and that is said. (At the start it may be:
    # every token is coupled to the nearest point of E, which is optimal and proved so at once.)
    hurried = run(config | {"distance": {"width": 1e-9, "seconds": 0.01}})
    assert 1 <= hurried.summary["w2_wider_than_asked"] <= hurried.dataset["w2"].size
    assert np.all(hurried.dataset["w2_lower"] <= data["w2_upper"])
    np.testing.assert_allclose(
        found.summary["w2_widest"], (1 - data.w2_lower / data.w2_upper).max()
    )
    assert np.all(data["w2_upper"] <= data["w2_coupling"] + 1e-6)


def test_token_files(tmp_path):
    mu = Uniform(3).sample(jax.random.key(0), 30)
    weights = np.linspace(1, 2, 30)
    points = np.asarray(mu.points)
    np.savez(tmp_path / "tokens.npz", points=7 * points, weights=weights, labels=np.arange(30))
    np.save(tmp_path / "twice.npy", np.concatenate([points, points]))
    np.save(tmp_path / "once.npy", points)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(concentration(tokens={})))

    def of(name):
        law = f"law={{name: file, path: {name}}}"  # relative to the config
        return run(tmp_path / "config.yaml", law).dataset

    np.testing.assert_allclose(of("tokens.npz")["weight"], weights / weights.sum())
    # Splitting every token into two halves changes nothing.
    np.testing.assert_allclose(of("once.npy")["w2"], of("twice.npy")["w2"], rtol=1e-12)
    assert not np.allclose(of("once.npy")["w2"], of("tokens.npz")["w2"])


# What goes wrong

BAD = {
    "tokns: {count: 5}": "config key tokns is unknown; did you mean tokens?",
    "tokens.cuont: 5": "config key tokens.cuont is unknown; did you mean count?",
    "law.kappa: 5": "config key law.kappa is unknown",
    "experiment: concentratoin": "experiment is 'concentratoin'; it must be one of: collapse",
    "tokens.count: many": "tokens.count must be a valid integer, not 'many'",
    "tokens.count: 1.5": "tokens.count must be a valid integer",
    "tokens.count: 0": "tokens.count must be greater than or equal to 1, not 0",
    "tokens: {}": "tokens.count is missing",
    "tokens.placement: lattice": "tokens.placement must be 'quadrature', 'graded' or 'sample'",
    "beta: -1": r"beta\[0\] must be greater than 0, not -1",
    "beta: [10, 0]": r"beta\[1\] must be greater than 0, not 0",
    "beta: []": "beta must have at least 1 item",
    "beta: hot": r"beta\[0\] must be a valid number, not 'hot'",
    "beta: [.inf]": r"beta\[0\]: it must be finite",
    "beta: [true]": r"beta\[0\] must be a valid number",
    "time.steps: 0": "time.steps must be greater than or equal to 1, not 0",
    "time.steps: 15": "time: steps = 15 is not a multiple of save = 10; 10 or 20 would be",
    "time.end: -1": "time.end must be greater than 0",
    "time.method: rk5": "time.method must be 'euler', 'midpoint', 'rk4' or 'adaptive', not 'rk5'",
    "time: 3": "time must hold keys and values, not 3",
    "dimension: 1": "dimension must be greater than or equal to 2, not 1",
    "dimension: 2": r"attention.value has shape 3 × 3; it must be square, 2 × 2 \(dimension = 2\)",
    "attention.value: [[1, 2, 3], [4, 5, 6]]": "attention.value has shape 2 × 3; it must be square",
    "attention.value: [[1, 2], [3]]": r"value: it has rows of different lengths, \[2, 1\]",
    "attention.value: [[1, .nan, 0], [0, 1, 0], [0, 0, 1]]": "attention.value: .* not finite",
    "attention.value: {diagonal: [1, 2, 3]}": "attention.value: it must be a matrix",
    "attention.key_query: {diag: [1, 2]}": "attention.key_query has shape 2 × 2",
    "attention.query: identity": "attention: it needs key_query .* or query and key",
    "attention: {value: identity, query: identity, key: [[1, 0]]}": "attention.key has shape 1 × 2",
    "attention.key_query: {diag: [0, 1, 1]}": "needs B = QᵀK invertible, but its rank is 2 of 3",
    "attention: {value: identity, key_query: identity}": "its gap is zero",
    "law.name: gauss": "law.name must be one of: file, mixture, uniform, von_mises_fisher",
    "law: {name: von_mises_fisher, mean: [0, 0, 0], kappa: 1}": "mean is .* not zero",
    "law: {name: von_mises_fisher, mean: [0, 1], kappa: 1}": "law is of dimension 2, but",
    "law: {name: von_mises_fisher, mean: [0, 0, 1], kappa: -1}": "law.kappa must be greater than",
    "law: {name: von_mises_fisher, mean: [0, 0, 1], kappa: 1.0e+6}": "do not resolve the law",
    "law: {name: file, path: nowhere.npy}": "token file nowhere.npy does not exist",
    "precision: float16": "precision must be 'float32' or 'float64'",
    "seed: -1": "seed must be greater than or equal to 0",
}


@pytest.mark.parametrize("change", BAD)
def test_a_bad_config_is_refused_in_one_sentence(change, tmp_path):
    key, _, value = change.partition(": ")
    with pytest.raises(InputError, match=BAD[change]) as caught:
        run(concentration(), f"{key}={value}", out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_quadrature_needs_the_circle_or_the_sphere():
    attention = {"value": {"diag": [2, 1, 1, 1, 1]}, "key_query": "identity"}
    with pytest.raises(InputError, match="not for d = 5; sample instead"):
        run(concentration(dimension=5, attention=attention))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.ones((4, 2)), "law is of dimension 2, but dimension = 3"),
        (np.ones(4), r"has shape \(4,\); it must be \(n, d\)"),
        (np.array([[1, 2, 3], [1, np.nan, 0]]), "row 1 is not finite"),
        (np.array([[1, 2, 3], [0, 0, 0], [1, 1, 1]]), "row 1 is zero"),
        (np.array([["a", "b"]]), "holds <U1, not real numbers"),
        (np.zeros((0, 3)), r"has shape \(0, 3\)"),
    ],
)
def test_bad_token_files(points, message, tmp_path):
    np.save(tmp_path / "tokens.npy", points)
    law = {"name": "file", "path": str(tmp_path / "tokens.npy")}
    with pytest.raises(InputError, match=message):
        run(concentration(law=law, tokens={}))


def test_more_bad_token_files(tmp_path):
    def refused(name, message, **tokens):
        law = {"name": "file", "path": str(tmp_path / name)}
        with pytest.raises(InputError, match=message):
            run(concentration(law=law, tokens=tokens))

    (tmp_path / "text.npy").write_text("1, 2, 3")
    refused("text.npy", "is not a .npy or .npz file of numbers")
    np.savez(tmp_path / "names.npz", x=np.eye(3))
    refused("names.npz", r"has no array `points` \(it has x\)")
    np.savez(tmp_path / "weights.npz", points=np.eye(3), weights=[1, -1, 1])
    refused("weights.npz", "weights must be 3 numbers ≥ 0")
    np.save(tmp_path / "three.npy", np.array([[1, 1, 1], [1, 2, 3], [1, -1, 2]]))
    refused("three.npy", "its quadrature has 3 nodes, not 4", count=4)


def test_bad_folders(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for out, message in (
        (tmp_path / "full", "is not empty; give a new or an empty folder"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "cannot be written"),
        (Path("/proc/jaxmf"), "cannot be written"),
    ):
        with pytest.raises(InputError, match=message):
            run(concentration(), out=out)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_bad_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    for text, message in (
        ("beta: [1, 2", "is not valid YAML, line"),
        ("- a list", "must hold keys and values"),
        ("beta: 1\nbeta: 2", "config key beta is given twice"),
        ("law: {name: uniform}", "config key experiment is missing"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            experiments.load(path)
    with pytest.raises(InputError, match="does not exist"):
        experiments.load(tmp_path / "other.yaml")
    for override, message in (
        ("beta", "it must be key=value"),
        ("beta.x=3", "which has no keys"),
        ("beta=[1", "is not valid YAML"),
    ):
        with pytest.raises(InputError, match=message):
            experiments.load(concentration(), [override])


def test_numbers_are_read_as_people_write_them(tmp_path):
    text = yaml.safe_dump(concentration()).replace("end: 2", "end: 2e-1")
    (tmp_path / "config.yaml").write_text(text)
    config = experiments.load(tmp_path / "config.yaml", ["beta=[1e-3, 1e6]"])
    assert config.time.end == 0.2 and config.beta == [1e-3, 1e6]


def test_a_run_that_stops_being_finite_says_where_and_keeps_what_was_saved(tmp_path):
    # At zero temperature V x overflows at once; nothing but the start is known.
    config = experiments.load(concentration(), ["attention.value={diag: [1e38, 1, 0.5]}"])
    config = config.model_copy(update={"precision": "float32"})
    message = r"stopped being finite before time 0\.2 at zero temperature; 1 of 11 saved times"
    with pytest.raises(NonFiniteError, match=message):
        experiments.run(config, tmp_path / "out")
    with xr.open_dataset(tmp_path / "out" / "result.nc", engine="h5netcdf") as kept:
        assert np.isfinite(kept["w2_zero_temperature"][0])
        assert np.all(np.isnan(kept["w2"]))
    assert (tmp_path / "out" / "summary.json").exists()


def test_a_killed_run_keeps_what_was_finished(tmp_path):
    config = concentration(beta=[1, 2, 3], tokens={"count": 3000}, precision="float32")
    config["time"] = {"end": 20, "steps": 400, "save": 400}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "jaxmf", "run", "config.yaml", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        result = tmp_path / "out" / "result.nc"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            time.sleep(0.1)
            # The file is only ever replaced whole, so it can be read while the run goes on.
            if result.exists():
                with xr.open_dataset(result, engine="h5netcdf") as seen:
                    if np.all(np.isfinite(seen["w2"][0])):
                        break
        os.kill(process.pid, signal.SIGKILL)
    with xr.open_dataset(result, engine="h5netcdf") as kept:
        assert np.all(np.isfinite(kept["w2"][0])) and np.any(np.isnan(kept["w2"][2]))


# Figures


def test_figures_show_the_data():
    data = run(concentration()).dataset
    figures = experiments.config.module("concentration").figures(data)
    (ax,) = figures["concentration"].axes
    lines = {line.get_label(): line for line in ax.lines}
    for beta in (5, 50):
        np.testing.assert_array_equal(lines[f"β = {beta}"].get_ydata(), data["w2"].sel(beta=beta))
    assert "predicted rate 0.2" in lines
    assert ax.get_yscale() == "log" and ax.get_xlabel() and ax.get_ylabel()
    assert len(figures["overlaps"].axes) == 4


# Real models


def test_pretrained_runs_real_layers(tmp_path):
    checkpoint = write(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    config = {
        "experiment": "pretrained",
        "checkpoint": "model",
        "text": "text.txt",
        "layers": [0, LAYERS - 1],
        "heads": [1, "sum"],
        "time": {"end": 1, "steps": 10, "save": 5},
        "precision": "float64",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = run(tmp_path / "config.yaml", out=tmp_path / "out")
    data = result.dataset
    assert data["overlap_m"].dims == ("layer", "head", "time", "eigenspace")
    assert list(data["head"].values) == ["1", "sum"]
    assert list(data["string"].values)[:2] == ["[CLS]", "all"]
    for name in ("overlap_m", "overlap_v"):
        np.testing.assert_allclose(data[name].sum("eigenspace"), 1, atol=1e-12)
    np.testing.assert_allclose(data["beta"], data["radius"] ** 2)
    width = float(data["cosine"][1] - data["cosine"][0])
    np.testing.assert_allclose(data["cosine_density"].sum("cosine") * width, 1, atol=1e-12)
    # The mean cosine of two different tokens, from the resultant length and from the histogram.
    n = data.sizes["token"]
    mean = (data["resultant_length"] ** 2 * n - 1) / (n - 1)
    binned = (data["cosine_density"] * data["cosine"]).sum("cosine") * width
    np.testing.assert_allclose(binned, mean, atol=width / 2)
    # Both layers start from their own hidden states, and a small time step follows the field.
    from jaxmf import load_checkpoint

    mu, radius, _ = load_checkpoint(checkpoint).tokens(TEXT, LAYERS - 1)
    initial = data["tokens_initial"].sel(layer=LAYERS - 1)
    np.testing.assert_allclose(initial, np.asarray(mu.points, np.float64), atol=1e-6)
    assert float(data["radius"].sel(layer=LAYERS - 1)) == pytest.approx(radius, rel=1e-6)
    assert "A1 fails" in result.summary["runs"][0]["assumptions"]
    assert {"overlaps.png", "cosines.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_pretrained_runs_heads_with_equal_eigenvalues(tmp_path):
    """A head whose values are zero: M = V = 0, one eigenspace, yet as many eigenvectors as ever."""
    tensors = random_tensors()
    tensors["encoder.layer.0.attention.self.value.weight"] *= 0
    write(tmp_path / "model", tensors)
    (tmp_path / "text.txt").write_text(TEXT)
    config = {
        "experiment": "pretrained",
        "checkpoint": "model",
        "text": "text.txt",
        "layers": [0, 1],
        "heads": [0, "sum"],
        "time": {"end": 1, "steps": 2, "save": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    data = run(tmp_path / "config.yaml").dataset
    still = data.sel(layer=0, head="0")
    np.testing.assert_array_equal(still["eigenvalue_m"], 0)
    np.testing.assert_allclose(data["overlap_m"].sum("eigenspace"), 1, atol=1e-5)
    assert np.all(np.isfinite(data["overlap_v"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layers=[0, 9]", f"config key layers asks for 9; model has 0 to {LAYERS - 1}"),
        ("heads=[3]", "config key heads asks for 3"),
        ("heads=[all]", "config key heads"),
        ("text=nowhere.txt", "config key text: the file nowhere.txt does not exist"),
        ("checkpoint=no-such-model", "no-such-model is no file, folder or installed package"),
        ("tokens.count=2", "count is 2; it must be at least 3"),
    ],
)
def test_bad_pretrained_configs(change, message, tmp_path):
    write(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    config = {
        "experiment": "pretrained",
        "checkpoint": "model",
        "text": "text.txt",
        "layers": 0,
        "time": {"end": 1, "steps": 2, "save": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match=message):
        run(tmp_path / "config.yaml", change, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_shipped_config_is_valid():
    for path in CONFIGS.glob("*.yaml"):
        config = experiments.load(path)
        assert config.experiment in experiments.config.EXPERIMENTS
