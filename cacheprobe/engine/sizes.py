"""Estimates a run's memory from its settings, and refuses sizes that cannot fit before anything is allocated.

An estimate is a lower bound of what the run takes if every request reaches its full length. A request that meets a stop
token ends earlier and takes less, which nothing says beforehand: a run that would end early may be refused.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.models.base import CachedLM

TOKEN_BYTES = 2_300
"""Rows, events and ledger of one generated token, as Python and pandas hold them. Measured: 1,500 requests x 32 tokens
of a tiny model, without capture."""
READING_BYTES = 900
"""One lens reading of five tokens, with its line in the table. Measured likewise, with capture="STCZ"."""
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes(device: torch.device | None = None) -> int | None:
    """Returns the bytes that an allocation can still take on this device (None: the machine's memory); None if
    unknown."""
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device is not None and device.type != "cpu":
        return None
    told = [_from_meminfo(), *map(_from_cgroup, CGROUP_LIMITS)]
    known = [value for value in told if value is not None]
    if not known and hasattr(os, "sysconf"):  # a machine without /proc: all of its memory is a bound, too
        known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    return min(known, default=None)


def _from_meminfo() -> int | None:
    """Returns MemAvailable, which counts the page cache as free; SC_AVPHYS_PAGES does not."""
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _from_cgroup(path: Path) -> int | None:
    """Returns the memory limit of a container; None for no limit."""
    said = path.read_text().strip() if path.exists() else ""
    return int(said) if said.isdecimal() else None


# -- the cache, which one allocation takes


def require_cache_fits(model: CachedLM, config: EngineConfig, in_flight: int, num_needed: int = 1) -> None:
    """Raises: ValueError if the KV cache and the logits of one verify pass exceed a device's available memory.

    in_flight: requests that hold a cache row at once.  num_needed: capacity that the longest request needs.
    """
    probe = model.new_cache(1, 1)
    per_slot: Counter[torch.device] = Counter()
    for held in (*probe.keys, *probe.values):
        per_slot[held.device] += held.numel() * held.element_size()
    group, window = config.group or 1, config.window or 1
    spare = max(group, config.prefill_group or 1)
    widest = "group" if spare == group else "prefill_group"
    for device, slot_bytes in per_slot.items():
        available = available_bytes(device)
        per_place = window * model.d_vocab * model.dtype.itemsize if device == model.device else 0
        row_bytes = config.capacity * slot_bytes
        needed = (in_flight + spare) * row_bytes + group * per_place
        if available is None or needed <= available:
            continue
        largest = {
            widest: (available - in_flight * row_bytes) // (row_bytes + per_place),
            "capacity": (available - group * per_place) // ((in_flight + spare) * slot_bytes),
            "max_batch": (available - group * per_place) // row_bytes - spare,
        }
        least = {widest: 1, "capacity": max(num_needed, window), "max_batch": 1}
        given = {widest: spare, "capacity": config.capacity, "max_batch": in_flight}
        fits = [f"{name}={value}" for name, value in largest.items() if least[name] <= value < given[name]]
        remedy = f"largest that fits: {' or '.join(fits)}" if fits else "lower several of them together"
        raise ValueError(
            f"a cache of {in_flight + spare} sequences ({in_flight} requests at once + {spare} of {widest}) x capacity "
            f"{config.capacity}, and the logits of {group} x {window} tokens, need {_said(needed)} on {device}; "
            f"{_said(available)} are available; {remedy}"
        )


# -- what is kept of every token, which grows with the number of requests


def require_records_fit(
    model: CachedLM,
    capture: CaptureConfig,
    layers: Sequence[int],
    requests: Sequence[tuple[int, int, int]],
) -> None:
    """Raises: ValueError if what the run keeps exceeds the machine's available memory.

    requests: (prompt tokens, new tokens, samples n) of each prompt. Samples share the prompt's states.
    """
    states, reading = _state_bytes(model, capture, layers), len(layers) * READING_BYTES * capture.reads_lens
    phases = set(capture.phases or ("prefill", "decode", "verify"))
    of_prompt = states if "prefill" in phases else 0
    of_token = TOKEN_BYTES + (states if phases & {"decode", "verify"} else 0) + reading
    if capture.positions is not None:  # few are kept; how many, each request's length says
        of_prompt, of_token = 0, TOKEN_BYTES
    of_prompts = sum(prompt * of_prompt for prompt, _, _ in requests)
    of_tokens = sum(new * of_token * n for _, new, n in requests)
    needed, available = of_prompts + of_tokens, available_bytes()
    if available is None or needed <= available:
        return
    num_requests, samples = sum(n for _, _, n in requests), max(n for _, _, n in requests)
    given = {"n": samples, "max_new_tokens": max(new for _, new, _ in requests)}
    if samples == 1:
        given = {"number of prompts": num_requests, **given}
    largest = {name: (available - of_prompts) * value // of_tokens for name, value in given.items()}
    fits = " or ".join(f"{name}={value}" for name, value in largest.items() if value > 0)
    bare = "; capture less" if of_token > TOKEN_BYTES else ""
    raise ValueError(
        f"{num_requests} requests (prompts x n) of {sum(new * n for _, new, n in requests)} new tokens in all need "
        f"{_said(needed)} for what is kept of them; {_said(available)} are available; largest that fits: "
        f"{fits or 'none of these prompts'}{bare}"
    )


def _state_bytes(model: CachedLM, capture: CaptureConfig, layers: Sequence[int]) -> int:
    """Returns the bytes captured of one token. Attention patterns, which grow with position, are left out."""
    dtype = getattr(torch, capture.dtype) if capture.dtype else model.dtype
    heads, width = model.head_shape
    query = heads * width * sum(site in ("q", "z") for site in capture.heads)
    return (len(capture.state_sites) * model.d_model + query) * len(layers) * dtype.itemsize


def _said(count: int) -> str:
    return f"{count:,} bytes ({count / 2**30:.1f} GiB)"
