"""Reads the weights of a transformers model: linear layers and norms, dtype, hash and checksum; and the tokens that end
its texts."""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from itertools import islice
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from cacheprobe.core.config import DTYPES
from cacheprobe.core.devices import Download
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.models.base import ModelError
from cacheprobe.models.quantised.packed import dense_weight, packed_modules
from cacheprobe.ops.compiled.queue import LLAMA, PLUS_ONE, ROUNDED_ONCE, NormKind

WRAPPED = "_original_component"
"""The name under which a component of a TransformerBridge keeps the module that it replaced."""


def plain_path(name: str) -> str:
    """Returns the dotted name of a module without the parts "_original_component" that a bridge's wrappers add."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def head_weights(module: LiveModule, heads: int) -> Tensor:
    """Returns the weights [h, d, m] of an attention output projection, split by head. module: the projection, which
    reads all `heads` heads side by side."""
    return output_rows(module).T.unflatten(0, (heads, -1))


def output_rows(module: LiveModule) -> Tensor:
    """Returns the weight of a linear module as [outputs, inputs], dequantised if it is packed."""
    weight = dense_weight(module)
    return weight.T if is_conv(module) else weight


def is_conv(module: nn.Module) -> bool:
    """Returns True for GPT-2's linear layer (Conv1D), which holds its weight as [inputs, outputs]."""
    return type(module).__name__ == "Conv1D"


def arrange_weights(model: nn.Module, by_output: bool) -> None:
    """Changes in place the order in memory of the weights of GPT-2's linear layers. by_output: the weights of each
    output lie side by side, as the compiled loops and the kernels read them; otherwise those of each input do, as
    torch does by itself. Shapes and values stay, and so does the memory that other parameters of `model` share with
    these weights, such as a bridge's query, key and value projections. Torch's products may round otherwise then."""
    weights = [module.get_parameter("weight") for module in model.modules() if is_conv(module)]
    sharing: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters() if weights else ():  # packed ones have no memory of their own
        sharing.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    for weight in weights:
        if weight.is_contiguous() != by_output:
            continue
        moved = weight.data.T.contiguous().T if by_output else weight.data.contiguous()
        old, new, start = max(weight.stride()), max(moved.stride()), int(weight.storage_offset())
        end = start + weight.numel()
        for parameter in sharing[weight.untyped_storage().data_ptr()]:
            if not start <= parameter.storage_offset() < end:  # another weight in the same memory
                continue
            across, along = divmod(int(parameter.storage_offset()) - start, int(old))
            strides = [{old: 1, 1: new}.get(stride, 1) for stride in parameter.stride()]
            parameter.data = moved.as_strided(parameter.shape, strides, along * new + across)


class Norm(NamedTuple):
    """Holds the weight, the epsilon and the kind of an RMSNorm."""

    weight: Tensor
    eps: float
    kind: NormKind = LLAMA


def rms_norm_of(module: LiveModule) -> Norm | None:
    """Returns the present Norm of a module that computes an RMSNorm; None for another module."""
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or weight is None or weight.dim() != 1 or module._modules:
        return None
    eps: object = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    own = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | tuple)}
    key = type(module), weight.dtype, len(weight), repr(sorted(own.items()))
    if key not in _NORM_KINDS:
        _NORM_KINDS[key] = _kind_of_norm(module, weight, eps)
    kind = _NORM_KINDS[key]
    return None if kind is None else Norm(weight, eps, kind)


_NORM_KINDS: dict[tuple[type, torch.dtype, int, str], NormKind | None] = {}
"""By class, dtype, width and settings of a module."""


@torch.no_grad()
def _kind_of_norm(module: LiveModule, weight: Tensor, eps: float) -> NormKind | None:
    """Returns the kind of RMSNorm that a module of one input computes, found by its values with a random weight; None
    if it computes something else."""
    inputs = signature(type(module).forward).parameters
    if weight.dtype == torch.float64 or len(inputs) != 2:  # in float64 its classes compute in float32
        return None
    draw = torch.Generator().manual_seed(0)
    values, own = (torch.randn(shape, generator=draw).to(weight) for shape in ((4, len(weight)), (len(weight),)))
    other = copy.copy(module)
    vars(other).pop("forward", None)
    other._parameters = {"weight": nn.Parameter(own, requires_grad=False)}
    try:
        found = other(values[None])[0]
    except Exception:  # some other module of one vector
        return None
    wide = values.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    for kind in (LLAMA, ROUNDED_ONCE, PLUS_ONE):
        rounds_first, added = kind
        scaled = wide.to(weight.dtype).float() if rounds_first else wide
        expected = ((own.float() + added) * scaled).to(weight.dtype)
        if torch.equal(found, expected):
            return kind
    return None


