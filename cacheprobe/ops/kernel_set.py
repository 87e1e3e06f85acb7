"""Chooses, for a dtype on a device, whether the engine's runs use the Triton kernels, and says why."""

from collections.abc import Collection
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.ops import dispatch
from cacheprobe.ops.readout import Readout, read_logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels compute; their sums are in float32."""


class KernelReadout:
    """Computes Readouts of states in a Triton kernel; given logits are read by torch."""

    of_logits = staticmethod(read_logits)

    def of_states(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, target_token_ids: Tensor, top_k: int
    ) -> Readout:
        """Returns the Readout of the logits states weight^T + bias, from normalised states [n, m], an unembedding
        [v, m] and a bias [v] or None. The logits are not stored.

        Twin: ops.readout.read_logits of that product, as `kernels/` says for lens_topk.
        """
        return dispatch.read_states(states, None, 0.0, _dense(weight), target_token_ids, top_k, bias)


class KernelSet:
    """Computes the operations of a run in Triton kernels: products, norms, attention, writes to the cache, readings,
    and copies of captured states. Each token's bits are independent of the other tokens of its pass, if torch computes
    none of these operations.

    Twin: the references in `dispatch.OPERATIONS`.
    """

    def __init__(self, how: str, by_torch: Collection[str] = ()) -> None:
        """Names the kernels for the fingerprint. how: which code runs, such as "in Triton's interpreter".  by_torch:
        names of the operations that torch computes, because their kernel cannot run."""
        self.readout = KernelReadout()
        self.by_torch = tuple(by_torch)
        self.summary = "; by torch: ".join(filter(None, ("Triton kernels", ", ".join(by_torch))))
        self.text = self.summary.replace("Triton kernels", f"Triton {version('triton')} kernels {how}")
        self.store = None if "store_kv" in by_torch else dispatch.store_kv
        self.attend = None if "cached_attention" in by_torch else dispatch.cached_attention
        self.pack = None if "capture_pack" in by_torch else dispatch.pack_rows

    def __repr__(self) -> str:
        return f"KernelSet({self.text})"

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o], of values [..., i] and a weight [o, i]."""
        flat = _dense(values.reshape(-1, values.shape[-1]))
        return dispatch.matmul(flat, _dense(weight), bias).view(*values.shape[:-1], -1)

    def norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of values [..., m]."""
        return dispatch.rms_norm(_dense(values.reshape(-1, values.shape[-1])), weight, eps).view(values.shape)


class KernelChoice(NamedTuple):
    """Holds the KernelSet for a device, or None if no kernel can run there; and the reason, which names the operations
    that torch computes."""

    kernels: KernelSet | None
    reason: str


def choose_kernels(dtype: torch.dtype, device: torch.device | str) -> KernelChoice:
    """Returns the KernelChoice for models of a dtype on a device. torch computes the operations whose kernel fails its
    trial. The first call for a device compiles and tries the kernels."""
    if dtype not in DTYPES:
        return KernelChoice(None, f"the kernels do not compute {str(dtype).removeprefix('torch.')}")
    paths = dispatch.paths(device)
    by_torch = {name: path.reason for name, path in paths.items() if path.runs != dispatch.KERNEL}
    reason = "; ".join(f"{name}: {why}" for name, why in by_torch.items())
    if len(by_torch) == len(paths):
        return KernelChoice(None, reason if len({*by_torch.values()}) > 1 else by_torch["rms_norm"])
    how = next(path.reason for path in paths.values() if path.runs == dispatch.KERNEL)
    return KernelChoice(KernelSet(how, by_torch), reason or how)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
