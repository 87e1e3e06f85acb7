"""Chooses, for a dtype on a device, whether the engine's runs use the Triton kernels, and says why."""

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
    and copies of captured states. Each token's bits are independent of the other tokens of its pass.

    Twin: the references in `dispatch.OPERATIONS`.
    """

    store = staticmethod(dispatch.store_kv)
    attend = staticmethod(dispatch.cached_attention)

    def __init__(self, how: str) -> None:
        """Names the kernels for the fingerprint. how: which code runs, such as "in Triton's interpreter"."""
        self.readout = KernelReadout()
        self.text = f"Triton {version('triton')} kernels {how}"

    def __repr__(self) -> str:
        return f"KernelSet({self.text})"

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o], of values [..., i] and a weight [o, i]."""
        flat = _dense(values.reshape(-1, values.shape[-1]))
        return dispatch.matmul(flat, _dense(weight), bias).view(*values.shape[:-1], -1)

    def norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of values [..., m]."""
        return dispatch.rms_norm(_dense(values.reshape(-1, values.shape[-1])), weight, eps).view(values.shape)

    def pack(self, states: Tensor, rows: Tensor, out: Tensor) -> None:
        """Writes the state vectors numbered `rows` of states [b, t, m] to `out` [n, m], as `ops.references.pack_rows`
        says."""
        dispatch.pack_rows(states, rows, out)


class KernelChoice(NamedTuple):
    """Holds the KernelSet for a device, or None if runs do not use the kernels, and the reason."""

    kernels: KernelSet | None
    reason: str


def choose_kernels(dtype: torch.dtype, device: torch.device | str) -> KernelChoice:
    """Returns the KernelChoice for models of a dtype on a device. Runs use all kernels, or none if one of them fails
    its trial: a mixture would promise no bits. The first call for a device compiles and tries them."""
    if dtype not in DTYPES:
        return KernelChoice(None, f"the kernels do not compute {str(dtype).removeprefix('torch.')}")
    for name, path in dispatch.paths(device).items():
        if path.runs != dispatch.KERNEL:
            return KernelChoice(None, f"{name}: {path.reason}")
    reason = dispatch.matmul.path(device).reason
    return KernelChoice(KernelSet(reason), reason)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
