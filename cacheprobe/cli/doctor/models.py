"""Reports which models this machine has, and whether its disk has room to convert one."""

import shutil
from pathlib import Path

from cacheprobe.cli.doctor.findings import Finding
from cacheprobe.models.inventory import PLAIN, SMOLLM2, SMOLLM2_ON_HUB, THINKING, smollm2_state
from cacheprobe.models.known import shipped_names
from cacheprobe.models.smollm2 import INSTALL, cache_directory

CONVERSION_BYTES = 600_000_000


def model_findings() -> list[Finding]:
    """Returns a list of findings on SmolLM2, the shipped checkpoints and adapters, and, unless SmolLM2 is in the hub's
    cache, the free disk space."""
    return [*_smollm2(), *_shipped()]


def _smollm2() -> list[Finding]:
    state, cache = smollm2_state(), cache_directory()
    free = shutil.disk_usage(_existing(cache)).free
    disk = f"{free / 1e9:.1f} GB free for {cache}"
    if state == "hub":
        return [Finding(SMOLLM2, f"as {SMOLLM2_ON_HUB} in the hub's cache")]
    if state == "absent":
        result = f"not installed; the demo runs on {PLAIN} instead"
        return [Finding(SMOLLM2, result, False, INSTALL), Finding("disk", disk)]
    if state == "converted":
        return [Finding(SMOLLM2, "converted"), Finding("disk", disk)]
    has_room = free >= CONVERSION_BYTES
    remedy = f"set CACHEPROBE_CACHE to a folder with {CONVERSION_BYTES / 1e6:.0f} MB free"
    return [
        Finding(SMOLLM2, "installed; it is converted at its first use, once"),
        Finding("disk", disk, has_room, "" if has_room else remedy, True),
    ]


def _shipped() -> list[Finding]:
    remedy = "they are in a checkout's data/ and in the wheel; install one of these again"
    findings = []
    for kind in ("checkpoints", "adapters"):
        names, demo_needs_it = shipped_names(kind), kind == "checkpoints"
        is_there = {PLAIN, THINKING} <= set(names) if demo_needs_it else bool(names)
        findings.append(Finding(kind, ", ".join(names) or "none", is_there, "" if is_there else remedy, demo_needs_it))
    return findings


def _existing(path: Path) -> Path:
    """Returns `path` if it exists, else the nearest existing folder above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
