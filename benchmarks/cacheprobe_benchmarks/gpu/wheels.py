"""Lists and downloads the wheels that `make gpu` imports and a machine with torch, triton and transformers may lack.

    python -m cacheprobe_benchmarks.gpu.wheels [--to FOLDER] [--python 3.12]

Run it where there is a network, carry the folder, and give it as `--wheels`. numba, llvmlite and pyarrow, together too
large for 60 MB, must be on the machine.
"""

import argparse
import subprocess
import sys
from pathlib import Path

WHEELS = {
    "einops": 0.07, "jaxtyping": 0.06, "pandas": 12.03, "platformdirs": 0.04, "python-dateutil": 0.09,
    "wadler-lindig": 0.02, "xxhash": 0.47,
}  # fmt: skip
"""Package -> megabytes of its wheel for Python 3.12 on Linux x86-64. Versions are those of constraints.txt."""
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")
"""Versions of manylinux, the newest first."""


def versions(constraints: Path) -> dict[str, str]:
    """Returns package -> version of WHEELS, as a file of constraints pins them."""
    pinned = dict(line.split("==") for line in constraints.read_text(encoding="utf-8").split())
    return {name: pinned[name] for name in WHEELS}


def download(folder: Path, python: str, wanted: dict[str, str]) -> list[Path]:
    """Downloads one wheel for each package without its dependencies, by pip. Returns the wheels in the folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [f"--platform=manylinux_{number}_x86_64" for number in PLATFORMS]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in wanted.items())], check=True)
    return sorted(folder.glob("*.whl"))


def main(arguments: list[str] | None = None) -> None:
    """Prints names and megabytes; downloads the wheels if a folder is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, help="folder for the wheels; by default nothing is downloaded")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with the GPU")
    given = parser.parse_args(arguments)
    wanted = versions(Path(__file__).parents[3] / "constraints.txt")
    sizes = {f"{name} {version}": WHEELS[name] for name, version in wanted.items()}
    if given.to:
        sizes = {path.name: path.stat().st_size / 1e6 for path in download(given.to, given.python, wanted)}
    for name, megabytes in {**sizes, "in all": sum(sizes.values())}.items():
        print(f"{megabytes:6.2f} MB {name}")


if __name__ == "__main__":
    main()
