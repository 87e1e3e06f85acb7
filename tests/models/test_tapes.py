"""Passes that a tape computes have the bits of the modules. Which passes are taped, and when a tape is dropped."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from weakref import ref

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.staged import DuplicateEntry, PassAttention, StagedCache
from cacheprobe.models.fast import tapes
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


def test_a_shape_that_was_not_used_for_longest_is_dropped() -> None:
    model = fast_of("llama")
    held = model.new_cache(1, 64)

    def feed(width: int) -> None:
        spans = AttentionSpans((spans_of_positions(0, width, 64),))
        model.forward(texts(width)[0][None], held, [0], [0], attention=PassAttention(spans=spans))

    with counting(model) as counts:
        for width in (*range(1, 7), *range(1, 7), 1, 7, 1, 2):
            feed(width)
    assert counts == {"_record": 6, "_require_equal": 7, "_replay": 2}, "7 takes the place of 2, which then is new"


def test_a_part_that_depends_on_values_ends_taping() -> None:
    """The reason is kept, and the modules run."""
    model = fast_of("llama")
    block = model.model.model.layers[1].mlp
    own = block.forward
    block.forward = lambda values: own(values) * (2 if float(values[0, 0, 0]) > 1e9 else 1)
    expected = cp.run(by_modules(model), [[1, 2, 3]], **SMALL).committed(0)
    assert cp.run(model, [[1, 2, 3]], **SMALL).committed(0) == expected
    assert model.tapes is not None and "depends on values" in model.tapes.refusal


def test_a_part_that_changes_from_pass_to_pass_ends_taping() -> None:
    """Python keeps a count that torch does not see: the trial of the tape does."""
    model = fast_of("llama")
    block, calls = model.model.model.layers[1].mlp, []
    own = block.forward

    def forward(values: Tensor) -> Tensor:
        calls.append(1)
        return own(values) * (1 + len(calls) / 10)

    block.forward = forward
    cp.run(model, [[1, 2, 3]], **SMALL)
    assert model.tapes is not None and "gives other bits at" in model.tapes.refusal


class AddsInPlace(torch.nn.Module):
    """A block that adds to what it was given, where transformers makes a new tensor."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.own = block.forward

    def forward(self, hidden_states: Tensor, **settings: object) -> Tensor:
        out = self.own(hidden_states, **settings)
        return hidden_states.add_(out - hidden_states)


@pytest.mark.parametrize("fault", ["adds in place", "changes cached values", "raises"])
def test_what_a_tape_cannot_do_is_seen_before_its_results_are_used(fault: str) -> None:
    """Every pass has the results of the modules, and calls each listener once."""
    model = fast_of("llama")
    layers = model.model.model.layers
    attention = layers[1].self_attn
    if fault == "adds in place":
        layers[1].forward = AddsInPlace(layers[1]).forward
    else:
        own = attention.forward

        def forward(hidden_states: Tensor, past_key_values: object = None, **settings: object) -> object:
            update = past_key_values.update

            def changed(k: Tensor, v: Tensor, *where: object) -> tuple[Tensor, Tensor]:
                keys, values = update(k, v, *where)
                return (keys, values * 0.5) if fault == "changes cached values" else (keys + values, values)

            past_key_values.update = changed
            return own(hidden_states, past_key_values=past_key_values, **settings)

        attention.forward = forward
    modules = by_modules(model)
    modules.model = model.model
    seen: list[list[tuple[str, int, Tensor]]] = []
    for one in (model, modules):
        kept: list[tuple[str, int, Tensor]] = []
        held = one.new_cache(1, 16)
        with one.capturing(SITES, lambda site, layer, value, kept=kept: kept.append((site, layer, value.clone()))):
            for step in range(6):
                kept.append(("logits", 0, logits_of(one, held, step)))
        seen.append(kept)
    assert model.tapes is not None and model.tapes.refusal
    assert len(seen[0]) == len(seen[1]) == 6 * (len(SITES) + 1)
    for (site, layer, ours), (other, of, theirs) in zip(*seen, strict=True):
        assert (site, layer) == (other, of) and bitwise(ours, theirs), (site, layer)


def test_a_refused_mask_leaves_the_next_cache_right() -> None:
    model = fast_of("llama")
    small, large = model.new_cache(1, 64), model.new_cache(1, 128)
    spans = AttentionSpans((spans_of_positions(40, 1, 64),))
    ids = texts(1)[0][None]
    wanted = [model.forward(ids, small, [0], [40], attention=PassAttention(spans=spans)) for _ in range(5)][-1]
    with pytest.raises(ValueError, match="a mask of 32 slots"):
        model.forward(ids, large, [0], [40], attention=PassAttention(32, spans))
    for _ in range(2):
        assert bitwise(model.forward(ids, small, [0], [40], attention=PassAttention(spans=spans)), wanted)


def test_a_copy_of_a_model_makes_tapes_of_its_own() -> None:
    model = fast_of("gpt2")
    wanted = [logits_of(model, model.new_cache(1, 16)) for _ in range(5)][-1]
    other = copy.deepcopy(model)
    for weight in model.live.parameters():
        weight.data.zero_()
    assert bitwise([logits_of(other, other.new_cache(1, 16)) for _ in range(5)][-1], wanted)


