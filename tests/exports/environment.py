"""An environment of its own for speculators, which pins an older transformers than ours."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "fixtures"


def interpreter(folder: Path) -> str:
    """The interpreter that CACHEPROBE_SPECULATORS names, or that of a new environment in `folder`."""
    if given := os.environ.get("CACHEPROBE_SPECULATORS"):
        return given
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in ([f"torch=={torch.__version__.split('+')[0]}"], ["speculators==0.9.0"]):
        done = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
        if done.returncode:
            said = f"speculators cannot be installed here: {done.stderr[-300:]}"
            pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    return str(python)


def run_script(python: str, script: str, arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs a file of tests/fixtures in the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)
