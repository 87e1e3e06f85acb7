"""Passes that a tape computes have the bits of the modules. Which passes are taped, and when a tape is dropped."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.staged import DuplicateEntry, PassAttention, StagedCache
from cacheprobe.models.fast.tapes import Tapes
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.attention import AttentionSpans, spans_of_positions
from cacheprobe.ops.equality import bitwise
from tests.compiled import on_loops
from tests.feeding import texts
from tests.tiny import FAMILIES, SMALL, by_modules, hf_model

pytestmark = pytest.mark.determinism

SITES = [("pre", 0), *((site, layer) for layer in range(3) for site in "STC")]
LOOPS, TORCH = "loops", "torch"
CASES = [(family, torch.float32, None, LOOPS) for family in FAMILIES]
CASES += [
    ("gemma2", torch.bfloat16, 6, LOOPS), ("qwen2", torch.bfloat16, 6, LOOPS), ("gpt2", torch.float16, None, LOOPS),
    ("olmo2", torch.bfloat16, None, LOOPS), ("llama", torch.float64, None, TORCH),
    ("gpt-neox", torch.bfloat16, None, TORCH), ("gemma3", torch.float32, None, TORCH),
]  # fmt: skip
cases = pytest.mark.parametrize(("family", "dtype", "window", "by"), CASES, ids=str)


@cache
def uneven(family: str, dtype: torch.dtype, window: int | None) -> object:
    """A tiny model whose norms and biases are no ones and zeros, which would hide when they are applied."""
    live = copy.deepcopy(hf_model(family, dtype, window=window))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in live.parameters():
            if weight.dim() == 1:
                weight += torch.randn(weight.shape, generator=generator).to(dtype) / 3
    return live


def fast_of(family: str, dtype: torch.dtype = torch.float32, window: int | None = None, by: str = LOOPS) -> PlainLM:
    model = cp.load_model(copy.deepcopy(uneven(family, dtype, window)), products="torch")
    return on_loops(model) if by == LOOPS else model


@contextmanager
def counting(model: PlainLM) -> Iterator[dict[str, int]]:
    """Counts the passes that are recorded, compared and computed by a tape."""
    counts = dict.fromkeys(("_record", "_require_equal", "_replay"), 0)

    def counted(name: str) -> object:
        own = getattr(Tapes, name)

        def run(*args: object, **kwargs: object) -> Tensor:
            counts[name] += 1
            return own(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(Tapes, name, counted(name))
        yield counts
    assert model.tapes is None or not model.tapes.refusal, model.tapes.refusal


def fed(model: PlainLM) -> list[Tensor]:
    """Logits, states, keys and values of passes of one and four tokens at growing positions, the second row without
    attention in some; some stop after two blocks."""
    held, found = model.new_cache(4, 64), []
    kept: list[Tensor] = []
    with model.capturing(SITES, lambda site, layer, value: kept.append(value)):
        for turn in range(27):
            step = turn % 9
            width, layers = (1, 4)[step % 3 == 2], 2 if step == 7 else None
            rows, starts = [3, 0, 2], [5 * step, 2 + 5 * step, 1]
            pieces = [spans_of_positions(start, width, 64) for start in starts]
            if step % 4 == 1:
                pieces[1] = ()
            attention = PassAttention(spans=AttentionSpans(tuple(pieces)))
            ids = torch.stack(texts(*[width] * 3, seed=turn))
            found.append(model.forward(ids, held, rows, starts, num_layers=layers, attention=attention))
    return [*found, *kept, *held.keys, *held.values]


@cases
def test_every_bit_is_that_of_the_modules(family: str, dtype: torch.dtype, window: int | None, by: str) -> None:
    """Shapes come again with other tokens, positions and rows. Activations that a listener keeps stay as they were."""
    model = fast_of(family, dtype, window, by)
    with counting(model) as counts:
        ours = fed(model)
    theirs = fed(by_modules(model))
    assert len(ours) == len(theirs) and all(bitwise(a, b) for a, b in zip(ours, theirs, strict=True))
    assert counts["_record"] == 5, "a shape is its width, rows that attend, and layers"
    assert counts["_require_equal"] == 10, "when it is recorded, and in the next pass"
    assert counts["_replay"] == 5 + 27 - 3 * 5


def test_runs_with_drafts_and_copies_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic requests are computed twice in some passes, in which the copy is compared and not stored."""
    model, traces = on_loops(cp.load_model(hf_model("llama", torch.bfloat16))), []
    prompts = [list(map(int, text)) for text in texts(5, 9, 3, 12)]
    compared: list[list[tuple[int, Tensor, Tensor]]] = []
    real = StagedCache._compare

    def compare(staged: StagedCache, layer: int, duplicate: DuplicateEntry, k: Tensor, v: Tensor) -> None:
        """Notes what is compared."""
        compared[-1].append((layer, k.clone(), v.clone()))
        real(staged, layer, duplicate, k, v)

    monkeypatch.setattr(StagedCache, "_compare", compare)
    for one in (model, by_modules(model)):
        compared.append([])
        with counting(one) as counts:
            traces.append(cp.run(one, prompts, deterministic=0.5, drafter=cp.drafters.NGram(), **SMALL))
        assert (counts["_replay"] > 10) == (one is model)
    ours, theirs = traces
    for number in range(len(prompts)):
        assert ours.committed(number) == theirs.committed(number)
        for site, layer in SITES[1:]:
            assert bitwise(ours.states(site, layer, number), theirs.states(site, layer, number))
    assert ours.meta["self_checks"] == theirs.meta["self_checks"] and ours.meta["self_checks"]["compared"]
    assert {one[0] for one in compared[0]} == {one[0] for one in compared[1]} == {0, 1, 2}
    for layer, k, v in compared[1]:
        assert any(
            layer == other and bitwise(k, other_k) and bitwise(v, other_v) for other, other_k, other_v in compared[0]
        )


