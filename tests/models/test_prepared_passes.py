"""Passes whose operations were prepared have the bits of passes that queue them again. Tests which passes are prepared
anew."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.staged import DuplicateEntry, PassAttention, StagedCache
from cacheprobe.models.fast import prepared
from cacheprobe.models.fast.operations import QueuedOperations
from cacheprobe.models.fast.prepared import PreparedOperations
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.attention import AttentionSpans, spans_of_positions
from cacheprobe.ops.compiled.lanes import INNER_STEP
from cacheprobe.ops.equality import bitwise
from tests.compiled import on_loops
from tests.feeding import texts
from tests.models.test_functional_forward import uneven
from tests.tiny import SMALL, hf_model

pytestmark = pytest.mark.determinism

SITES = [("pre", 0), *((site, layer) for layer in range(3) for site in "STC")]
CASES = [("llama", torch.float32, None), ("qwen3", torch.bfloat16, None)]
CASES += [("qwen2", torch.bfloat16, 6)]  # two kinds of layers, with a mask each
cases = pytest.mark.parametrize(("family", "dtype", "window"), CASES, ids=str)


def fast_of(family: str, dtype: torch.dtype = torch.float32, window: int | None = None) -> PlainLM:
    return on_loops(uneven.__wrapped__(family, dtype, window))


@contextmanager
def preparing(monkeypatch: pytest.MonkeyPatch, wanted: bool = True) -> Iterator[list[object]]:
    """Lists the passes that are prepared; none if not wanted."""
    made: list[object] = []

    class Counted(prepared._PreparedPass):
        """A prepared pass that is counted."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "_PreparedPass", Counted)
        if not wanted:
            patch.setattr(PreparedOperations, "run_blocks", QueuedOperations.run_blocks)
        yield made


