"""How much memory a reading takes: watched allocation by allocation, at SmolLM2's own sizes."""

from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import cacheprobe as cp
from cacheprobe.lenses.base import Lens
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.trace.recording.lens_reader import LENS_TILE, LensReader, Queued
from tests.compiled import on_loops

LAYERS, WINDOW, WIDTH, VOCAB = 30, 16, 576, 49152


class Largest(TorchDispatchMode):
    """The most elements that any tensor of each dtype had, of all that were made while it is on; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        for tensor in tensors_of(made):
            if tensor.untyped_storage().data_ptr() not in given:
                self.elements[tensor.dtype] = max(self.elements.get(tensor.dtype, 0), tensor.numel())
        return made


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@cache
def wide() -> PlainLM:
    """Random weights; one layer is enough, since only the last step is asked of it."""
    shape = dict(hidden_size=WIDTH, vocab_size=VOCAB, intermediate_size=64, num_hidden_layers=1, num_attention_heads=9)
    config = LlamaConfig(**shape, num_key_value_heads=3, tie_word_embeddings=True, eos_token_id=None)
    torch.manual_seed(0)
    return cp.load_model(LlamaForCausalLM(config).to(torch.bfloat16).eval(), products="torch")


class Careless(LogitLens):
    """As the logit lens, but it widens all that it reads."""

    def logits(self, model, states, layers):
        return super().logits(model, states, layers).float()


def largest_of(lens: Lens, layers: int = LAYERS) -> dict[torch.dtype, int]:
    """What the reading of a window of `layers` layers allocates, by dtype."""
    reader = LensReader(wide(), lens, top_k=5)
    states = torch.randn(WINDOW, layers, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with Largest() as largest:
        for row in range(WINDOW):
            reader.queue_resolved(Queued(row, row, states[row], torch.arange(layers), target=7))
        columns = reader.take()
    assert len(columns["entropy_nats"]) == layers * WINDOW
    return largest.elements


def test_the_loops_hold_no_logits() -> None:
    """They hold states and sums, as many for 480 vectors of a tile as for any number of windows."""
    of_torch = largest_of(LogitLens())
    model = on_loops(wide())
    try:
        found = largest_of(LogitLens())
    finally:
        model.operations = None
    assert found[torch.bfloat16] < of_torch[torch.bfloat16] // 50
    assert found[torch.float32] <= of_torch[torch.float32]


def test_no_window_is_held_in_float32() -> None:
    """480 vectors of SmolLM2's vocabulary: logits a tile at a time in bfloat16, a fraction of a tile in float32."""
    found = largest_of(LogitLens())
    assert found[torch.float32] <= LAYERS * WINDOW * VOCAB // 8
    assert found[torch.bfloat16] == LENS_TILE * VOCAB
    assert largest_of(LogitLens(), layers=2 * LAYERS) == found, "memory grows with layers"
    assert largest_of(Careless())[torch.float32] > found[torch.float32], "the control: what is widened is seen"
