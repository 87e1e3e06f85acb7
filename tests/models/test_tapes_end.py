"""Which passes are taped, what ends taping, and what a tape keeps."""

import copy
import gc
from contextlib import nullcontext
from weakref import ref

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.fast.tapes import Tapes
from cacheprobe.ops.attention import AttentionSpans, spans_of_positions
from cacheprobe.ops.equality import bitwise
from tests.feeding import texts
from tests.models.test_tapes import SITES, counting, fast_of, logits_of
from tests.tiny import SMALL, by_modules

pytestmark = pytest.mark.determinism


def test_a_shape_that_was_not_used_for_longest_is_dropped() -> None:
    model = fast_of("llama")
    held = model.new_cache(1, 64)

    def feed(width: int) -> None:
        spans = AttentionSpans((spans_of_positions(0, width, 64),))
        model.forward(texts(width)[0][None], held, [0], [0], attention=PassAttention(spans=spans))

    with counting(model) as counts:
        for width in (*range(1, 13), *range(1, 13), 1, 13, 1, 2):
            feed(width)
    assert counts == {"_record": 12, "_require_equal": 13, "_replay": 2}, "13 takes the place of 2, which then is new"


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
    monkeypatch.setattr(Tapes, "most_bytes", 1000)
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
        for width, batch in ((17, 1), (16, 9), (16, 8)):
            held = model.new_cache(batch, 192)
            spans = AttentionSpans(tuple(spans_of_positions(0, width, 192) for _ in range(batch)))
            for _ in range(2):
                ids = torch.stack(texts(*[width] * batch))
                model.forward(ids[:, :width], held, range(batch), [0] * batch, attention=PassAttention(spans=spans))
    assert counts["_record"] == 1, "of 8 x 16 tokens"


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
