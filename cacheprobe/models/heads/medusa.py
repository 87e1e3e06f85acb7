"""Defines MedusaLM, which runs Medusa draft heads as one model, and loads them from folders."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from cacheprobe.core.hook_names import ATTENTION_SITES
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.heads.files import HeadFiles, open_head
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.models.hf.lm import Head
from cacheprobe.models.plain.structure import AddedPart, PlainBlock
from cacheprobe.models.settings import one_at_a_time

_BLOCK = re.compile(r"(?:[a-z_]+\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)")
_UNEMBEDDING = re.compile(r"lm_heads\.(\d+)\.weight|(?:[a-z_]+\.)?(\d+)\.\d+\.weight")


class MedusaHeads(nn.Module):
    """Computes k Medusa heads side by side. The stream [b, k, k * m] has a row for each head, which is zero outside of
    the m numbers of this head. So one matrix [v, k * m] is the unembedding of all heads.

    Each layer adds silu(W x + b) to the stream, with a W [m, m] and a b [m] for each head.
    """

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], unembedding: Tensor) -> None:
        """blocks: W [k, m, m] and b [k, m] of each layer.  unembedding: [v, k * m]."""
        super().__init__()
        self.layers = nn.ModuleList(_Layer(*block) for block in blocks)
        self.unembed = nn.Linear(unembedding.shape[1], len(unembedding), bias=False, device="meta")
        self.unembed.weight = nn.Parameter(unembedding, requires_grad=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Returns the stream [b, k, k * m] after the last layer."""
        for layer in self.layers:
            stream = layer(stream)
        return stream


class _Layer(nn.Module):
    """Adds the output of `added` to the stream."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.added = _Added(weight, bias)

    def forward(self, stream: Tensor) -> Tensor:
        """Returns the stream [b, k, k * m] after the layer."""
        return stream + self.added(stream)


class _Added(nn.Module):
    """Computes silu(W x + b) of each head's own numbers."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(one, requires_grad=False) for one in (weight, bias))

    def forward(self, stream: Tensor) -> Tensor:
        """Returns what the layer adds, [b, k, k * m]."""
        own = stream.unflatten(-1, (len(self.weight), -1)).diagonal(dim1=1, dim2=2).permute(2, 0, 1)  # [k, b, m]
        return beside(silu(own @ self.weight.mT + self.bias[:, None]).transpose(0, 1))


def beside(own: Tensor) -> Tensor:
    """Returns a stream [b, k, k * m] of each head's own numbers [b, k, m]."""
    return own.mT.diag_embed().permute(0, 2, 3, 1).flatten(2)


class MedusaLM(DraftHeadLM):
    """Runs k Medusa heads over the target's state of one position, as a model whose rows are the heads. From the state
    of position i, head j (from 0) drafts the token of position i + 2 + j.

    A residual block is a layer: C is what it adds, S is the stream after it, T is 0, as in a block without attention.
    The heads have no space in common: a state is [k * m], and row j is zero outside of the m numbers of head j.
    Source: Medusa, Cai et al. 2024 (arXiv 2401.10774).
    Twin: tests.twins.block_heads_slowly.medusa_logits, close(1e-5) in float32.
    """

    lacks = ATTENTION_SITES

    def __init__(self, live: MedusaHeads, target: CachedLM, name: str) -> None:
        """live: the heads.  target: the model whose last state they read, after its final norm."""
        super().__init__(live, target.tokenizer, name, "")
        self.model, self.norm, self.target_sites = live, target.output_parts().norm, (("S", target.n_layers - 1),)
        self.n_layers, self.d_model, self.d_vocab = len(live.layers), live.unembed.in_features, target.d_vocab
        self.num_heads = self.d_model // target.d_model
        self.n_ctx, self.head_shape, self.prepend_bos = target.n_ctx, (0, 0), target.prepend_bos
        self.stop_token_ids, self.stop_source = target.stop_token_ids, target.stop_source
        parts = [(AddedPart(f"layers.{layer}.added", 1.0),) for layer in range(self.n_layers)]
        self.blocks = [PlainBlock(f"layers.{layer}", "", "", (), part) for layer, part in enumerate(parts)]
        self.layer_shapes = [(0, 0, 0)] * self.n_layers
        self.head = Head(nn.Identity(), live.unembed, nn.Identity())
        self.hooked_module, self.listeners, self.attention_listeners = live, {}, {}

    @property
    def attends_by_request(self) -> bool:
        """False: there is no attention."""
        return False

    @one_at_a_time()
    @torch.inference_mode()
    def run(self, states: Tensor) -> Tensor:
        """Returns the residual stream [b, k, k * m] of the heads after their last layer.

        states: [b, 1, m], those of the target at `target_sites`."""
        self.token_shape = (len(states), self.num_heads)
        given = self.norm(states.to(self.device, self.dtype))
        return self.model(beside(given.expand(-1, self.num_heads, -1)))

    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        raise ModelError(f"{self.name} reads states of its target, and no tokens; call run(states)")

    def whole_forward(self, token_ids: Tensor) -> Tensor:
        """Raises: ModelError, because the heads read states of their target, and no tokens."""
        raise ModelError(f"{self.name} reads states of its target, and no tokens; call run(states)")

    def cache_layers(self) -> tuple[Sequence[tuple[int, int, int]], Sequence[torch.device]]:
        """Returns shapes without keys and values for each layer, and their device."""
        return self.layer_shapes, [self.device] * self.n_layers

    def fingerprint_of_path(self) -> dict[str, str | int | float]:
        """Returns what a fingerprint says of this path: its name, and the number of heads."""
        return {"path": "heads", "medusa_heads": self.num_heads}


