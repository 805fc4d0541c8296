"""The terminal phase: the family of random weights, what is counted, and runs with a known end."""

import json

import numpy as np
import pytest
import xarray as xr
from oracles import rotation, sphere_points
from scipy.stats import beta as beta_law

from jaxmf import InputError, Measure, experiments
from jaxmf.errors import NonFiniteError
from jaxmf.experiments import terminal
from jaxmf.experiments.runner import Monitor, Silent


def small(**changes):
    """A small terminal config, as a mapping."""
    config = {
        "experiment": "terminal",
        "law": {"name": "uniform"},
        "tokens": {"count": 32, "placement": "sample"},
        "dimension": 3,
        "runs": 3,
        "beta": 20,
        "time": {"end": 2, "steps": 10, "save": 5},
        "precision": "float64",
        "chunk": 4,
    }
    return config | changes


def run(config, *overrides, out=None):
    return experiments.run(experiments.load(config, overrides), out)


# The family


@pytest.mark.parametrize("family", ["general", "commuting"])
def test_draws_satisfy_assumption_1_and_their_spectra_are_true(family):
    config = experiments.load(small(runs=20, family=family, dimension=4))
    draws, _ = terminal.draw_family(config)
    assert len(draws) == 40
    for i, draw in enumerate(draws):
        v, b = draw.value, draw.key_query
        m = v @ b.T
        np.testing.assert_allclose(m, m.T, atol=1e-12)
        size = np.linalg.eigvalsh(b) * (-1) ** i
        assert np.all((size >= 0.3 - 1e-12) & (size <= 1 + 1e-12))
        for matrix, values, vectors in (
            (v, draw.value_eigenvalues, draw.value_vectors),
            (m, draw.interaction_eigenvalues, draw.interaction_vectors),
        ):
            assert np.all(np.diff(values) < 0)
            np.testing.assert_allclose(matrix @ vectors, vectors * values, atol=1e-12)
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=0), 1, rtol=1e-12)
        assert np.allclose(v, v.T, atol=1e-12) == (family == "commuting")
        gaps = -np.diff(draw.value_eigenvalues)
        assert gaps.min() > 0.1 * np.abs(draw.value_eigenvalues).max()
        expected = 0 if i % 2 == 0 else np.argmax(np.abs(draw.value_eigenvalues))
        assert draw.conjectured == expected


def test_draws_without_a_gap_are_counted_or_refused():
    _, redrawn = terminal.draw_family(experiments.load(small(runs=20, gap=0.3)))
    assert redrawn > 20
    with pytest.raises(InputError, match=r"config key gap: hardly any draw has .* apart by 1\.9"):
        run(small(gap=1.9))


# What is counted


def test_outcomes_of_tokens_at_eigenvectors():
    """Planted ends: at the conjectured eigenvector, at another, at two of them, and on the move."""
    near = [0.995, 0.2, 0.1]  # eigenvectors need not be orthogonal: masses need not sum to one
    mass = np.array([near, near, [0.5, 0.5, 0.3], near, [0.989, 0.1, 0.1], near])
    conjectured = np.array([0, 2, 0, 0, 0, 1])
    speed = np.array([1e-6, 1e-6, 1e-6, 1e-2, 1e-6, np.nan])
    found = terminal.classify(mass, conjectured, speed, 0.99, 1e-4)
    names = [terminal.OUTCOMES[code] for code in found]
    assert names == ["dominant", "other", "several", "unsettled", "several", "unsettled"]


# Runs with a known end


def planted(points, draws, **changes):
    """A run with these tokens and these weights in place of random ones."""
    config = small(
        runs=len(draws) // 2, tokens={"count": len(points), "placement": "quadrature"}, **changes
    )
    prepared = terminal.prepare(experiments.load(config))
    mu = Measure(points)
    prepared = prepared._replace(
        measure=mu, points=np.broadcast_to(points, (len(draws), *points.shape)), draws=draws
    )
    return terminal.run(prepared, Silent()).dataset


def diagonal(b, m, sign):
    return terminal.compose(np.eye(3), np.array(b), np.eye(3), np.array(m), sign)


