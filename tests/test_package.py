"""The public names, whatever was imported first."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("first", ["RK4", "eigenspaces"])
def test_a_function_named_like_its_module_is_the_function(first):
    code = f"import jaxmf; jaxmf.{first}; assert callable(jaxmf.flow) and callable(jaxmf.spectrum)"
    subprocess.run([sys.executable, "-c", code], check=True)