class _Names(NamedTuple):
    """Holds the names of the stored tensors."""

    blocks: dict[tuple[int, int], str]
    """(head, block) -> name of W."""
    biases: dict[tuple[int, int], str]
    """(head, block) -> name of b, if there is one."""
    unembeddings: dict[int, str]


def load_medusa(folder: "str | Path", target: CachedLM) -> MedusaLM:
    """Returns the Medusa heads in a folder, for this target.

    The tensors are in Medusa's own layout (`0.0.linear.weight`, `0.1.weight`; medusa_lm_head.pt or safetensors) or in
    vLLM's (`blocks.0.layers.0.weight`, `lm_heads.0.weight`). Heads and blocks are counted by these names: config.json
    may say another number, since published ones do.
    Raises: ValueError, with the name of what does not fit, for heads of another model (width, vocabulary), absent
    tensors, or others; and for a torch file that holds more than tensors.
    """
    files, name = open_head(folder, "medusa_lm_head.pt"), Path(folder).name
    stored = _names(files, name)
    _require_shapes(files, stored, target, name)

    def read(one: str | None) -> Tensor:
        """Returns a tensor; zeros [m] for an absent bias."""
        tensor = torch.zeros(target.d_model) if one is None else files.tensor(one)
        return tensor.to(target.device, target.dtype)

    heads, pairs = sorted(stored.unembeddings), []
    for layer in range(len(stored.blocks) // len(heads)):
        weights = [read(stored.blocks[head, layer]) for head in heads]
        biases = [read(stored.biases.get((head, layer))) for head in heads]
        pairs.append((torch.stack(weights), torch.stack(biases)))
    unembedding = torch.cat([read(stored.unembeddings[head]) for head in heads], 1)
    return MedusaLM(MedusaHeads(pairs, unembedding), target, name)


def _names(files: HeadFiles, name: str) -> _Names:
    """Returns the names of a folder's tensors. Raises: ModelError for an unknown one, and if one is missing."""
    found = _Names({}, {}, {})
    for stored in files.shapes:
        if (match := _UNEMBEDDING.fullmatch(stored)) is not None:
            found.unembeddings[int(match[1] or match[2])] = stored
        elif (match := _BLOCK.fullmatch(stored)) is not None:
            of_kind = found.biases if match[3] == "bias" else found.blocks
            of_kind[int(match[1]), int(match[2])] = stored
        else:
            raise ModelError(f"{name} holds {stored}, which Medusa heads do not have")
    heads = range(len(found.unembeddings))
    layers = range(len(found.blocks) // max(1, len(heads)))
    wanted = {(head, layer) for head in heads for layer in layers}
    is_whole = {*found.unembeddings} == {*heads} and {*found.blocks} == wanted and {*found.biases} <= wanted
    if not (is_whole and wanted):
        raise ModelError(
            f"{name} must hold one unembedding for each head, and equally many blocks, and has unembeddings of heads "
            f"{sorted(found.unembeddings)}, and (head, block) {sorted(found.blocks)}; get the whole file again"
        )
    return found


def _require_shapes(files: HeadFiles, stored: _Names, target: CachedLM, name: str) -> None:
    """Raises: ModelError if a tensor has another width or vocabulary than the target."""
    m = target.d_model
    shapes = dict.fromkeys(stored.blocks.values(), (m, m)) | dict.fromkeys(stored.biases.values(), (m,))
    for one, shape in (shapes | dict.fromkeys(stored.unembeddings.values(), (target.d_vocab, m))).items():
        if files.shapes[one] != shape:
            raise ModelError(
                f"{name} is for another model: {one} is of shape {files.shapes[one]}, for {target.name} it would be "
                f"{shape}; load it with the model that it was trained for"
            )
