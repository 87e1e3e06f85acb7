"""Reports which models are here, and whether there is room to convert one."""

import shutil
from pathlib import Path

from cacheprobe.doctor.findings import Finding
from cacheprobe.models.inventory import PLAIN, SMOLLM2, SMOLLM2_ON_HUB, THINKING, smollm2_state
from cacheprobe.models.known import shipped_names
from cacheprobe.models.smollm2 import INSTALL, cache_directory

CONVERSION_BYTES = 600_000_000


def models() -> list[Finding]:
    """Returns findings on SmolLM2, the shipped checkpoints and adapters, and the disk of the cache folder."""
    return [*_smollm2(), *_shipped()]


def _smollm2() -> list[Finding]:
    state, cache = smollm2_state(), cache_directory()
    free = shutil.disk_usage(_existing(cache)).free
    disk = f"{free / 1e9:.1f} GB free for {cache}"
    if state == "hub":
        return [Finding(SMOLLM2, f"as {SMOLLM2_ON_HUB} in the hub's cache")]
    if state == "absent":
        said = f"not installed; the demo runs on {PLAIN} instead"
        return [Finding(SMOLLM2, said, False, INSTALL), Finding("disk", disk)]
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
    found = []
    for name, kind in (("checkpoints", "checkpoints"), ("adapters", "adapters")):
        there = shipped_names(kind)
        is_there = {PLAIN, THINKING} <= set(there) if kind == "checkpoints" else bool(there)
        found.append(Finding(name, ", ".join(there) or "none", is_there, "" if is_there else remedy,
                             kind == "checkpoints"))  # fmt: skip
    return found


def _existing(path: Path) -> Path:
    """Returns the path, or the nearest existing folder above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