@pytest.fixture(scope="module")
def known_ends():
    """Tokens from the uniform law: V = diag(1, ½, −½), and V = diag(½, −⅕, −1), for B = ±1."""
    rng = np.random.default_rng(4)
    v, w = np.array([1.0, 0.5, -0.5]), np.array([0.5, -0.2, -1.0])
    draws = [diagonal([1, 1, 1], s * m, s) for m in (v, w) for s in (1, -1)]
    time = {"end": 60, "steps": 300, "save": 10}
    return planted(sphere_points(rng, 64, 3), draws, time=time)


def test_tokens_that_attend_to_themselves_end_along_the_largest_eigenvalue(known_ends):
    data = known_ends.sel(sign="positive")
    np.testing.assert_array_equal(data["conjectured"], 0)
    np.testing.assert_array_equal(data["outcome"], 0)
    np.testing.assert_allclose(data["overlap_v"][:, -1], [[1, 0, 0]] * 2, atol=1e-6)
    np.testing.assert_array_equal(data["clusters_up_to_sign"], 1)
    np.testing.assert_allclose(data["attending"], 1, atol=1e-6)


def test_tokens_that_attend_to_their_antipodes_end_along_the_largest_magnitude(known_ends):
    data = known_ends.sel(sign="negative")
    np.testing.assert_array_equal(data["conjectured"], [0, 2])
    np.testing.assert_array_equal(data["outcome"], 0)
    np.testing.assert_allclose(data["overlap_v"][:, -1], [[1, 0, 0], [0, 0, 1]], atol=1e-6)
    # One cluster follows V; a pair of antipodal ones, each attending to the other, follows −V.
    np.testing.assert_array_equal(data["clusters"], [1, 2])
    # E = span(e₃) of M = −V is visited on the way.
    assert data["overlap_m"][0, :, 0].max() > 0.95 and data["overlap_m"][0, -1, 0] < 1e-6
    np.testing.assert_allclose(data["attending"], -1, atol=1e-6)


def test_a_wrong_conjecture_is_found_wrong(known_ends):
    data = known_ends.sel(sign="negative")
    arguments = data["speed"].values, 0.99, 1e-4
    mass = data["overlap_v"].values[:, -1]
    flipped = terminal.classify(mass, np.array([2, 2]), *arguments)
    assert [terminal.OUTCOMES[code] for code in flipped] == ["other", "dominant"]


def test_tokens_at_rest_elsewhere_are_not_counted_as_dominant():
    """A cluster at e₂, and clusters at e₁ and e₂, which do not see each other at β = 40."""
    e = np.eye(3)
    draws = [diagonal([1, 1, 1], s * np.array([1.0, 0.5, -0.5]), s) for s in (1, -1)]
    changes = {"beta": 40.0}
    here = planted(e[[1] * 6], draws, **changes).sel(sign="positive", run=0)
    assert terminal.OUTCOMES[int(here["outcome"])] == "other"
    here = planted(e[[0] * 3 + [1] * 3], draws, **changes).sel(sign="positive", run=0)
    assert terminal.OUTCOMES[int(here["outcome"])] == "several" and here["clusters"] == 2


def test_without_an_eigenvalue_of_the_right_sign_nothing_settles(rng):
    """V < 0 pushes tokens that attend to each other apart; V > 0 those that attend to antipodes."""
    v = np.array([1.0, 0.8, 0.6])
    draws = [diagonal([1, 1, 1], -v[::-1], s) for s in (1, -1)]  # V = ∓diag(0.6, 0.8, 1)
    assert draws[0].value_eigenvalues[0] < 0 < draws[1].value_eigenvalues[-1]
    time = {"end": 40, "steps": 200, "save": 4}
    data = planted(sphere_points(rng, 64, 3), draws, time=time)
    assert terminal.OUTCOMES[int(data["outcome"].sel(sign="positive", run=0))] == "unsettled"
    assert data["clusters"].sel(sign="positive") > 4


def test_turning_everything_turns_the_result(rng):
    """V ↦ RVRᵀ, B ↦ RBRᵀ, x ↦ Rx: masses, speed and counts stay."""
    r = rotation(rng, 3)
    q, b, m = rotation(rng, 3), np.array([0.4, 0.7, 1.0]), np.array([0.9, 0.1, -0.6])
    x = sphere_points(rng, 32, 3)
    turned = [
        planted(x @ turn.T, [terminal.compose(turn, b, turn @ q, m, s) for s in (1, -1)])
        for turn in (np.eye(3), r)
    ]
    for name in ("overlap_v", "overlap_m", "speed", "attending", "outcome", "clusters"):
        np.testing.assert_allclose(*(data[name] for data in turned), atol=1e-10)


