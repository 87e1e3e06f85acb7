"""Runs everything that needs a GPU, each check in a process of its own, and writes one JSON file after each check.

    python -m cacheprobe_benchmarks.gpu.everything [--json FILE] [--only NAMES] [--budget SECONDS] [--rounds N]
                                                   [--wheels FOLDER] [--list]

If a check raises an error, exceeds its limit or is killed, the others still run. A check that does not fit the rest
of the budget is skipped. Exits 1 if a check complains or fails, and 2 where there is no GPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from cacheprobe.core.files import write_json
from cacheprobe.core.values import JsonDict
from cacheprobe_benchmarks.gpu.listed import CHECKS, Check

RESULTS = Path(__file__).parents[2] / "results"
CHILD = (sys.executable, "-m", "cacheprobe_benchmarks.gpu.one")
"""The command that runs one check; its name, the file for its result, and the settings follow."""
LAST_LINES = 12
GOOD, COMPLAINS, FAILED, SKIPPED = "good", "complains", "failed", "skipped"
OFFLINE = {
    "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip
CACHE = {} if find_spec("platformdirs") else {"CACHEPROBE_CACHE": "~/.cache/cacheprobe"}
"""The cache's folder, which platformdirs would know."""


class NoGpu(RuntimeError):
    """Signals that torch finds no GPU here, with the reason."""


def in_own_process(check: Check, seconds: float, settings: JsonDict, env: Mapping[str, str]) -> JsonDict:
    """Runs a check in a process of its own, at most so many seconds. Returns its outcome, a reason if that is not
    "good", the last lines that a failed one said, and what it found.

    settings: what the check is given: rounds, and the rates of the device.  Raises: NoGpu if the check finds none.
    """
    with TemporaryDirectory() as folder:
        log, result = Path(folder) / "log", Path(folder) / "result.json"
        with log.open("wb") as said:
            command = [*CHILD, check.name, str(result), json.dumps(settings)]
            child = subprocess.Popen(command, stdout=said, stderr=said, env=env, start_new_session=True)
            try:
                code = child.wait(seconds)
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # compilers that it started too
                child.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = None
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
        found = json.loads(result.read_text()) if result.exists() else {}
    if "no_gpu" in found:
        raise NoGpu(found["no_gpu"])
    if code == 0 and "skipped" in found:
        return {"outcome": SKIPPED, "reason": found["skipped"]}
    if code == 0 and found:
        complaints = found["complaints"]
        return {"outcome": COMPLAINS if complaints else GOOD, "reason": "; ".join(complaints[:3]), **found}
    if code is None:
        reason = f"exceeded its limit of {seconds:.0f} s"
    elif code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
    else:
        reason = lines[-1] if lines else f"ended with status {code} and said nothing"
    return {"outcome": FAILED, "reason": reason, "last_lines": lines, **found}


class Results:
    """Holds the results by check, and writes all of them to a file after each."""

    def __init__(self, path: Path | None, about: JsonDict) -> None:
        """Takes the file to write; None for the file in benchmarks/results with the device's name. Results of an
        earlier run in that file stay until the same check runs again."""
        self.path, self.about = path, about
        self.earlier: dict[str, JsonDict] = {}
        self.now: dict[str, JsonDict] = {}

    def add(self, name: str, result: JsonDict) -> None:
        """Adds a check's result and writes the file."""
        self.now[name] = result
        if name == "device" and "name" in result:
            self.about["device"] = result["name"]
            path = self.path or RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', result['name'].lower())}.json"
            with suppress(OSError, ValueError):
                stored = json.loads(path.read_text(encoding="utf-8"))
                self.earlier = stored["checks"] if stored["device"] == result["name"] else {}
            self.path = path
        self.path = self.path or RESULTS / "gpu-unknown.json"
        write_json(self.path, {"benchmark": "gpu", **self.about, "checks": {**self.earlier, **self.now}})

    def needed(self, check: Check) -> float:
        """Returns the seconds that a check needs: as an earlier run in the file measured, or the estimate."""
        known = self.earlier.get(check.name, {})
        return known["seconds"] if known.get("outcome") in (GOOD, COMPLAINS) else check.seconds

    def table(self) -> Iterator[str]:
        """Yields the lines of a table in Markdown: each check of this run with its outcome, seconds and figures."""
        yield "| check | outcome | seconds | what it found |"
        yield "|---|---|---|---|"
        for name, one in self.now.items():
            said = "; ".join(filter(None, (one.get("reason"), *one.get("lines", ()))))
            yield f"| {name} | {one['outcome']} | {one.get('seconds', '')} | {said.replace('|', '/')} |"


def run_all(checks: Sequence[Check], results: Results, budget: float, rounds: int, env: Mapping[str, str]) -> None:
    """Runs the checks one after another, and skips those that do not fit the rest of the budget in seconds."""
    began = time.monotonic()
    for check in checks:
        left = budget - (time.monotonic() - began)
        if (needed := results.needed(check)) > left:
            result: JsonDict = {
                "outcome": SKIPPED,
                "reason": f"needs about {needed:.0f} s, {max(left, 0):.0f} s are left",
            }
        else:
            started, when = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
            settings = {"rounds": rounds, "best": results.now.get("device", {}).get("best")}
            result = in_own_process(check, min(check.limit, left), settings, env)
            result |= {"seconds": round(time.monotonic() - started, 1), "began": when}
        results.add(check.name, result)
        for line in result.get("last_lines", ()):
            print(f"    {line}", file=sys.stderr)
        print(f"{check.name}: {result['outcome']} {result['reason']}".rstrip(), file=sys.stderr, flush=True)


@contextmanager
def unpacked(wheels: Path | None) -> Iterator[dict[str, str]]:
    """Yields the environment of the checks, with the unpacked wheels of a folder in front of PYTHONPATH."""
    with TemporaryDirectory() as folder:
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            ZipFile(wheel).extractall(folder)
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        yield {**CACHE, **os.environ, **OFFLINE, "PYTHONPATH": paths}


def chosen(only: str) -> list[Check]:
    """Returns the checks with these names, joined by commas, in their order; all for "". `device` is always among them.
    Raises: ValueError for an unknown name."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    if unknown := names - {check.name for check in CHECKS}:
        raise ValueError(f"unknown checks {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CHECKS)}")
    return [check for check in CHECKS if not names or check.name in names or check.name == "device"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and prints one table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write; by default benchmarks/results/gpu-DEVICE.json")
    parser.add_argument("--only", default="", help="names of checks, joined by commas")
    parser.add_argument("--budget", type=float, default=480, help="seconds for all checks")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of the jobs")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the checks import, of gpu.wheels")
    parser.add_argument("--list", action="store_true", help="print the checks with their limits, and run nothing")
    given = parser.parse_args(arguments)
    try:
        checks = chosen(given.only)
    except ValueError as unknown:
        parser.error(str(unknown))
    if given.list:
        for check in checks:
            print(f"{check.name:<17} about {check.seconds:3.0f} s, at most {check.limit:3.0f} s: {check.what}")
        return 0
    results = Results(given.json, {"rounds": given.rounds, "budget_seconds": given.budget})
    try:
        with unpacked(given.wheels) as env:
            run_all(checks, results, given.budget, given.rounds, env)
    except NoGpu as reason:
        print(f"make gpu: {reason}; nothing was run or written", file=sys.stderr)
        return 2
    print("\n".join(results.table()))
    print(results.path)
    return int(any(one["outcome"] in (COMPLAINS, FAILED) for one in results.now.values()))


if __name__ == "__main__":
    sys.exit(main())
