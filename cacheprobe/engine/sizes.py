"""Refuses a run that does not fit into memory, before it starts. What happens when memory runs out:

1. Before the run: `require_cache_fits` and `require_records_fit` in this file estimate its memory from its settings.
   They raise a ValueError that names the largest sizes that fit (plan.py calls them). The estimate assumes that every
   request reaches its full length, so a run that would end early may be refused.
2. During the run, with `max_kv_tokens`: if the running requests need more cache slots, `Scheduler.to_preempt`
   (scheduler.py) takes out the newest ones. `Committer.preempt` (committer.py) gives up their drafts and frees their
   cache rows. They wait; when they are admitted again, `Prefill.rebuild` (prefill.py) computes their keys and values
   again. Committed tokens do not change.
3. An out-of-memory error in a pass (of the model, the recorder or a drafter) or in the choice of a token:
   `Engine.attempts` (step.py) runs the pass for each request alone. A draft that cannot grow is verified as it is, and
   a verify pass that fails alone runs again without the draft. A request that fails without a draft ends: its entry in
   `trace.meta["finish"]` is "error", and `trace.meta["errors"]` has the message. The others go on; if all fail, the run
   raises EngineError.
4. An out-of-memory error in a lens: `LensReader` (trace/recording/lens_reader.py) reads each request of the pass alone.
   A request that fails again has no readings; its tokens and states stay, and a RuntimeWarning names it.
5. Another out-of-memory error, such as when the cache is allocated or the trace is built, ends the run.
"""

import os
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.hook_names import HEAD_SHAPES, RECURRENT, ROUTER
from cacheprobe.core.records import ANY_CAPACITY, CAPACITY_STEP, Request
from cacheprobe.engine.shapes import DRAFTED_WINDOW, LEAST_CAPACITY, config_to_try
from cacheprobe.kvcache.cache import is_mapped
from cacheprobe.kvcache.recurrent import bytes_of_states
from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts import layers_of, state_shapes
from cacheprobe.models.feeding import module_places, row_shapes
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.ops.state_codec import INT8, SCALE_BYTES, kept_dtype

TOKEN_BYTES = 2_300
"""Bytes of the records of one generated token (rows, events, ledger) in Python and pandas, without states. Measured:
1,500 requests x 32 tokens of a tiny model, without capture."""
READING_BYTES = 900
"""Bytes of one lens reading of five tokens, with its line in the table. Measured likewise, with capture="STCZ"."""
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes(device: torch.device | None = None) -> int | None:
    """Returns an estimate of the bytes that can still be allocated on a device; None if it is unknown.

    device: None for the machine's main memory. Of a container's limit, the memory that the container already uses is
    not subtracted.
    """
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device is not None and device.type != "cpu":
        return None
    limits = [_from_meminfo(), *map(_from_cgroup, CGROUP_LIMITS)]
    known = [limit for limit in limits if limit is not None]
    if not known and hasattr(os, "sysconf"):  # without /proc, the size of the main memory is the limit
        known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    return min(known, default=None)


def _from_meminfo() -> int | None:
    """Returns MemAvailable of /proc/meminfo in bytes; None without the file or the line."""
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else None


