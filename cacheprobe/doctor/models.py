"""Which models are here, and whether there is room to convert one."""

import shutil
from pathlib import Path

from cacheprobe.doctor.findings import Finding
from cacheprobe.models.loaders import SMOLLM2_ON_HUB
from cacheprobe.models.shipped import shipped_names
from cacheprobe.models.smollm2 import cache_directory, converted_directory, is_complete

CONVERSION_BYTES = 600_000_000
DEMO_CHECKPOINT = "coinflip-thinking"


def models() -> list[Finding]:
    """SmolLM2, the shipped checkpoints and adapters, and the disk of the cache folder."""
    return [*_smollm2(), *_shipped()]


def _smollm2() -> list[Finding]:
    cache = cache_directory()
    free = shutil.disk_usage(_existing(cache)).free
    disk = f"{free / 1e9:.1f} GB free for {cache}"
    try:
        target = converted_directory()
    except FileNotFoundError as absent:
        if _is_from_hub():
            return [Finding("smollm2-135m", f"as {SMOLLM2_ON_HUB} in the hub's cache", demo_needs_it=True)]
        remedy = str(absent).partition(": ")[2]
        return [Finding("smollm2-135m", "not installed", False, remedy, True), Finding("disk", disk)]
    if is_complete(target):
        return [Finding("smollm2-135m", "converted", demo_needs_it=True), Finding("disk", disk)]
    has_room = free >= CONVERSION_BYTES
    remedy = f"set CACHEPROBE_CACHE to a folder with {CONVERSION_BYTES / 1e6:.0f} MB free"
    return [
        Finding("smollm2-135m", "installed; it is converted at its first use, once", demo_needs_it=True),
        Finding("disk", disk, has_room, "" if has_room else remedy, True),
    ]


def _shipped() -> list[Finding]:
    remedy = "they are in a checkout's data/ and in the wheel; install one of these again"
    found = []
    for name, kind in (("checkpoints", "checkpoints"), ("adapters", "adapters")):
        there = shipped_names(kind)
        is_there = DEMO_CHECKPOINT in there if kind == "checkpoints" else bool(there)
        found.append(Finding(name, ", ".join(there) or "none", is_there, "" if is_there else remedy,
                             kind == "checkpoints"))  # fmt: skip
    return found


def _is_from_hub() -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(SMOLLM2_ON_HUB, "model.safetensors"), str)


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