def fed(fast: PlainLM, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> tuple[list[Tensor], int]:
    """Logits, states, keys and values of passes of one and four tokens at growing positions, the second row without
    attention in some, and the number of passes that were prepared."""
    cache, found = fast.new_cache(4, 64), []
    kept: list[Tensor] = []
    with preparing(monkeypatch, wanted) as made, fast.capturing(SITES, lambda site, layer, value: kept.append(value)):
        for turn in range(18):
            step = turn % 9
            width, layers = (1, 4)[step % 3 == 2], 2 if step == 7 else None
            rows, starts = [3, 0, 2], [5 * step, 2 + 5 * step, 1]
            pieces = [spans_of_positions(start, width, 64) for start in starts]
            if step % 4 == 1:
                pieces[1] = ()
            spans = AttentionSpans(tuple(pieces))
            ids = torch.stack(texts(*[width] * 3, seed=turn))
            attention = PassAttention(spans=spans)
            found.append(fast.forward(ids, cache, rows, starts, num_layers=layers, attention=attention))
    return [*found, *kept, *cache.keys, *cache.values], len(made)


@cases
def test_every_bit_is_that_of_operations_queued_again(
    family: str, dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes come again with other tokens, positions and rows. Activations that a listener keeps stay as they were."""
    fast = fast_of(family, dtype, window)
    (ours, num_ours), (theirs, num_theirs) = (fed(fast, monkeypatch, wanted) for wanted in (True, False))
    assert len(ours) == len(theirs) and all(bitwise(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (num_ours, num_theirs) == (5, 0), "a pass is prepared once for its width, rows that attend, and layers"


def test_runs_with_drafts_and_copies_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic requests are computed twice in some passes, in which the copy is compared and not stored."""
    model, traces = on_loops(cp.load_model(hf_model("llama", torch.bfloat16))), []
    prompts = [list(map(int, text)) for text in texts(5, 9, 3, 12)]
    counts, compared = [], []
    real = StagedCache._compare

    def compare(cache: StagedCache, layer: int, duplicate: DuplicateEntry, k: Tensor, v: Tensor) -> None:
        """Notes what is compared."""
        compared[-1].append((layer, k.clone(), v.clone()))
        real(cache, layer, duplicate, k, v)

    monkeypatch.setattr(StagedCache, "_compare", compare)
    for wanted in (True, False):
        compared.append([])
        with preparing(monkeypatch, wanted) as made:
            traces.append(cp.run(model, prompts, deterministic=0.5, drafter=cp.drafters.NGram(), **SMALL))
        counts.append(len(made))
    ours, theirs = traces
    for number in range(len(prompts)):
        assert ours.committed(number) == theirs.committed(number)
        for site, layer in SITES[1:]:
            assert bitwise(ours.states(site, layer, number), theirs.states(site, layer, number))
    assert ours.meta["self_checks"] == theirs.meta["self_checks"] and ours.meta["self_checks"]["compared"]
    assert counts[0] > 3 and counts[1] == 0
    assert len(compared[0]) == len(compared[1]) > 0
    for (layer, k, v), (other, other_k, other_v) in zip(*compared, strict=True):
        assert layer == other and bitwise(k, other_k) and bitwise(v, other_v)


def logits_of(fast: PlainLM, cache: object, step: int = 0) -> Tensor:
    spans = AttentionSpans((spans_of_positions(step, 1, 16),))
    return fast.forward(texts(1, seed=step)[0][None], cache, [0], [step], attention=PassAttention(spans=spans))


@pytest.mark.parametrize(
    "edit", ["in place", "bias in place", "other numbers", "other numbers of a norm", "another parameter"]
)
def test_an_edit_of_the_weights_is_seen(edit: str) -> None:
    """The pass was prepared for this cache before the edit."""
    fast = fast_of("qwen2", torch.bfloat16)
    cache = fast.new_cache(1, 16)
    before = logits_of(fast, cache)
    assert bitwise(logits_of(fast, cache), before)
    wrapped = fast.live.model.layers[1].self_attn.v_proj
    layer = getattr(wrapped, "_original_component", wrapped)
    with torch.no_grad():
        if edit == "in place":
            layer.weight.mul_(2)
        elif edit == "bias in place":
            layer.bias.add_(1)
        elif edit == "other numbers of a norm":
            norm = fast.model.model.layers[1].input_layernorm.weight
            norm.data = norm.data * 2
        elif edit == "other numbers":
            layer.weight.data = layer.weight.data * 2
        else:
            layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)
    after = logits_of(fast, cache)
    assert not bitwise(after, before)
    assert bitwise(logits_of(fast, fast.new_cache(1, 16)), after)


def test_what_was_prepared_is_dropped_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that was not used for longest is dropped too, if there are too many shapes."""
    fast = fast_of("llama")
    cache = fast.new_cache(1, 64)
    operations = fast._operations
    assert isinstance(operations, PreparedOperations)
    with preparing(monkeypatch) as made:
        for width in (*range(1, 9), *range(1, 9), 1, *[width for width in range(9, 13) for _ in range(2)], 12, 1, 13):
            spans = AttentionSpans((spans_of_positions(0, width, 64),))
            fast.forward(texts(width)[0][None], cache, [0], [0], attention=PassAttention(spans=spans))
    assert len(made) == 12, "13 occurred once"
    (by_cache,) = operations._by_cache.values()
    assert len(by_cache[cache]) == 8
    del cache
    gc.collect()
    assert not by_cache


def test_a_pass_that_torch_computes_in_part_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another activation than SiLU."""
    live = hf_model("llama")
    config = type(live.config)(**{**live.config.to_dict(), "hidden_act": "gelu"})
    torch.manual_seed(0)
    model = on_loops(cp.load_model(type(live)(config).eval()))
    with preparing(monkeypatch) as made:
        assert cp.run(model, [[1, 2, 3]], **SMALL).committed(0)
    assert not made


def test_a_long_pass_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fast_of("llama")
    with preparing(monkeypatch) as made:
        for width, batch in ((65, 1), (64, 5), (64, 4)):
            cache = fast.new_cache(batch, 128)
            spans = AttentionSpans(tuple(spans_of_positions(0, width, 128) for _ in range(batch)))
            for _ in range(2):
                ids = torch.stack(texts(*[width] * batch))
                fast.forward(ids, cache, range(batch), [0] * batch, attention=PassAttention(spans=spans))
    assert len(made) == 1, "of 4 x 64 tokens"


def test_caches_of_other_sizes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fast_of("llama", torch.bfloat16)
    outputs = []
    for wanted in (True, False):
        caches = [fast.new_cache(rows, capacity) for rows, capacity in ((2, 64), (5, 96), (1, 16))]
        with preparing(monkeypatch, wanted):
            outputs.append([logits_of(fast, cache, step) for step in range(3) for cache in caches])
    assert all(bitwise(ours, theirs) for ours, theirs in zip(*outputs, strict=True))


def test_slots_that_are_hidden_between_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that are no longer hidden."""
    fast, outputs = fast_of("llama", torch.bfloat16), []
    for wanted in (True, False):
        cache, found = fast.new_cache(1, 16), []
        row = cache.allocate()
        with preparing(monkeypatch, wanted):
            for step in range(8):
                cache.hidden[row, 1] = step in (3, 4)
                found.append(logits_of(fast, cache, step))
        outputs.append(found)
    assert all(bitwise(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
    cache = fast.new_cache(1, 16)
    assert not bitwise([logits_of(fast, cache, step) for step in range(4)][-1], outputs[0][3]), "the control: it shows"


def test_a_request_beyond_its_mask_is_refused_in_every_pass() -> None:
    fast = fast_of("llama")
    cache = fast.new_cache(1, 128)
    ids, spans = texts(1)[0][None], AttentionSpans((spans_of_positions(70, 1, 128),))
    for num_slots in (128, 128, 32):
        is_refused = pytest.raises(ValueError, match="a mask of 32 slots for requests that attend to 71")
        with is_refused if num_slots == 32 else nullcontext():
            fast.forward(ids, cache, [0], [70], attention=PassAttention(num_slots, spans))


def test_an_early_stop_returns_a_stream_of_its_own() -> None:
    """A drafter that keeps the stream must not keep the states of all layers."""
    fast = fast_of("llama")
    cache, spans = fast.new_cache(1, 16), AttentionSpans((spans_of_positions(0, 1, 16),))
    for _ in range(3):
        attention = PassAttention(spans=spans)
        stream = fast.forward(texts(1)[0][None], cache, [0], [0], num_layers=2, attention=attention)
        assert stream.untyped_storage().nbytes() == stream.nbytes


def test_a_listener_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fast_of("llama")
    cache = fast.new_cache(1, 16)
    wanted = logits_of(fast, cache)

    def fail(site: str, layer: int, value: Tensor) -> None:
        """Raises an error."""
        raise KeyError(site)

    with pytest.raises(KeyError), fast.capturing([("T", 1)], fail):
        logits_of(fast, cache)
    assert bitwise(logits_of(fast, cache), wanted)


def test_with_the_products_that_suit_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths are multiples of 32, so that pairs and tiles of bfloat16 can be prepared; of 48 they are not."""
    live = hf_model("llama")
    for width in (96, 48):
        sizes = {**live.config.to_dict(), "hidden_size": 64, "intermediate_size": width, "head_dim": 16}
        torch.manual_seed(0)
        fast, counts, outputs = (
            cp.load_model(type(live)(type(live.config)(**sizes)).to(torch.bfloat16).eval()),
            [],
            [],
        )
        for wanted in (True, False):
            found, count = fed(fast, monkeypatch, wanted)
            outputs.append(found)
            counts.append(count)
        assert all(bitwise(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
        operations = fast._operations
        is_loops = isinstance(operations, PreparedOperations)
        fits = is_loops and width % INNER_STEP[operations._queue.kind] == 0
        assert counts == [5 if fits else 0, 0]
