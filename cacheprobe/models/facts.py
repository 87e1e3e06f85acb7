"""Facts of a wrapped model: its dtype, the tokens that end its texts, its weights' hash and checksum."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from cacheprobe.core.config import DTYPES
from cacheprobe.models.base import ModelError


def one_dtype(bridge: Any, name: str) -> torch.dtype:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in bridge.parameters()})
    if len(dtypes) != 1:
        raise ModelError(
            f"{name} holds weights of two dtypes, {' and '.join(dtypes)}; convert it to one with .to(dtype)"
        )
    if dtypes[0] not in DTYPES:
        raise ModelError(f"{name} is in {dtypes[0]}; convert it to one of {', '.join(DTYPES)}")
    return next(bridge.parameters()).dtype


def stop_token_ids(bridge: Any) -> tuple[int, ...]:
    """End-of-sequence ids by the model's generation config, its config or its tokenizer, whichever speaks first."""
    model = bridge.original_model
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), bridge.tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            return tuple(sorted(eos)) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def checksum_of(named: Sequence[tuple[str, Tensor]], has_bytes_here: bool | None = None) -> str:
    """Returns 128 bits of every weight's name, shape and bytes: at the speed of memory, so that each run can ask.

    An edit through `weight.data` changes neither address nor edit count, and so is seen in the bytes alone.
    has_bytes_here: hash the bytes themselves, else sums of them that are made where the weight is. Default: whether it
        is on the CPU.
    """
    digest = xxhash.xxh3_128()
    for name, weight in named:
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().contiguous().view(-1).view(torch.uint8)
        is_here = flat.device.type == "cpu" if has_bytes_here is None else has_bytes_here
        for part in [flat] if is_here else _sums(flat):
            digest.update(part.cpu().view(torch.uint8).numpy().data.cast("B"))
    return digest.hexdigest()


def _sums(flat: Tensor) -> Iterator[Tensor]:
    """Of 8 bytes each, by rows of 512 and by columns: what is moved about changes one of them; then the bytes left."""
    in_rows = len(flat) // 4096 * 4096
    words = flat[:in_rows].view(torch.int64).view(-1, 512)
    yield from (words.sum(1), words.sum(0), flat[in_rows:])


def sha256_of(named: list[tuple[str, torch.nn.Parameter]]) -> str:
    digest = hashlib.sha256()
    for name, weight in named:
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B"))
    return digest.hexdigest()[:16]