ROTATIONS_OF_PASSES = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the largest position of a pass."""


def one_dtype(bridge: LiveModule, name: str) -> torch.dtype:
    """Returns the torch.dtype that all weights of `bridge` have, except packed ones. Raises: ModelError for mixed or
    unsupported dtypes."""
    packed = packed_modules(bridge)
    dense = [p for name, p in bridge.named_parameters() if name.rpartition(".")[0] not in packed]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in dense})
    if len(dtypes) != 1:
        raise ModelError(
            f"{name} holds weights of two dtypes, {' and '.join(dtypes)}; convert it to one with .to(dtype)"
        )
    if dtypes[0] not in DTYPES:
        raise ModelError(f"{name} is in {dtypes[0]}; convert it to one of {', '.join(DTYPES)}")
    return dense[0].dtype


def stop_ids(model: LiveModule, tokenizer: LiveTokenizer) -> tuple[tuple[int, ...], str]:
    """Returns (token ids that end the texts of a transformers model, where they are named): of the generation config,
    else the config, else the tokenizer; ((), "") if none of the three names an end-of-sequence token."""
    sources = {
        "the generation config": getattr(model, "generation_config", None),
        "the model's config": getattr(model, "config", None),
        "the tokenizer": tokenizer,
    }
    for name, source in sources.items():
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return (tuple(sorted(eos)) if isinstance(eos, list | tuple) else (int(eos),)), name
    return (), ""


def checksum_of(named: Sequence[tuple[str, Tensor]], has_bytes_here: bool | None = None) -> str:
    """Returns a 128-bit checksum, as hex text, of the name, shape, dtype and bytes (on a GPU, sums of the bytes) of
    each weight in `named`.

    An edit through `weight.data` changes neither the address nor the version counter, so only the bytes reveal the
    edit.
    has_bytes_here: True hashes the bytes themselves; False hashes sums of the bytes, computed on the weight's device.
    Default: True for weights on the CPU.
    """
    digest, parts = xxhash.xxh3_128(), list[tuple[Tensor, ...]]()
    for _, weight in named:
        hashes_bytes = weight.device.type == "cpu" if has_bytes_here is None else has_bytes_here
        parts.append(() if hashes_bytes else _sums(_bytes_of(weight)))
    arrived = iter(Download([part for of in parts for part in of]).tensors())
    for (name, weight), of in zip(named, parts, strict=True):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for part in islice(arrived, len(of)) if of else [_bytes_of(weight)]:
            digest.update(part.numpy().data.cast("B"))
    return digest.hexdigest()


def _bytes_of(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().view(-1).view(torch.uint8)


def _sums(flat: Tensor) -> tuple[Tensor, ...]:
    """Returns three tensors of bytes from those of a weight: sums of 8-byte words along rows of 512 words, sums along
    columns, and the remaining bytes."""
    in_rows = len(flat) // 4096 * 4096  # bytes in whole rows of 512 words
    words = flat[:in_rows].view(torch.int64).view(-1, 512)
    return words.sum(1).view(torch.uint8), words.sum(0).view(torch.uint8), flat[in_rows:].clone()


def sha256_of(named: Sequence[tuple[str, Tensor]]) -> str:
    """Returns the first 16 hex digits of a SHA-256 over the names, shapes and bytes of the weights in `named`."""
    digest = hashlib.sha256()
    for name, weight in named:
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data.cast("B"))
    return digest.hexdigest()[:16]


def buffers_sha256(live: LiveModule) -> str:
    """Returns the first 16 hex digits of a SHA-256 over a model's buffers, such as a router's trained bias, sorted by
    name. Buffers of zeros are left out, since a bridge adds some; so are frequencies that each pass computes again."""
    named = [
        (plain_path(f"{path}.{name}"), buffer)
        for path, module in live.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if bool(buffer.any()) and not _is_recomputed(module, name)
    ]
    return sha256_of(sorted(named, key=lambda item: item[0]))


def _is_recomputed(module: LiveModule, name: str) -> bool:
    """Returns True for the frequencies of a rotary embedding that follow the length of the text."""
    kinds = getattr(module, "rope_type", "default")
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return name.endswith("inv_freq") and "original" not in name and any(kind in ROTATIONS_OF_PASSES for kind in kinds)


_Known = dict[int, tuple[object, list[tuple[int, int]], str]]
_KNOWN: ContextVar[_Known | None] = ContextVar("known checksums", default=None)
"""By id of a model: the model, (address, edit count) of each weight, and the checksum; None outside of
`hashing_once`."""


def checksum_once(model: object, named: Sequence[tuple[str, Tensor]]) -> str:
    """Returns the checksum of a model's weights; inside `hashing_once` the known one, if no weight was edited or
    moved."""
    known = _KNOWN.get()
    if known is None:
        return checksum_of(named)
    versions = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for _, weight in named]
    if id(model) not in known or known[id(model)][1] != versions:
        known[id(model)] = model, versions, checksum_of(named)
    return known[id(model)][2]


@contextmanager
def hashing_once() -> Iterator[None]:
    """Reads the bytes of each model's weights once inside the `with`, and again if a weight was edited or moved. Do not
    edit through `weight.data` there, which no edit count shows."""
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)
