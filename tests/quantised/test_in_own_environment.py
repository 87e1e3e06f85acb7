"""The tests of models that libraries have quantised, with these libraries installed beside the environment: torchao
writes to stderr whenever transformers is imported, so that it is no part of the environment itself."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cacheprobe.models.quantised.packed import METHODS
from tests.field import table
from tests.field.variants import VARIANTS

ROOT = Path(__file__).parents[2]
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["quantised"]
NEEDED = ["loguru", "frozendict"]
"""What compressed-tensors imports besides torch and transformers."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the libraries are found first: in the folder of CACHEPROBE_QUANTISED, or a new one."""
    folder = os.environ.get("CACHEPROBE_QUANTISED") or str(tmp_path_factory.mktemp("libraries"))
    if "CACHEPROBE_QUANTISED" not in os.environ:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *EXTRA, *NEEDED]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = f"the libraries cannot be installed here: {done.stderr[-300:]}"
            pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])}


def test_the_extra_names_every_library() -> None:
    named = {re.split(r"[<>=]", one)[0] for one in EXTRA}
    assert named == {method.to_install for method in METHODS.values() if method.package}


def test_with_the_libraries(libraries: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--jaxtyping-packages="]
    done = subprocess.run(
        [*command, "tests/quantised/test_libraries.py"], capture_output=True, text=True, env=libraries, cwd=ROOT
    )
    assert done.returncode == 0 and " skipped" not in done.stdout, done.stdout[-4000:]


@pytest.mark.slow
def test_the_rows_of_the_table(libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the libraries, as docs/families.txt has them."""
    monkeypatch.syspath_prepend(
        libraries["PYTHONPATH"].split(os.pathsep)[0]
    )  # the worker's path is that of this process
    names = [name for name in VARIANTS if name.startswith("quantised")]
    rows = table.measure_all(names, progress=False)
    documented = (ROOT / "docs/families.txt").read_text(encoding="utf-8").splitlines()
    assert all(row.is_green for row in rows), [row.reasons for row in rows]
    assert {table.markdown_line(row) for row in rows} <= set(documented)