def test_tapes_that_are_too_large_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast_of("llama")
    monkeypatch.setattr(tapes, "MOST_BYTES", 1000)
    with counting(model) as counts:
        found = [logits_of(model, model.new_cache(1, 16)) for _ in range(6)]
    assert counts["_record"] == 1 and counts["_replay"] == 0 and all(bitwise(one, found[0]) for one in found)


def test_a_pass_in_which_nobody_attends_is_not_taped() -> None:
    model = fast_of("llama")
    held, spans = model.new_cache(1, 16), AttentionSpans(((),))
    for _ in range(4):
        model.forward(texts(1)[0][None], held, [0], [0], attention=PassAttention(spans=spans))
    assert model.tapes is not None and not model.tapes.refusal


def test_hooks_on_all_modules_act() -> None:
    model = fast_of("llama")
    held = model.new_cache(1, 16)
    wanted = [logits_of(model, held) for _ in range(5)][-1]
    seen: list[object] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        assert bitwise(logits_of(model, held), wanted) and model.model.model.layers[1].mlp in seen
    finally:
        handle.remove()


def test_a_long_pass_is_not_taped() -> None:
    model = fast_of("llama")
    with counting(model) as counts:
        for width, batch in ((129, 1), (64, 3), (64, 2)):
            held = model.new_cache(batch, 192)
            spans = AttentionSpans(tuple(spans_of_positions(0, width, 192) for _ in range(batch)))
            for _ in range(2):
                ids = torch.stack(texts(*[width] * batch))
                model.forward(ids[:, :width], held, range(batch), [0] * batch, attention=PassAttention(spans=spans))
    assert counts["_record"] == 1, "of 2 x 64 tokens"


def test_caches_of_other_sizes_in_turn() -> None:
    """A tape serves the caches of all runs."""
    model = fast_of("llama", torch.bfloat16)
    outputs = []
    with counting(model) as counts:
        for one in (model, by_modules(model)):
            caches = [one.new_cache(rows, capacity) for rows, capacity in ((2, 64), (5, 96), (1, 16))]
            outputs.append([logits_of(one, held, step) for step in range(3) for held in caches])
    assert all(bitwise(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
    assert counts == {"_record": 1, "_require_equal": 2, "_replay": 7}


def test_the_cache_of_a_run_that_has_ended_is_not_kept() -> None:
    """Its memory is larger than the model's for many requests."""
    for model in (fast_of("llama"), fast_of("gemma2", torch.float32, 6)):
        gone = []
        for rows in (1, 2):
            held = model.new_cache(rows, 16)
            for step in range(4):
                logits_of(model, held, step)
            gone.append(ref(held))
            storages = [ref(keys) for keys in held.keys]
            del held
            gc.collect()
            assert not any(one() is not None for one in (*gone, *storages))


def test_slots_that_are_hidden_between_two_passes() -> None:
    """And that are no longer hidden."""
    model, outputs = fast_of("llama", torch.bfloat16), []
    for one in (model, by_modules(model)):
        held, found = one.new_cache(1, 16), []
        row = held.allocate()
        for step in range(8):
            held.hidden[row, 1] = step in (4, 5)
            found.append(logits_of(one, held, step))
        outputs.append(found)
    assert all(bitwise(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
    held = model.new_cache(1, 16)
    assert not bitwise([logits_of(model, held, step) for step in range(5)][-1], outputs[0][4]), "the control: it shows"


def test_a_request_beyond_its_mask_is_refused_in_every_pass() -> None:
    model = fast_of("llama")
    held = model.new_cache(1, 128)
    ids, spans = texts(1)[0][None], AttentionSpans((spans_of_positions(70, 1, 128),))
    for num_slots in (128, 128, 128, 128, 32):
        is_refused = pytest.raises(ValueError, match="a mask of 32 slots for requests that attend to 71")
        with is_refused if num_slots == 32 else nullcontext():
            model.forward(ids, held, [0], [70], attention=PassAttention(num_slots, spans))


def test_an_early_stop_returns_a_stream_of_its_own() -> None:
    """The next pass does not change what a drafter keeps."""
    model, modules = fast_of("gpt2"), by_modules(fast_of("gpt2"))
    streams = []
    for one in (model, modules):
        held = one.new_cache(1, 16)
        kept = []
        for step in range(6):
            attention = PassAttention(spans=AttentionSpans((spans_of_positions(step, 1, 16),)))
            ids = texts(1, seed=step)[0][None]
            kept.append(one.forward(ids, held, [0], [step], num_layers=2, attention=attention))
        streams.append(kept)
    assert all(bitwise(ours, theirs) for ours, theirs in zip(*streams, strict=True))


def test_a_listener_that_fails_leaves_nothing_behind() -> None:
    model = fast_of("llama")
    held = model.new_cache(1, 16)
    wanted = logits_of(model, held)

    def fail(site: str, layer: int, value: Tensor) -> None:
        """Raises an error."""
        raise KeyError(site)

    for _ in range(4):  # by modules, recorded, tried, by the tape
        with pytest.raises(KeyError), model.capturing([("T", 1)], fail):
            logits_of(model, held)
        assert bitwise(logits_of(model, held), wanted)


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
