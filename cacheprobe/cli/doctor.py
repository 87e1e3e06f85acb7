"""Implements `cacheprobe doctor`: checks what cacheprobe can use on this machine, and what is missing."""

import os
import platform
import shutil
import time
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import torch
from packaging.requirements import Requirement

from cacheprobe.core.config import RUN_DTYPES
from cacheprobe.core.terminal import Listing
from cacheprobe.models import converted, known
from cacheprobe.models.settings import numeric_settings, processor_name
from cacheprobe.ops.compiled.operations import TORCH, choose
from cacheprobe.ops.kernel_set import choose_kernels
from cacheprobe.views.images import browser_path

INSTALL = "pip install 'cacheprobe{0}', or in a checkout pip install -e '.{0}'"
CONVERSION_BYTES = {known.SMOLLM2: 600_000_000, known.GEMMA: 1_400_000_000}
_NAMED = ("cacheprobe", "torch", "transformers", "transformer-lens", "plotly", "pandas")
_REPEATS = 5


class Finding(NamedTuple):
    """Holds the name of a checked item, the result in words, and a remedy if the item is missing."""

    name: str
    result: str
    remedy: str = ""
    """One line: how to get the item, or what works without it; "" if the item is there."""
    demo_needs_it: bool = False


Sections = dict[str, list[Finding]]
"""Findings by the name of their section."""


def checkup() -> Sections:
    """Runs the checks and returns the findings by section. On a GPU, this compiles kernels."""
    return {
        "machine": machine(),
        "dtypes: time of a matrix product, and what computes products and readings of a run": dtypes(),
        "versions": versions(_NAMED),
        "fingerprint fields of this machine": [
            Finding(name, str(value) or "not set") for name, value in numeric_settings().items()
        ],
        "packages": software(),
        "kernels": kernels(),
        "models": model_findings(),
        "pictures": pictures(),
    }


def listings(sections: Sections) -> list[Listing]:
    """Returns tables to print: one for each section, and one of the missing items and how to get each."""
    missing = [f for findings in sections.values() for f in findings if f.remedy]
    rows = [(f.name, f.remedy, "yes" if f.demo_needs_it else "no") for f in missing]
    tables = [Listing(name, (), [(f.name, f.result) for f in findings]) for name, findings in sections.items()]
    columns = ("what", "how to get it", "the demo needs it")
    return [*tables, Listing("missing", columns, rows, "" if rows else "nothing")]


def demo_lacks(sections: Sections) -> list[str]:
    """Returns the names of the missing items without which `cacheprobe demo` cannot run."""
    return [f.name for findings in sections.values() for f in findings if f.remedy and f.demo_needs_it]


def machine() -> list[Finding]:
    """Returns a list of findings on Python, processor, memory, threads and GPU."""
    limits = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")}
    limits_set = "".join(f"; {name}={value}" for name, value in limits.items() if value)
    gpu = "there is one; a run uses it only with --device cuda" if torch.cuda.is_available() else "none; none is needed"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("processor", f"{processor_name()}, used by torch as {torch.backends.cpu.get_cpu_capability()}"),
        Finding("memory", f"{memory_gib:.1f} GiB"),
        Finding("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores{limits_set}"),
        Finding("GPU", gpu),
    ]


def dtypes() -> list[Finding]:
    """Returns a list of findings, one for each dtype of a run: how long a matrix product takes, measured now, and what
    computes products and readings of a run on the CPU, and why."""
    found = []
    for name in RUN_DTYPES:
        choice = choose(getattr(torch, name), torch.device("cpu"))
        by = choice.operations.text if choice.operations else TORCH
        found.append(Finding(name, f"{1000 * product_seconds(name):.2f} ms; {by}: {choice.reason}"))
    return found


def product_seconds(dtype: str) -> float:
    """Returns the median seconds of five products of a 128 x 512 and a 512 x 512 matrix in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 512, generator=generator).to(getattr(torch, dtype)) for n in (128, 512))
    taken = []
    with torch.inference_mode():
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            torch.matmul(a, b)
            taken.append(time.perf_counter() - began)
    return median(taken[1:])  # the first one warms up


def kernels() -> list[Finding]:
    """Returns a finding that says which of the Triton kernels runs use on this machine, and why not the others. On a
    GPU with triton the call compiles the kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose_kernels(torch.bfloat16, device)
    if chosen.kernels is None:
        return [Finding("runs", f"use none; torch or compiled loops compute instead ({chosen.reason})")]
    without = f" but {chosen.reason}" if chosen.kernels.by_torch else ""
    how = f"on cuda use all{without}" if device == "cuda" else 'use all with products="kernels", else none'
    return [Finding("runs", f"{how}; {chosen.kernels.text}")]