def logits_of(model: PlainLM, held: object, step: int = 0) -> Tensor:
    spans = AttentionSpans((spans_of_positions(step, 1, 16),))
    return model.forward(texts(1, seed=step)[0][None], held, [0], [step], attention=PassAttention(spans=spans))


@pytest.mark.parametrize("by", [LOOPS, TORCH])
@pytest.mark.parametrize(
    "edit",
    [
        "in place", "bias in place", "other numbers", "other numbers of a bias", "other numbers of a norm",
        "another parameter",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_edit_of_the_weights_is_seen(edit: str, by: str, dtype: torch.dtype) -> None:
    """The pass was taped before the edit."""
    model = fast_of("qwen2", dtype, by=by)
    held = model.new_cache(1, 16)
    with counting(model) as counts:
        before = [logits_of(model, held) for _ in range(4)][-1]
    assert counts["_replay"] == 2
    wrapped = model.live.model.layers[1].self_attn.v_proj
    layer = getattr(wrapped, "_original_component", wrapped)
    with torch.no_grad():
        if edit == "in place":
            layer.weight.mul_(2)
        elif edit == "bias in place":
            layer.bias.add_(1)
        elif edit == "other numbers of a bias":
            layer.bias.data = layer.bias.data + 1
        elif edit == "other numbers of a norm":
            norm = model.model.model.layers[1].input_layernorm.weight
            norm.data = norm.data * 2
        elif edit == "other numbers":
            layer.weight.data = layer.weight.data * 2
        else:
            layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)
    after = [logits_of(model, held) for _ in range(4)]
    assert not bitwise(after[0], before)
    assert all(bitwise(one, logits_of(by_modules(model), model.new_cache(1, 16))) for one in after)


def test_modules_run_where_something_acts_on_them() -> None:
    """Editors, and hooks of any other origin."""
    model = fast_of("llama")
    held = model.new_cache(1, 16)
    with counting(model) as counts:
        plain = [logits_of(model, held) for _ in range(4)][-1]
    with counting(model) as counts:
        with model.editing([("C", 1)], lambda site, layer, value: None):
            assert bitwise(logits_of(model, held), plain)
        with model.editing([("C", 1)], lambda site, layer, value: value * 0):
            assert not bitwise(logits_of(model, held), plain)
        hook = model.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0)
        with model.capturing([("S", 0)], lambda site, layer, value: None):
            assert not bitwise(logits_of(model, held), plain)
        hook.remove()
        assert counts["_replay"] == 0
        assert bitwise(logits_of(model, held), plain) and counts["_replay"] == 1