def _from_cgroup(path: Path) -> int | None:
    """Returns the memory limit of a container in bytes, read from `path`; None without the file or a limit in it."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


# -- the cache, which one allocation takes


def with_capacity(
    config: EngineConfig, requests: Iterable[tuple[int, int, int]], n_ctx: int, is_window_open: bool
) -> EngineConfig:
    """Returns the config with the smallest default capacity that every request fits: 512, 1,024, 2,048 ... up to what
    the model's context needs.

    requests: (prompt tokens, new tokens, tokens already in the cache) of each.  n_ctx: tokens of the model's context.
    is_window_open: another window, up to 16, may replace that of the config.
    """
    widest = replace(config, window=max(config.window, DRAFTED_WINDOW)) if is_window_open else config
    needed = max((widest.slots_needed(*sizes) for sizes in requests), default=0)
    most = widest.slots_needed(n_ctx - 1, 1)
    capacity = LEAST_CAPACITY
    while capacity < needed:
        capacity *= 2
    longest = -(-max(most, LEAST_CAPACITY) // CAPACITY_STEP) * CAPACITY_STEP
    return replace(config, capacity=min(capacity, longest) if needed <= longest else capacity)


def shared_capacity(attention: object, capacity: int) -> int | str:
    """Returns the capacity's entry of a schedule fingerprint: ANY_CAPACITY where bits do not depend on it.

    attention: the fingerprint's entry of that name.
    """
    return ANY_CAPACITY if attention == BY_REQUEST and capacity % CAPACITY_STEP == 0 else capacity


def require_room(config: EngineConfig, request: Request, new: int, is_longest: bool = False) -> None:
    """Raises: ValueError if a prompt, `new` new tokens and the window exceed the cache's capacity or max_kv_tokens.
    is_longest: the model can attend over no more slots than the capacity."""
    prompt, window = request.num_prompt_tokens, config.window
    needed = config.slots_needed(prompt, new, request.num_cached)
    if needed > config.capacity:
        remedy, over = f"set capacity={needed} or more", needed - config.capacity
        if is_longest:
            shorter = [f"{name}={n - over}" for name, n in (("window", window), ("max_new_tokens", new)) if n > over]
            less = f"set {' or '.join(shorter)}, or less" if shorter else "shorten the prompt, or set pad_prefill=False"
            remedy = f"the model has no position beyond; {less}"
        raise ValueError(
            f"request {request.request_id}: prompt of {prompt} + {new} new tokens + window of {window} need {needed} "
            f"cache slots, capacity is {config.capacity}; {remedy}"
        )
    if config.max_kv_tokens is not None and prompt + new + window > config.max_kv_tokens:
        raise ValueError(
            f"request {request.request_id}: prompt of {prompt} + {new} new tokens + window of {window} exceed "
            f"max_kv_tokens={config.max_kv_tokens} even when it runs alone; set max_kv_tokens={prompt + new + window} "
            "or more"
        )


def cache_slots(config: EngineConfig, slots: Sequence[int], device: torch.device) -> int:
    """Returns the number of cache slots that take memory on a device: those of the requests in flight and of a dummy.

    slots: what each request needs, see `EngineConfig.slots_needed`.
    """
    in_flight = sorted(slots, reverse=True)[: config.max_batch]
    if not is_mapped(device):
        return (len(in_flight) + 1) * config.capacity
    of_rows = (-(-count // CAPACITY_STEP) * CAPACITY_STEP for count in (*in_flight, config.window))
    return sum(min(of_row, config.capacity) for of_row in of_rows)


def require_cache_fits(model: CachedLM, config: EngineConfig, slots: Sequence[int]) -> None:
    """Checks the memory before a run. Raises: ValueError if the KV cache and the logits of one verify pass exceed a
    device's available memory; nothing is checked if that is unknown.

    The message names the largest sizes that fit, if it is enough to lower one of them. slots: as for `cache_slots`.
    """
    probe = model.new_cache(1, 1)
    per_slot: Counter[torch.device] = Counter()
    for tensor in (*probe.keys, *probe.values):
        per_slot[tensor.device] += tensor.numel() * tensor.element_size()
    widest = "group" if config.group >= config.prefill_group else "prefill_group"
    least = {widest: 1, "capacity": max([config.window, *slots]), "max_batch": 1}
    for device, slot_bytes in per_slot.items():
        available = available_bytes(device)

        def needed(config: EngineConfig, slot_bytes: int = slot_bytes, device: torch.device = device) -> int:
            """Returns the bytes that a run with this config needs on the device."""
            rows, spare = min(len(slots), config.max_batch) + 1, max(config.group, config.prefill_group)
            trial = spare * config_to_try(config, model.attends_by_request).capacity
            longest = rows * config.capacity // (2 * model.n_layers)  # Linux maps no tensor larger than the memory
            at_once = max(cache_slots(config, slots, device), trial, longest)
            logits = config.group * config.window * model.d_vocab * model.dtype.itemsize
            states = bytes_of_states(probe, max(rows, spare), config.capacity, max(config.window, config.prefill_chunk))
            return at_once * slot_bytes + (logits + states) * (device == model.device)

        if available is None or needed(config) <= available:
            continue
        fits = [
            f"{name}={value}" for name in least if (value := _largest(needed, config, name, available, least[name]))
        ]
        remedy = f"largest that fits: {' or '.join(fits)}" if fits else "lower several of them together"
        raise ValueError(
            f"a cache for {min(len(slots), config.max_batch)} requests at once, for passes of "
            f"{getattr(config, widest)} ({widest}), with capacity {config.capacity}, and logits of {config.group} x "
            f"{config.window} tokens, need {bytes_text(needed(config))} on {device}; {bytes_text(available)} are "
            f"available; {remedy}"
        )


def _largest(
    needed: Callable[[EngineConfig], int], config: EngineConfig, name: str, available: int, least: int
) -> int | None:
    """Returns the largest value of a setting, from `least` up to that of the config, with which a run needs no more
    than the available bytes; None if there is none."""
    values = range(least, getattr(config, name))
    fits = bisect(values, False, key=lambda value: needed(replace(config, **{name: value})) > available)
    return values[fits - 1] if fits else None


# -- the records, which grow with every token


def require_records_fit(
    model: CachedLM,
    capture: CaptureConfig,
    layers: Sequence[int],
    requests: Sequence[tuple[int, int, int]],
) -> None:
    """Checks the memory before a run. Raises: ValueError if the estimated records of a run (rows, states, lens
    readings) exceed the machine's available memory.

    The message names the largest sizes that fit.

    capture: without Z if the lens reads later; `require_readings_fit` then checks the readings before they are made.
    requests: (prompt tokens, new tokens, samples n) of each prompt. Samples share the prompt's states.
    """
    states, reading = state_bytes(model, capture, layers), len(layers) * READING_BYTES * capture.reads_lens
    phases = set(capture.phases or ("prefill", "decode", "verify"))
    of_prompt = states if "prefill" in phases else 0
    of_token = TOKEN_BYTES + (states if phases & {"decode", "verify"} else 0) + reading
    of_prompt, of_token = of_prompt // capture.every, TOKEN_BYTES + (of_token - TOKEN_BYTES) // capture.every
    if capture.positions is not None or capture.keep is not None or not capture.keeps_status("committed"):
        of_prompt, of_token = 0, TOKEN_BYTES  # few states are kept, so none are counted
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
        f"{bytes_text(needed)} for what is kept of them; {bytes_text(available)} are available; largest that fits: "
        f"{fits or 'none of these prompts'}{bare}"
    )


def require_readings_fit(num_rows: int, layers: Sequence[int]) -> None:
    """Checks the memory before stored states are read. Raises: ValueError if the estimated readings of `num_rows` rows
    at these layers exceed the machine's available memory."""
    needed, available = num_rows * len(layers) * READING_BYTES, available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"lens readings of {num_rows} rows x {len(layers)} layers need {bytes_text(needed)}; "
            f"{bytes_text(available)} are available; read a part: cp.analysis.read_states(trace, "
            "cp.lenses.LogitLens(), layers=..., rows=...)"
        )