# What a run leaves behind


def test_a_run_writes_its_files_and_counts(tmp_path):
    result = run(small(), out=tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.yaml", "result.nc", "summary.json", "outcomes.png", "overlaps.png"}
    with xr.open_dataset(tmp_path / "out" / "result.nc", engine="h5netcdf") as found:
        xr.testing.assert_identical(found.load(), result.dataset)
        assert all(v.attrs["units"] and v.attrs["long_name"] for v in found.data_vars.values())
        assert found["outcome"].attrs["flag_meanings"].split() == list(terminal.OUTCOMES)
        assert "0.99 along the conjectured" in found["outcome"].attrs["criteria"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for sign in terminal.SIGNS:
        counts = [summary[f"{sign}_{name}"] for name in terminal.OUTCOMES]
        assert sum(counts) == 3
        assert summary[f"{sign}_fraction"] == counts[0] / 3
        # Clopper and Pearson: quantiles of beta laws.
        k, high = counts[0], summary[f"{sign}_fraction_high"]
        assert high == pytest.approx(beta_law.ppf(0.975, k + 1, 3 - k) if k < 3 else 1)
    # After so short a time tokens still move.
    assert summary["positive_unsettled"] == summary["negative_unsettled"] == 3
    np.testing.assert_allclose(result.dataset["overlap_m"].sum("eigenvector"), 1, atol=1e-12)


def test_chunks_change_nothing():
    results = [run(small(chunk=chunk)).dataset for chunk in (1, 4, 100)]
    for other in results[1:]:
        for name in ("overlap_v", "speed", "outcome", "clusters"):
            np.testing.assert_allclose(results[0][name], other[name], atol=1e-10)


class Interrupted(Monitor):
    """Stops a run after its first chunk, and remembers what was kept."""

    def start(self, total):
        self.total = total

    def advance(self, what):
        pass

    def keep(self, result):
        self.result = result
        raise KeyboardInterrupt


def test_a_stopped_run_keeps_its_finished_chunks():
    monitor = Interrupted()
    prepared = terminal.prepare(experiments.load(small()))
    with pytest.raises(KeyboardInterrupt):
        terminal.run(prepared, monitor)
    assert monitor.total == 6
    outcome = monitor.result.dataset["outcome"].values  # chunks of four: two runs of each sign
    np.testing.assert_array_equal(outcome == terminal.NOT_RUN, [[False, False, True]] * 2)
    summary = monitor.result.summary
    assert sum(summary[f"positive_{name}"] for name in terminal.OUTCOMES) == 2
    assert terminal.figures(monitor.result.dataset)


def test_runs_that_stop_being_finite_are_reported():
    config = small(precision="float32", interaction=[1e37, 1e38], gap=1e-3)
    with pytest.raises(NonFiniteError, match=r"4 runs stopped being finite"):
        run(config)


def test_sampled_tokens_differ_between_runs_and_quadrature_does_not():
    sampled = terminal.prepare(experiments.load(small())).points
    assert not np.allclose(sampled[0], sampled[1])
    tokens = {"count": 32, "placement": "quadrature"}
    nodes = terminal.prepare(experiments.load(small(tokens=tokens))).points
    np.testing.assert_array_equal(nodes[0], nodes[5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("family=generic", "config key family must be 'general' or 'commuting'"),
        ("key_query=[0, 1]", "config key key_query: it must be a range of positive numbers"),
        ("interaction=[1, -1]", r"config key interaction: it must be a range \[least, largest\]"),
        ("interaction=[1]", "config key interaction must have at least 2"),
        ("runs=0", "config key runs must be greater than or equal to 1"),
        ("beta=[1, 2]", "config key beta must be a valid number"),
        ("mass=0.4", "config key mass must be greater than 0.5"),
        ("chunck=2", "config key chunck is unknown; did you mean chunk?"),
        ("tokens={placement: sample}", "config key tokens.count is missing"),
    ],
)
def test_bad_configs(change, message, tmp_path):
    with pytest.raises(InputError, match=message):
        run(small(), change, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
