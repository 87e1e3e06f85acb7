"""Finds in a plain transformers model which modules compute the residual stream (S), and what attention or a recurrent
mixer (T) and MLP (C) add to it.

Nothing is assumed of names: the modules are found by the values of one short forward. A model whose values do not add
up is refused.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from torch import Tensor

from cacheprobe.core.live import LiveConfig
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.watch import Call, Watched

_ROUNDINGS = 8
"""Number of times that a number of a block's output may have been rounded: the parts are exact, their sum is not."""
_MOST_PARTS = 24
_FACTORS = ("residual_multiplier", "residual_scale", "ssm_out_multiplier", "attention_out_multiplier")
"""Names, in configs, of numbers that a block may multiply its parts by."""


@dataclass(frozen=True)
class AddedPart:
    """Holds a module whose output, times `factor`, a block adds to the residual stream."""

    path: str
    factor: float


@dataclass(frozen=True)
class PlainBlock:
    """Holds where one block's states are: the block itself, its attention, and what it adds to the stream."""

    path: str
    attention: str
    """The module that writes keys and values; "" in a block without them."""
    mixer: str
    """The module that keeps a recurrent state; "" in a block without one."""
    attended: tuple[AddedPart, ...]
    """T: what attention or a mixer adds, or both in a block with both; none if the block has an MLP only."""
    mlp: tuple[AddedPart, ...]
    """C: one part, or several that are added, such as routed and shared experts; none if C is 0, as in Mamba."""
    input_factor: float = 1.0
    """Factor of the block's input in its output: S = input_factor * input + T + C. Gemma 4 scales the whole sum."""
    entry: str = ""
    """Module inside block 0 whose output the block adds to: RWKV's norm of the embeddings. "" if it is the input."""


@dataclass(frozen=True)
class JointProjection:
    """Holds the module that computes queries, keys and values of a layer together, and how they lie in its output."""

    path: str
    heads: int
    """Number of query heads."""
    sizes: tuple[int, int, int]
    """Numbers of a token's queries, keys and values, inside one group."""
    groups: int
    """1 if all queries come first, then all keys, then all values, as in GPT-2. Otherwise queries, keys and values of
    each of so many groups of heads are together, as in GPT-NeoX."""
    widths: tuple[int, int, int]
    """Width of a head's query, key and value."""

    def part(self, index: int, value: Tensor) -> Tensor:
        """Returns queries (index 0), keys (1) or values (2), [b, t, h, d], of the module's output [b, t, w]."""
        parts = value.unflatten(-1, (self.groups, -1)).split(self.sizes, -1)
        return parts[index].flatten(-2).unflatten(-1, (-1, self.widths[index]))


