"""Defines the functions that create interventions: zero, replace, add, mean, resample, swap and steer, whose vectors
may be read from files.

Their keyword arguments are the fields of an Intervention, with the same meaning; `Where` lists them. A site may be a
module of the model, a hook point of TransformerLens, or a block as nnsight names it: see `core.hook_names.place_of`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Unpack, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheprobe.core.hook_names import RECURRENT, place_of
from cacheprobe.core.records import Request
from cacheprobe.edits.interventions.base import Intervention, OnRequest, Timed, Where, as_wide, checked_fields
from cacheprobe.lenses.dictionaries.files import first_bytes
from cacheprobe.models.quantised.gguf import read_header


@runtime_checkable
class RecordedStates(Protocol):
    """Defines the members of a Trace that `swap` uses."""

    @property
    def requests(self) -> Sequence[Request]:
        """All requests of the run."""
        ...

    @property
    def meta(self) -> Mapping[str, object]:
        """Metadata of the run."""
        ...

    def states(self, site: str, layer: int, request_id: int) -> Tensor:
        """Returns a request's states at a site and layer, [p, m], one for each position."""
        ...

    def heads(self, site: str, layer: int, request_id: int) -> Tensor:
        """Returns a request's head activations at a head site and layer, [p, h, d], one for each position."""
        ...


def zero(**where: Unpack[Where]) -> Intervention:
    """Returns an Intervention that sets the states to zero."""
    return _intervention("zero", "replace", torch.zeros(1, 1), where)


def replace(vectors: Tensor, **where: Unpack[Where]) -> Intervention:
    """Returns an Intervention that sets the states to `vectors`: [m] for all positions, or [n, m], one for each.

    For a head: [d] or [n, d].
    """
    return _intervention("replace", "replace", vectors, where)


def add(vectors: Tensor, **where: Unpack[Where]) -> Intervention:
    """Returns an Intervention that adds `vectors` to the states: [m] for all positions, or [n, m], one for each.

    For a head: [d] or [n, d]. The sum is computed in the model's dtype.
    """
    return _intervention("add", "add", vectors, where)


def mean(states: Tensor, **where: Unpack[Where]) -> Intervention:
    """Returns an Intervention that sets each state to the mean of `states` [n, m], such as `trace.states("S", 3, 0)`.

    The mean is computed in float32, or in float64 for float64 states.
    Source: mean ablation of Wang et al. 2022 (arXiv 2211.00593), section 2.1.
    """
    return _intervention("mean", "replace", as_wide(_checked_states(states, "mean")).mean(0), where)


def resample(states: Tensor, *, seed: int = 0, **where: Unpack[Where]) -> Intervention:
    """Returns an Intervention that sets each position's state to one of `states` [n, m], drawn from (seed, position).

    A position that is computed again gets the same state.

    Source: resample ablation of causal scrubbing (Chan et al. 2022).
    """
    return _intervention("resample", "replace", _checked_states(states, "resample"), where, seed)


def _intervention(name: str, action: str, vectors: Tensor, where: Where, seed: int | None = None) -> Intervention:
    """Returns the Intervention of a function of this module. where: the function's keyword arguments."""
    fields = checked_fields(name, where, Where)
    site, layer = place_of(fields.pop("site"), fields.pop("layer", None))
    return Intervention(name=name, action=action, vectors=vectors, site=site, layer=layer, seed=seed, **fields)