def software(project: str = "cacheprobe") -> list[Finding]:
    """Returns a list of findings on the packages that `project` declares: one on all required packages, and one on each
    extra; if `project` is not installed, one that says so."""
    try:
        required = [Requirement(text) for text in metadata.requires(project) or ()]
    except metadata.PackageNotFoundError:
        return [Finding(project, "not installed, used as source: what it needs cannot be looked up")]
    base = [need for need in required if need.marker is None or need.marker.evaluate({"extra": ""})]
    findings = [_packages("base", base, INSTALL.format(""), demo_needs_it=True)]
    for extra in metadata.metadata(project).get_all("Provides-Extra") or ():
        own = [need for need in required if need not in base and need.marker and need.marker.evaluate({"extra": extra})]
        findings.append(_packages(f"extra {extra}", own, INSTALL.format(f"[{extra}]"), demo_needs_it=False))
    return findings


def _packages(name: str, required: list[Requirement], remedy: str, demo_needs_it: bool) -> Finding:
    installed = {need: _version(need.name) for need in required}
    wrong = [
        f"{need} is asked for, {version or 'nothing'} is installed"
        for need, version in installed.items()
        if version is None or not need.specifier.contains(version, prereleases=True)
    ]
    result = "; ".join(wrong) or f"installed: {', '.join(sorted(need.name for need in required))}"
    return Finding(name, result, remedy if wrong else "", demo_needs_it)


def versions(names: Iterable[str]) -> list[Finding]:
    """Returns a list of findings, one for each package name, with the installed version or "not installed"."""
    return [Finding(name, _version(name) or "not installed") for name in names]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def model_findings() -> list[Finding]:
    """Returns a list of findings on the models inside Python packages, the cache folder and the disk space that their
    conversion needs, and the shipped checkpoints and adapters."""
    cache, states = converted.cache_directory(), {name: known.embedded_state(name) for name in known.EMBEDDED}
    said = {
        "absent": "not installed",
        "converted": "converted",
        "installed": "installed; it is converted at its first use, once",
        "hub": "in the hub's cache",
    }
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    needed = sum(CONVERSION_BYTES[name] for name, state in states.items() if state == "installed")
    room = f"set CACHEPROBE_CACHE to a folder with {needed / 1e6:.0f} MB free" if free < needed else ""
    is_for_demo = states[known.SMOLLM2] == "installed" and free < CONVERSION_BYTES[known.SMOLLM2]
    size = f"{cache} holds {converted.cache_bytes() / 1e9:.1f} GB; to clear it, remove it"
    findings = [
        *(
            Finding(name, said[state], known.EMBEDDED[name].install if state == "absent" else "")
            for name, state in states.items()
        ),
        *([Finding("demo", f"runs on {known.PLAIN} instead")] if states[known.SMOLLM2] == "absent" else ()),
        Finding("cache", f"{size}; to move it, set CACHEPROBE_CACHE to another folder"),
        Finding("disk", f"{free / 1e9:.1f} GB free for {cache}", room, is_for_demo),
    ]
    for kind, named in (("checkpoints", {known.PLAIN, known.THINKING}), ("adapters", set())):
        names = known.shipped_names(kind)
        remedy = "they are in a checkout's data/ and in the wheel; install one of these again"
        is_there = bool(names) and named <= set(names)
        findings.append(Finding(kind, ", ".join(names) or "none", "" if is_there else remedy, bool(named)))
    return findings


def pictures() -> list[Finding]:
    """Returns findings on kaleido and Chromium, which `cacheprobe report --figures` needs to write pictures."""
    has_kaleido, browser = find_spec("kaleido") is not None, browser_path()
    get_browser = "as root apt-get install chromium, or name one in BROWSER_PATH"
    none = "none; reports in HTML need none"
    return [
        Finding("kaleido", "installed" if has_kaleido else none, "" if has_kaleido else INSTALL.format("[dash]")),
        Finding("chromium", browser or none, "" if browser else get_browser),
    ]
