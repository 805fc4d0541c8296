"""The command line: what it prints, what it returns, and that it never shows a traceback."""

import subprocess
import sys

import pytest
import yaml
from checkpoints import write
from test_experiments import concentration

from jaxmf import cli


@pytest.fixture
def jaxmf(monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder; returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxmf", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


def write_config(folder, **changes):
    changes = {"time": {"end": 1, "steps": 4, "save": 2}, "precision": "float32"} | changes
    (folder / "config.yaml").write_text(yaml.safe_dump(concentration(**changes)))


def test_help_needs_no_jax():
    code = "import sys; import jaxmf.cli; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_writes_into_a_new_folder_under_runs(jaxmf, tmp_path):
    write_config(tmp_path)
    status, out, _ = jaxmf("run", "config.yaml", "--set", "beta=[7]", "--set", "seed=3")
    assert status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-concentration") and folder.name in out
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["beta"] == [7] and written["seed"] == 3
    assert written["provenance"]["command"] == "jaxmf run config.yaml --set beta=[7] --set seed=3"
    assert "rate_predicted  0.2" in out


def test_bad_input_exits_with_two_and_one_sentence(jaxmf, tmp_path):
    write_config(tmp_path)
    status, out, err = jaxmf("run", "config.yaml", "--set", "beta=-1", "--out", "out")
    assert (status, out) == (2, "")
    assert err == "error: config key beta[0] must be greater than 0, not -1\n"
    assert not (tmp_path / "out").exists()
    for arguments in (("run", "nowhere.yaml"), ("run",), ("run", "config.yaml", "--sett", "a=1")):
        status, _, err = jaxmf(*arguments)
        assert status == 2 and "Traceback" not in err
    status, _, err = jaxmf("inspect", "no-such-model")
    assert status == 2 and "no-such-model is no file" in err


def test_a_run_that_leaves_the_sphere_exits_with_two_and_keeps_its_folder(jaxmf, tmp_path):
    write_config(tmp_path, attention={"value": {"diag": [1e38, 1, 0.5]}, "key_query": "identity"})
    status, _, err = jaxmf("run", "config.yaml", "--out", "out")
    assert status == 2 and "at zero temperature" in err and "Traceback" not in err
    assert (tmp_path / "out" / "result.nc").exists()


def test_inspect_a_config(jaxmf, tmp_path):
    write_config(tmp_path)
    status, out, _ = jaxmf("inspect", "config.yaml")
    assert status == 0
    assert "gap γ = 0.4, dim E = 1, predicted rate pγ/(2‖B‖₂) = 0.2" in out
    _, out, _ = jaxmf("inspect", "config.yaml", "--set", "attention.key_query={diag: [0, 1, 1]}")
    assert "B is singular" in out and "no" in out


def test_inspect_a_model(jaxmf, tmp_path):
    write(tmp_path / "model")
    status, out, _ = jaxmf("inspect", "model")
    assert status == 0
    rows = [line.split() for line in out.splitlines() if "A1" in line]
    assert [row[:3] for row in rows[:4]] == [[*pair, "4"] for pair in ("00", "01", "02", "10")]
    assert "B is singular, M is not symmetric" in out
