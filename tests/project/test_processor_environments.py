"""The environments of `make test-processors`: each is really applied, and one failure does not hide the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_processors.sh"


@pytest.mark.parametrize("number", ["1", "2", "4"])
def test_the_number_of_threads_that_is_asked_for_applies_from_the_start(number: str) -> None:
    """torch starts with MKL's number of threads, whatever OpenMP's is."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_NUM_THREADS"}
    program = "import tests.conftest, torch; print(torch.get_num_threads())"
    asked = {**environment, "OMP_NUM_THREADS": number}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=asked, capture_output=True, text=True)
    assert done.stdout.strip() == number, done.stderr


def test_every_environment_gets_a_line_and_one_failure_fails_all(tmp_path: Path) -> None:
    fake = tmp_path / "pytest.sh"
    fake.write_text(
        'echo "$MKL_CBWR$OMP_NUM_THREADS: $@" >> "$0.asked"\n'
        'if [ "$MKL_CBWR" = COMPATIBLE ]; then echo "E   other bits"; echo "1 failed, 2 passed in 3s"; exit 1; fi\n'
        'echo "3 passed in 3s"\n'
    )
    environments = ["OMP_NUM_THREADS=1", "MKL_CBWR=COMPATIBLE", "OMP_NUM_THREADS=4,MKL_CBWR=AVX2"]
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def run(*which: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), f"bash {fake}", *which]
        return subprocess.run(command, env=inherited, capture_output=True, text=True)

    done = run(*environments)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert [re.sub(r"; \d+ s", "", line) for line in lines] == [
        "OMP_NUM_THREADS=1: passed (3 passed)",
        "MKL_CBWR=COMPATIBLE: FAILED (1 failed, 2 passed)",
        "OMP_NUM_THREADS=4,MKL_CBWR=AVX2: passed (3 passed)",
    ]
    assert done.returncode == 1 and "    E   other bits" in done.stdout
    asked = Path(f"{fake}.asked").read_text().splitlines()
    assert [line.split(":")[0] for line in asked] == ["1", "COMPATIBLE", "AVX24"]
    assert all("tests/models/test_fast.py" in line for line in asked)
    assert run("OMP_NUM_THREADS=4").returncode == 0
    inherited["TESTS"] = "tests/models/test_tapes.py tests/invariants"
    run("OMP_NUM_THREADS=4")
    assert Path(f"{fake}.asked").read_text().splitlines()[-1].endswith(f" {inherited['TESTS']}")