def state_bytes(model: CachedLM, capture: CaptureConfig, layers: Sequence[int]) -> int:
    """Returns the number of bytes of the states kept for one token. Left out: attention patterns, which grow with the
    token's position."""
    heads, width = model.head_shape
    probe = model.new_cache(1, 1)
    vectors, numbers = len(capture.state_sites) * len(layers), len(capture.state_sites) * model.d_model * len(layers)
    for site in set(HEAD_SHAPES).intersection(capture.heads):
        whose, width_of = HEAD_SHAPES[site]
        for layer in layers:
            held = (probe.keys if width_of == "key" else probe.values)[layer]
            count, numel = (heads, heads * width) if whose == "queries" else (held.shape[1], held.numel())
            vectors, numbers = vectors + count, numbers + numel
    if (shapes := list(state_shapes(model).values())) and RECURRENT in capture.heads:  # other layers keep as much, NaN
        vectors, numbers = vectors + shapes[0][0] * len(layers), numbers + prod(shapes[0]) * len(layers)
    for shape in row_shapes(model, module_places(model, capture.modules, layers)).values():
        vectors, numbers = vectors + prod(shape[:-1]), numbers + prod(shape)
    most_experts = max((one.top_k for one in layers_of(model).values()), default=0) if ROUTER in capture.heads else 0
    of_routing = 2 * torch.float32.itemsize * most_experts * len(layers)  # a layer without experts keeps as much
    if capture.dtype == INT8:
        return numbers + vectors * SCALE_BYTES + of_routing
    return numbers * state_dtype(model, capture).itemsize + of_routing


def state_dtype(model: CachedLM, capture: CaptureConfig) -> torch.dtype:
    """Returns the dtype of kept states, before they are rounded to int8: that of the capture settings, or the
    model's."""
    return kept_dtype(capture.dtype, model.dtype)


def bytes_text(count: int) -> str:
    """Returns text: a number of bytes, and the same in GiB."""
    return f"{count:,} bytes ({count / 2**30:.1f} GiB)"
