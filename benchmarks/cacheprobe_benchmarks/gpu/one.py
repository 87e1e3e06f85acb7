"""Runs one check of `make gpu` in this process: python -m cacheprobe_benchmarks.gpu.one NAME RESULT SETTINGS"""

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from cacheprobe.core.files import write_json
from cacheprobe.core.registry import available, find
from cacheprobe.core.values import JsonDict
from cacheprobe_benchmarks.gpu.listed import KERNELS
from cacheprobe_kernels.checks import on_gpu


class Skip(RuntimeError):
    """Signals that a check cannot run on this machine, with the reason."""


class Given(NamedTuple):
    """Holds what a check is given."""

    rounds: int = 3
    best: JsonDict | None = None
    """The device's rates, as the check `device` found them; fields of `on_gpu.Device`."""
    is_small: bool = False
    """True for a dry run: tiny sizes, and each call is timed once."""
    device: str = "cuda"

    @property
    def rates(self) -> on_gpu.Device:
        """The device's rates. Raises: Skip without them."""
        if self.best is None:
            raise Skip("the check device, whose rates it needs, found none")
        return on_gpu.Device(**self.best)

    @property
    def clock(self) -> on_gpu.Clock:
        """Function that times a call."""
        return _once if self.is_small else on_gpu.seconds_of


def _once(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def device(given: Given) -> JsonDict:
    """Returns what the device is and does at its best."""
    sizes = dict(copied_bytes=2**12, side=16) if given.is_small else {}
    best = on_gpu.measured(torch.device(given.device), given.clock, **sizes)
    facts = torch.cuda.get_device_properties(0)
    versions = {library: version(library) for library in ("torch", "triton", "transformers")}
    said = f"capability {facts.major}.{facts.minor}, {facts.total_memory / 1e9:.0f} GB, "
    said += f"{best.bytes_per_second / 1e9:.0f} GB/s, {best.flops_per_second / 1e12:.0f} TFLOP/s in bfloat16"
    libraries = ", ".join(f"{library} {number}" for library, number in versions.items())
    return {
        "complaints": [], "lines": [best.name, said, libraries], "name": best.name, "best": asdict(best),
        "capability": [facts.major, facts.minor], "memory_bytes": facts.total_memory,
        "python": platform.python_version(), "cuda": torch.version.cuda, **versions,
    }  # fmt: skip


def kernel(name: str, given: Given) -> JsonDict:
    """Compares a kernel with its reference: its cases, and the shapes of real models."""
    checked = find("kernels", name)
    cases, large = (
        (checked.cases[:1], checked.cases[:1]) if given.is_small else (checked.cases, on_gpu.large_cases(checked))
    )
    complaints = on_gpu.kernel_complaints(checked, torch.device(given.device), cases, large)
    return {"complaints": complaints, "lines": [f"{len(cases)} small cases, {', '.join(one.name for one in large)}"]}


def roofs(given: Given) -> JsonDict:
    """Times each kernel and its reference at shapes of real models, beside the least that the device allows."""
    timings = [
        on_gpu.timed(checked, case, torch.device(given.device), given.rates, given.clock)
        for checked in available("kernels").values()
        for case in (checked.cases[:1] if given.is_small else on_gpu.large_cases(checked))
    ]
    lines = [f"{t.kernel} {t.case} {t.microseconds:.1f} us, {t.share_of_roof:.2f} of its roof" for t in timings]
    return {"complaints": [], "lines": lines, "timings": [asdict(one) for one in timings]}


def compared(name: str, given: Given) -> JsonDict:
    """Runs a check of the loop in kernels that times nothing."""
    from cacheprobe_benchmarks.gpu import checks

    size = checks.SMALL if given.is_small else checks.SIZE
    return {"complaints": checks.COMPLAINTS[name](given.device, size, 3 if given.is_small else 16), "lines": []}


def job(name: str, given: Given) -> JsonDict:
    """Times the main job of a model. Raises: Skip if the model is not on this machine."""
    from cacheprobe_benchmarks.gpu import jobs
    from cacheprobe_benchmarks.speed.products import Rates

    best = given.rates
    rates = Rates({"largest": {"torch": best.flops_per_second / 1e9}}, best.bytes_per_second / 1e9)
    try:
        model, prompts = jobs.named(name, given.device, given.is_small)
    except (FileNotFoundError, ImportError) as absent:
        raise Skip(str(absent)) from absent
    figures = jobs.main_job(model, prompts, rates, given.rounds, 2 if given.is_small else jobs.NEW_TOKENS)
    figures["reserved_bytes"] = torch.cuda.memory_reserved()
    ratios = [f"{key} {value}" for key, value in figures.items() if key.endswith(("_ratio", "_over_roofline"))]
    return {"complaints": [], "lines": [figures["products"], *ratios], **figures}


def run_check(name: str, given: Given) -> JsonDict:
    """Runs a check. Returns its complaints, lines for the table, and what it found; only "skipped", with a reason, if
    the machine lacks what the check needs."""
    try:
        if name in KERNELS:
            return kernel(name, given)
        if name in ("loop", "determinism", "patching"):
            return compared(name, given)
        return {"device": device, "roofs": roofs}[name](given) if name in ("device", "roofs") else job(name, given)
    except Skip as reason:
        return {"skipped": str(reason)}


def main(name: str, result: str, settings: str) -> None:
    """Writes what a check found, or that there is no GPU, to the file `result`."""
    if torch.cuda.is_available():
        found = run_check(name, Given(**json.loads(settings)))
    else:
        found = {"no_gpu": "there is no GPU: torch.cuda.is_available() is False"}
    write_json(Path(result), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
