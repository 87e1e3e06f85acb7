"""Facts of a wrapped model: its dtype, the tokens that end its texts, its weights' hash; and of the platform."""

import hashlib
import os
from typing import Any

import torch
import transformers

from cacheprobe.config import DTYPES
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


def platform_facts() -> dict[str, str | int | float]:
    """What of this machine and its libraries may change bits, whatever the model."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }


def sha256_of(named: list[tuple[str, torch.nn.Parameter]]) -> str:
    digest = hashlib.sha256()
    for name, weight in named:
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B"))
    return digest.hexdigest()[:16]