def find_joints(
    watched: Watched, blocks: Sequence[PlainBlock], shapes: Sequence[tuple[int, int, int]]
) -> dict[int, JointProjection]:
    """Returns the JointProjection of each layer that has one: a module inside the attention whose output holds the
    values that the layer wrote to the cache, and keys of the length of those that it wrote, which a rotation keeps.

    shapes: (number of key heads, key width, value width) of each layer.
    """
    found = {}
    for layer, (keys, values) in watched.written.items():
        groups, key_width, value_width = shapes[layer]
        inside = [call for call in watched.calls if call.path.startswith(f"{blocks[layer].attention}.")]
        for call, count in product(inside, (1, groups)):
            if call.value_out is None or call.value_out.dim() != 3:
                continue
            queries = call.value_out.shape[-1] - groups * (key_width + value_width)
            if queries <= 0 or queries % (groups * key_width):
                continue
            sizes = (queries // count, groups * key_width // count, groups * value_width // count)
            one = JointProjection(call.path, queries // key_width, sizes, count, (key_width, key_width, value_width))
            lengths = [each.double().norm(dim=-1) for each in (one.part(1, call.value_out).transpose(1, 2), keys)]
            if torch.equal(one.part(2, call.value_out).transpose(1, 2), values) and torch.allclose(*lengths, rtol=0.02):
                found.setdefault(layer, one)
    return found


def find_blocks(watched: Watched, config: LiveConfig, dtype: torch.dtype) -> list[PlainBlock]:
    """Returns the PlainBlock of every layer, in order.

    Adds to `watched` the last layers if they attend over the keys and values of earlier ones and the config says so.
    Raises: ModelError if layers share a module, run more than once, keep no keys and values, if something is added
    between blocks, or if a block's output is not its input plus parts.
    """
    _add_sharing_layers(watched, config)
    by_path: dict[str, list[Call]] = {}
    for call in watched.calls:
        by_path.setdefault(call.path, []).append(call)
    paths = _block_paths(watched, by_path)
    blocks, previous = [], None
    factors = _numbers(config, len(paths))
    for layer, path in enumerate(paths):
        call = _only_call(by_path[path], layer)
        assert call.value_in is not None
        if previous is not None and not torch.equal(previous, call.value_in):
            raise ModelError(f"something changes the residual stream between block {layer - 1} and block {layer}")
        previous = call.value_out
        inside = [c for c in watched.calls if call.began < c.began and c.ended < call.ended]
        attention, mixer = (one[layer][-1] if layer in one else "" for one in (watched.writers, watched.keepers))
        if mixer and (mixer == path or f"{attention}.".startswith(f"{mixer}.")):
            raise ModelError(
                f"several modules of block {layer} keep states, or its attention does; only one module beside "
                "attention can run token by token here"
            )
        state_modules, entry = [one for one in (attention, mixer) if one], ""
        wrote_at = watched.wrote_at.get(layer, call.began)
        found = _sum(call, state_modules, wrote_at, inside, factors, dtype)
        if found is None and layer == 0 and (first := _entry(call, inside)) is not None:
            entry = first.path
            found = _sum(replace(call, value_in=first.value_out), state_modules, wrote_at, inside, factors, dtype)
        if found is None and not state_modules:
            raise ModelError(
                f"block {layer} keeps nothing in the cache, and its output is not its input plus that of one module"
            )
        if found is None:
            raise ModelError(
                f"the output of block {layer} is not its input plus the outputs of one to three modules, so what "
                "attention and MLP add is unknown; BERT, for one, normalises the stream after each sum. In 16 bits a "
                "part may be too small to be found; then load it in float32"
            )
        blocks.append(PlainBlock(call.path, attention, mixer, *found, entry))
    return blocks


def _entry(call: Call, inside: Sequence[Call]) -> Call | None:
    """Returns the first module of a block, if it maps the block's input to a stream of the same shape."""
    first = min(inside, key=lambda one: one.began, default=None)
    if first is None or first.value_in is None or first.value_out is None or call.value_in is None:
        return None
    is_entry = torch.equal(first.value_in, call.value_in) and first.value_out.shape == call.value_in.shape
    return first if is_entry else None


def _only_call(calls: Sequence[Call], layer: int) -> Call:
    """Returns the one call of a block. Raises: ModelError if it ran more than once, or maps no stream to another."""
    if len(calls) != 1:
        raise ModelError(f"block {layer} runs {len(calls)} times in one forward")
    (call,) = calls
    if call.value_in is None or call.value_out is None or call.value_in.shape != call.value_out.shape:
        raise ModelError(f"block {layer} does not map one residual stream to another")
    if call.value_in.dim() != 3:
        raise ModelError(f"block {layer} has a stream of {call.value_in.dim()} dimensions instead of 3")
    return call


def _block_paths(watched: Watched, ran: Collection[str]) -> list[str]:
    """Returns the paths of all blocks, in order. ran: paths of all modules that ran.

    Blocks without keys, values and states, such as those of an MLP, are counted by their place in the list of modules.
    """
    found = {layer: _block_path(running) for layer, running in (watched.writers | watched.keepers).items()}
    if not found:
        raise ModelError("no layers keep keys and values; another memory has no rollback here")
    if len(set(found.values())) != len(found):
        raise ModelError("several layers with keys and values are in one block, or share their modules")
    folder = next(iter(found.values())).rpartition(".")[0]
    blocks = [path for path in ran if path.rpartition(".")[0] == folder and path.rpartition(".")[2].isdigit()]
    paths = [found.get(layer, f"{folder}.{layer}") for layer in range(len(blocks))]
    if sorted(paths) != sorted(blocks):
        raise ModelError(
            f"{len(blocks)} blocks run, and layers {sorted(found)} keep keys and values; these are not the places of "
            "their blocks"
        )
    return paths


def _add_sharing_layers(watched: Watched, config: LiveConfig) -> None:
    """Adds to `watched` the last `config.num_kv_shared_layers` layers, which write no keys and values: each attends
    over those of the last layer of its kind that writes some. Their attention is the module at the place where the
    others have theirs."""
    count, kinds = int(getattr(config, "num_kv_shared_layers", 0) or 0), getattr(config, "layer_types", None) or ()
    own = len(kinds) - count
    if count < 1 or sorted(watched.writers) != list(range(own)):
        return
    began = {call.path: call.began for call in watched.calls}
    for layer in range(own, len(kinds)):
        source = max((one for one in range(own) if kinds[one] == kinds[layer]), default=0)
        block = _block_path(watched.writers[source])
        place = f"{block.rpartition('.')[0]}.{layer}"
        running = [place + path.removeprefix(block) for path in watched.writers[source] if path.startswith(block)]
        if any(path not in began for path in running):
            raise ModelError(
                f"layer {layer} keeps no keys and values, and has no attention where layer {source} has it"
            )
        watched.writers[layer], watched.wrote_at[layer] = running, began[running[-1]]
        watched.sources[layer] = source


def _block_path(running: Sequence[str]) -> str:
    """Returns the path of the first running module that is an element of a list of modules."""
    found = next((path for path in running if path.rpartition(".")[2].isdigit()), None)
    if found is None:
        raise ModelError("the blocks are in no list of modules")
    return found


def _sum(
    call: Call, state_modules: list[str], wrote_at: int, inside: list[Call], factors: list[float], dtype: torch.dtype
) -> tuple[tuple[AddedPart, ...], tuple[AddedPart, ...], float] | None:
    """Returns (parts of T, parts of C, factor of the input) of a block; None if it is no sum of up to three modules.

    state_modules: modules of the block that write keys and values or keep a recurrent state. T has a part of each, or
    one part alone if nothing else is added.
    """
    assert call.value_in is not None and call.value_out is not None
    limit = _ROUNDINGS * torch.finfo(dtype).eps
    runs = Counter(c.path for c in inside)  # a module that runs twice, such as Phi's dropout, has no value of its own
    later = [c for c in inside if c.ended > wrote_at and c.value_out is not None and runs[c.path] == 1]
    parts = _distinct(_like(call.value_in, later))
    flat = {id(c): c.value_out.double().flatten() for c in (*parts, *later) if c.value_out is not None}
    ended = {path: max((c.ended for c in inside if c.path == path), default=wrote_at) for path in state_modules}
    state_modules = sorted(state_modules, key=lambda path: ended[path])
    for chosen in _choices(parts, 2, 3):
        if not state_modules or len(chosen) < len(state_modules):
            continue
        if not all(
            _is_attention(one, path, wrote_at, ended[path], [c for c in chosen if c is not one])
            for one, path in zip(chosen, state_modules, strict=False)
        ):
            continue
        if (fit := _fit(call, [flat[id(c)] for c in chosen], factors, limit)) is not None:
            pairs = tuple(AddedPart(c.path, f) for c, f in zip(chosen, fit[1], strict=True))
            return pairs[: len(state_modules)], pairs[len(state_modules) :], fit[0]
    alone = [c for c in _like(call.value_in, later) if c.path in state_modules] if state_modules else parts
    for (only,) in _choices(alone, 1):
        if (fit := _fit(call, [flat[id(only)]], factors, limit)) is not None:
            pair = (AddedPart(only.path, fit[1][0]),)
            return (pair, (), fit[0]) if state_modules else ((), pair, fit[0])
    return None


def _is_attention(first: Call, attention: str, wrote_at: int, attended_end: int, others: Sequence[Call]) -> bool:
    """Returns True if `first` carries the attention's result and no other part does: a module inside the attention or
    around it, or one that starts after it and before the others."""
    is_inside = first.path == attention or first.path.startswith(attention + ".")
    is_after = first.began > attended_end and all(first.ended < other.began for other in others)
    is_around = attention.startswith(first.path + ".")
    has_other = any(c.path == attention or c.path.startswith(attention + ".") for c in others)
    return (is_inside or is_after or is_around) and not has_other


def _like(stream: Tensor, calls: Sequence[Call]) -> list[Call]:
    """Returns the calls whose output has a number for each of the stream's: [b, t, m], or [b * t, m] as in OPT."""
    wanted = (stream.shape[-1], stream.numel())
    return [
        c for c in calls if c.value_out is not None and (c.value_out.shape[-1:].numel(), c.value_out.numel()) == wanted
    ]


def _distinct(calls: Sequence[Call]) -> list[Call]:
    """Returns calls with different outputs, last ended first. Of calls with equal outputs the last is kept: the
    outermost module."""
    kept: list[Call] = []
    for call in sorted(calls, key=lambda one: -one.ended):
        assert call.value_out is not None
        flat = call.value_out.flatten()
        if not any(torch.equal(flat, other.value_out.flatten()) for other in kept if other.value_out is not None):
            kept.append(call)
    return kept[:_MOST_PARTS]


def _choices(parts: Sequence[Call], *counts: int) -> Iterator[tuple[Call, ...]]:
    """Yields choices of so many parts, each in the order in which the modules ended. Later modules come first."""
    for count in counts:
        for chosen in combinations(parts, count):
            yield tuple(sorted(chosen, key=lambda one: one.ended))


def _fit(
    call: Call, values: Sequence[Tensor], factors: Sequence[float], limit: float
) -> tuple[float, tuple[float, ...]] | None:
    """Returns (factor of a block's input, factor of each part) that add up to its output; None if there are none.

    In 16 bits a scale of .95 is within the rounding of 1, so of several that fit the closest counts.
    """
    assert call.value_in is not None and call.value_out is not None
    before, after = call.value_in.double().flatten(), call.value_out.double().flatten()
    fits = []
    own = (*call.module.parameters(recurse=False), *call.module.buffers(recurse=False))
    scales = [1.0, *(float(one) for one in own if one.numel() == 1)]  # that the block may give to its whole sum
    for of_input in dict.fromkeys(scales):
        found = _factors(of_input * before, after, values, [of_input * factor for factor in factors], limit)
        if found is not None:
            terms = sum((f * value for f, value in zip(found, values, strict=True)), of_input * before)
            fits.append((float((terms - after).square().sum()), of_input, found))
    return min(fits)[1:] if fits else None


def _factors(
    stream_in: Tensor, stream_out: Tensor, parts: Sequence[Tensor], known: list[float], limit: float
) -> tuple[float, ...] | None:
    """Returns a factor for each part with which the parts and the input add up to the output, each number as far as
    rounding goes; None if there are none, or if a part is not needed.

    Each number has a limit of its own, so that a few large ones do not hide what is missing in others.
    """
    fits = []
    for factors in product(known, repeat=len(parts)):
        terms = [factor * part for factor, part in zip(factors, parts, strict=True)]
        limits = limit * (stream_in.abs() + stream_out.abs() + sum(term.abs() for term in terms))
        error = stream_in + sum(terms) - stream_out
        if bool((error.abs() <= limits).all()) and all(bool((term.abs() > limits).any()) for term in terms):
            fits.append((float(error.square().sum()), factors))
    return min(fits)[1] if fits else None


def _numbers(config: LiveConfig, num_layers: int) -> list[float]:
    """Returns 1, and the factors of the residual stream that a config may name."""
    named = [getattr(config, name, None) for name in _FACTORS]
    depth = getattr(config, "scale_depth", None)
    numbers = [1.0, *(float(one) for one in named if isinstance(one, int | float))]
    if isinstance(depth, int | float):
        numbers.append(float(depth) / num_layers**0.5)
    return list(dict.fromkeys(numbers))