def steer(
    vectors: "Mapping[int, Tensor] | str | Path", strength: float = 1.0, *, site: str = "S", **where: Unpack[OnRequest]
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each layer of `vectors`, which adds `strength` times the layer's vector.

    vectors: layer -> [m]; or the path of a control vector of repeng (.gguf), or of a safetensors file with a layer's
    number in each key, such as "12", "layer.12" or "direction.12".
    Raises: ValueError or OSError for a file that cannot be read, see `read_steering`.
    """
    checked_fields("steer", where, OnRequest)
    by_layer = vectors if isinstance(vectors, Mapping) else read_steering(vectors)
    if not by_layer:
        raise ValueError("steer: there is no vector, so nothing would change")
    return tuple(
        add(strength * as_wide(vector), site=site, layer=layer, **where) for layer, vector in sorted(by_layer.items())
    )


def swap(
    trace: RecordedStates, a: int, b: int, *, site: str, layer: int | None = None, head: int | None = None,
    **when: Unpack[Timed],
) -> tuple[Intervention, Intervention]:  # fmt: skip
    """Returns two Interventions: one sets states of request a to those recorded for request b; the other does the
    reverse.

    trace: a run of both requests without interventions. For a head of T, its z is exchanged; the run must have kept z
    with CaptureConfig(heads=("z",)), or recurrent states with heads=("recurrent",).
    `positions` must be given. In the new run, the two prompts must have the same lengths as in `trace`.
    Raises: ValueError if the trace lacks a request or one of the states, if the prompts of a and b differ in length,
    for recurrent states recorded in 16 bits, and for a trace of a run with interventions.
    Source: interchange interventions, Geiger et al. 2021 (arXiv 2106.02997), section 3.
    """
    fields = checked_fields("swap", when, Timed)
    site, layer = place_of(site, layer)
    requests = {request.request_id: request for request in trace.requests}
    if missing := [r for r in (a, b) if r not in requests]:
        raise ValueError(f"swap: no request {missing[0]} in the trace; it has 0 to {len(requests) - 1}")
    lengths = [requests[r].num_prompt_tokens for r in (a, b)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"swap: the prompts of requests {a} and {b} have {lengths[0]} and {lengths[1]} tokens, so their positions "
            "do not mean the same; use prompts of one length, or replace() with the states that you mean"
        )
    if site == "pre":
        raise ValueError("swap: a trace keeps sites S, T, C and recurrent, and z of heads; swap one of those")
    if fields.get("positions") is None:
        raise ValueError("swap: say which positions= to swap, such as range(4, 9)")
    if "head" in trace.meta:
        raise ValueError(
            "swap: this trace is of a draft head; use replace() with trace.head.vectors(...), and the layer's "
            "number after the model's layers"
        )
    if trace.meta.get("interventions"):
        raise ValueError("swap: the trace's own run was changed by interventions; take a trace of a plain run")

    def one(target: int, source: int) -> Intervention:
        """Returns the Intervention that sets states of request `target` to those of request `source`."""
        blank = Intervention(
            name="swap", action="replace", vectors=torch.zeros(1, 1), request_id=target, site=site, layer=layer,
            head=head, **fields,
        )  # fmt: skip
        if blank.head is None and site != RECURRENT:
            states = trace.states(*blank.place, source)
        else:
            states = trace.heads(*blank.place, source)
            if site == RECURRENT:
                _check_recurrent(trace, layer, source, states)
            states = states.flatten(1) if blank.head is None else states[:, blank.head]
        if max(blank.positions) >= len(states):
            raise ValueError(
                f"swap: position {max(blank.positions)} lies outside request {source}, which computed 0 to "
                f"{len(states) - 1}"
            )
        vectors = states[list(blank.positions)]
        return dataclasses.replace(blank, vectors=vectors, num_prompt_tokens=lengths[0])

    return one(a, b), one(b, a)


def _check_recurrent(trace: RecordedStates, layer: int, request_id: int, states: Tensor) -> None:
    """Raises: ValueError if the states [p, h, d] that a trace holds of a layer are of none, or rounded to 16 bits."""
    if bool(states.isnan().all()):
        capture = trace.meta["capture"]
        layers = capture["layers"] if isinstance(capture, Mapping) else ()
        kept = [n for n in layers if not bool(trace.heads(RECURRENT, n, request_id).isnan().all())]
        raise ValueError(
            f"swap: layer {layer} has no recurrent state; layers with one: {', '.join(map(str, kept)) or 'none'}"
        )
    if states.dtype.itemsize < torch.float32.itemsize:
        raise ValueError(
            f"swap: the recurrent states were recorded in {states.dtype}, and the cache may keep float32, which a swap "
            'would round; record them with CaptureConfig(heads=("recurrent",), dtype="float32")'
        )


def _checked_states(states: Tensor, what: str) -> Tensor:
    """Returns `states` unchanged. Raises: ValueError unless the tensor is [n, m] with n >= 1."""
    if states.dim() != 2 or not len(states):
        raise ValueError(f"{what}: states must be [n, m] with at least one row, got {list(states.shape)}")
    return states


GGUF_KEY = re.compile(r"direction\.(\d{1,4})")
KEY = re.compile(r"(?:\D*\.)?(\d{1,4})")
MOST_NUMBERS = 2**28
"""In one file, 1 GiB in float32: more is no steering vector."""


def read_steering(path: "str | Path") -> dict[int, Tensor]:
    """Returns layer -> vector [m] in float32. The layer's number is that of the block whose output is changed.

    path: a .gguf file as repeng's `ControlVector.export_gguf` and llama.cpp write it, with tensors direction.LAYER; or
    a .safetensors file whose keys end in a layer's number, such as "12" or "layer.12".
    Source: github.com/vgel/repeng, ControlVector.export_gguf.
    Raises: ValueError for a file of another kind, a broken one, keys without a layer, a layer that is there twice,
    tensors that are not [m], vectors of different widths, and numbers that are not finite; OSError for a file that
    cannot be opened.
    """
    path = Path(path)
    readers = {".gguf": _gguf, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path}: steering vectors are read from .gguf and .safetensors files")
    first_bytes(path, 1)  # a file that is not there gives its own error
    vectors: dict[int, Tensor] = {}
    for layer, vector in readers[path.suffix](path):
        if layer in vectors:
            raise ValueError(f"{path}: layer {layer} is there twice")
        if vector.dim() != 1 or not vector.numel():
            raise ValueError(f"{path}: the vector of layer {layer} must be [m], got {list(vector.shape)}")
        if not bool(torch.isfinite(vector).all()):
            raise ValueError(f"{path}: the vector of layer {layer} holds NaN or infinity")
        vectors[layer] = vector
    widths = sorted({len(vector) for vector in vectors.values()})
    if len(widths) != 1:
        raise ValueError(f"{path}: the vectors have the widths {widths}, which must be one")
    return dict(sorted(vectors.items()))


def _safetensors(path: Path) -> Iterator[tuple[int, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                if (found := KEY.fullmatch(key)) is None:
                    raise ValueError(f"{path}: key {key!r:.60} does not end in a layer's number")
                if math.prod(file.get_slice(key).get_shape()) > MOST_NUMBERS:
                    raise ValueError(f"{path}: {key} holds more than {MOST_NUMBERS} numbers")
                tensor = file.get_tensor(key)
                if not tensor.is_floating_point():
                    raise ValueError(f"{path}: {key} holds {tensor.dtype}, not floating-point numbers")
                yield int(found[1]), tensor.float()
    except (SafetensorError, OverflowError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({error!s:.120})") from error


def _gguf(path: Path) -> Iterator[tuple[int, Tensor]]:
    from gguf import GGUFReader, dequantize

    if sum(read_header(path).elements.values()) > MOST_NUMBERS:
        raise ValueError(f"{path} holds more than {MOST_NUMBERS} numbers: it is a model, not a steering vector")
    try:
        tensors = GGUFReader(path).tensors
    except Exception as error:  # the reader has no class of errors of its own
        raise ValueError(f"{path} is no whole gguf file ({type(error).__name__}: {error!s:.120})") from error
    for tensor in tensors:
        if (found := GGUF_KEY.fullmatch(tensor.name)) is None:
            raise ValueError(f"{path}: tensor {tensor.name!r:.60} is not named direction.LAYER: no control vector")
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{path}: {tensor.name} is of a type that is not read ({error!s:.80})") from error
        yield int(found[1]), torch.from_numpy(numbers.copy()).float()
