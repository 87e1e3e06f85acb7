"""Changes of recurrent states: against transformers' own cache, changed by hand; with rejected drafts, preemption and
neighbours."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.interventions import Intervention, hook, replace, swap, zero
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import close
from tests.field.tiny_family import tiny_family
from tests.interventions.recurrent_slowly import Changes, continued_slowly, logits_slowly
from tests.invariants.runs import wrong_at
from tests.tiny import loaded

_SLOW = ("rwkv", "xlstm", "falcon_h1")
PROMPTS = [[3, 10, 17, 24, 31, 38, 45, 52, 59, 66, 73], [5, 80, 33, 4], [5, 81, 33, 4], [3] * 21]
SHAPE: dict[str, Any] = dict(window=4, group=2, capacity=96, max_new_tokens=8, progress=False)
KEPT = cp.CaptureConfig(heads=("recurrent",))


@cache
def original(family: str) -> Any:
    return tiny_family(family, {"eos_token_id": None})  # random weights may give a stop token early


@cache
def model(family: str) -> PlainLM:
    one = cp.load_model(copy.deepcopy(original(family)), products="torch")
    assert isinstance(one, PlainLM)
    return one


@cache
def plain(family: str) -> cp.Trace:
    return cp.run(model(family), PROMPTS, capture=KEPT, **SHAPE)


def layer_of(family: str) -> int:
    return next(iter(model(family).state_shapes))


def turned(state: Tensor, *context: object) -> Tensor:
    return -3 * state


def made(family: str, kind: str) -> tuple[list[Intervention], Changes]:
    """An intervention on request 0, in the prompt and in generated tokens, and what the slow way does by hand."""
    layer = layer_of(family)
    where: Any = dict(request_id=0, site="recurrent", positions=[2, 6, 11, 13], own_fingerprint=True)
    places = [(layer, position) for position in where["positions"]]
    if kind == "zero":
        return [zero(layer=layer, **where)], dict.fromkeys(places, torch.zeros_like)
    if kind == "one head":

        def first_head(state: Tensor) -> Tensor:
            state[0] = 0
            return state

        return [zero(layer=layer, head=0, **where)], dict.fromkeys(places, first_head)
    if kind == "another run":
        states = plain(family).heads("recurrent", layer, 3)[where["positions"]]
        by_hand = {
            place: lambda old, new=new: new.view(old.shape).to(old) for place, new in zip(places, states, strict=True)
        }
        return [replace(states.flatten(1), layer=layer, **where)], by_hand
    return list(hook(where.pop("site"), turned, layers=[layer], **where)), dict.fromkeys(places, turned)


KINDS = [("mamba2", kind) for kind in ("zero", "one head", "another run", "a function")]
KINDS += [("mamba", "another run"), ("olmo_hybrid", "a function")]
KINDS += [pytest.param(family, "a function", marks=pytest.mark.slow) for family in _SLOW]


def edited_run(family: str, kind: str, **settings: Any) -> cp.Trace:
    """Deterministic, with drafts that are partly rejected."""
    interventions, _ = made(family, kind)
    drafter = wrong_at(edited_oracle(family, kind), [1, 0, None, 2])
    settings = {**SHAPE, "drafter": drafter, "deterministic": True, "capture": KEPT, **settings}
    return cp.run(model(family), PROMPTS, interventions=interventions, **settings)


@cache
def edited_oracle(family: str, kind: str) -> cp.Trace:
    return cp.reference(model(family), PROMPTS, interventions=made(family, kind)[0], capture=KEPT, **SHAPE)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_changed_state_gives_what_transformers_gives(family: str, kind: str) -> None:
    trace, (_, changes) = edited_run(family, kind), made(family, kind)
    assert 0 < trace.num_rolled_back < trace.num_drafted
    assert trace.committed(0) == continued_slowly(original(family), PROMPTS[0], 8, changes)
    assert trace.digest(0) == edited_oracle(family, kind).digest(0)
    text = [*PROMPTS[0], *trace.committed(0)][:-1]
    _, states = logits_slowly(original(family), text, changes)
    for layer, theirs in states.items():
        ours = trace.heads("recurrent", layer, 0)
        # transformers computes the first token as a chunk of one; rounding differs by about 1e-6 of the largest value
        assert close(ours.flatten(1), torch.stack(theirs).flatten(1), 1e-4, because="sums are reordered")
    assert (
        trace.heads("recurrent", layer_of(family), 0)[2].sum()
        != plain(family).heads("recurrent", layer_of(family), 0)[2].sum()
    )


def test_logits_follow_the_changed_state_from_the_next_token_on() -> None:
    one, (interventions, changes) = model("mamba2"), made("mamba2", "a function")
    untouched = logits_slowly(original("mamba2"), PROMPTS[0], {})[0]
    changed = logits_slowly(original("mamba2"), PROMPTS[0], changes)[0]
    assert torch.equal(untouched[:3], changed[:3]) and not torch.equal(untouched[3], changed[3])
    trace = cp.run(one, PROMPTS, capture=cp.CaptureConfig("S"), interventions=interventions, **SHAPE)
    ours = one.read_out(trace.states("S", one.n_layers - 1, 0)[: len(PROMPTS[0])])
    assert close(ours, changed, 1e-4, because="sums are reordered")


@pytest.mark.parametrize(
    "settings",
    [dict(max_kv_tokens=40), dict(prefill_chunk=4)],
    ids=["preempted", "prompts in parts"],
)
def test_the_schedule_and_neighbours_change_no_bit(settings: dict[str, Any]) -> None:
    same_shape = "prefill_chunk" not in settings
    trace, want = edited_run("mamba2", "a function", **settings), edited_oracle("mamba2", "a function")
    assert bool(trace.meta["preemptions"]) == ("max_kv_tokens" in settings)
    for request in range(len(PROMPTS)):
        assert trace.committed(request) == want.committed(request)
        if same_shape:
            assert trace.digest(request) == want.digest(request)
    untouched = cp.reference(model("mamba2"), PROMPTS, capture=KEPT, **SHAPE)
    assert [trace.committed(r) for r in (1, 2, 3)] == [untouched.committed(r) for r in (1, 2, 3)]


def test_an_edit_that_a_rollback_would_lose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a position that is computed again after a rollback keeps its unchanged state."""
    want, seen = edited_oracle("mamba2", "a function"), set[int]()
    edit = Editor.edit

    def once(self: Editor, site: str, layer: int, value: Tensor) -> Tensor | None:
        contexts = [hit.of_slot(value.shape[1] - 1).contexts for hit in self._aimed.get((site, layer), [])]
        positions = {context.position for listed in contexts for context in listed}
        if positions & seen:
            return None
        seen.update(positions)
        return edit(self, site, layer, value)

    monkeypatch.setattr(Editor, "edit", once)
    drafter = cp.drafters.EarlyExit(2)
    trace = cp.run(
        model("mamba2"), PROMPTS, drafter=drafter, interventions=made("mamba2", "a function")[0], deterministic=True,
        **SHAPE,
    )  # fmt: skip
    assert trace.committed(0) != want.committed(0)


def test_swapped_states() -> None:
    layer = layer_of("mamba2")
    pair = swap(plain("mamba2"), 1, 2, site="recurrent", layer=layer, positions=[2])
    trace = cp.run(model("mamba2"), PROMPTS, interventions=pair, capture=KEPT, **SHAPE)
    for mine, other in ((1, 2), (2, 1)):
        theirs = plain("mamba2").heads("recurrent", layer, other)[2]
        assert torch.equal(trace.heads("recurrent", layer, mine)[2], theirs)
        state = theirs.view(model("mamba2").initial[layer]["recurrent", 0].shape)
        want = continued_slowly(original("mamba2"), PROMPTS[mine], 8, {(layer, 2): lambda old, state=state: state})
        assert trace.committed(mine) == want


@pytest.mark.parametrize(
    ("family", "heads"),
    [("mamba2", False), ("olmo_hybrid", True), *(pytest.param(one, True, marks=pytest.mark.slow) for one in _SLOW)],
)
def test_a_grid_of_patched_states(family: str, heads: bool) -> None:
    clean, corrupt = PROMPTS[1], PROMPTS[2]
    live, layer = original(family), layer_of(family)
    ends = [logits_slowly(live, text, {}) for text in (clean, corrupt)]
    answer = [int((ends[0][0][-1] - ends[1][0][-1]).argmax()), int((ends[1][0][-1] - ends[0][0][-1]).argmax())]
    settings: dict[str, Any] = dict(site="recurrent", heads=heads, answer=answer, progress=False)
    layers = [layer] if heads else None
    grid = cp.patching.activation(model(family), clean, corrupt, layers=layers, **settings).table
    assert set(grid.layer) == ({layer} if heads else set(model(family).state_shapes))
    low, high = (float(logits[-1, answer[0]] - logits[-1, answer[1]]) for logits, _ in reversed(ends))
    for cell in grid.itertuples():
        donor = ends[0][1][cell.layer][cell.position]

        def patched(old: Tensor, donor: Tensor = donor, cell: Any = cell) -> Tensor:
            if not heads:
                return donor
            old[cell.head] = donor[cell.head]
            return old

        logits, _ = logits_slowly(live, corrupt, {(cell.layer, cell.position): patched})
        difference = float(logits[-1, answer[0]] - logits[-1, answer[1]])
        assert abs(cell.logit_difference - difference) < 1e-4 * abs(high - low) + 1e-5  # rounding of float32 logits
    assert grid[grid.position == 3].nld.abs().max() < 1e-5, "no token follows the last one"
    assert grid[grid.position == 0].nld.abs().max() == 0, "the prompts begin alike"
    if family == "mamba2" and not heads:
        assert grid.nld.abs().max() > 0.01


def test_what_has_no_recurrent_state_is_refused() -> None:
    attends = next(layer for layer in range(model("olmo_hybrid").n_layers) if layer not in model("olmo_hybrid").initial)
    where: Any = dict(request_id=0, site="recurrent")

    def run(family: str, one: Intervention) -> None:
        cp.run(model(family), PROMPTS, interventions=[one], **SHAPE)

    with pytest.raises(ValueError, match=f"layer {attends} has no recurrent state; layers with one: "):
        run("olmo_hybrid", zero(layer=attends, **where))
    with pytest.raises(ValueError, match="layer 1 has no recurrent state; layers with one: none"):
        cp.run(loaded(), PROMPTS, interventions=[zero(layer=1, **where)], **SHAPE)
    heads, width = model("mamba2").state_shapes[0]
    with pytest.raises(ValueError, match=f"vectors of width 5, where states have {heads * width}"):
        run("mamba2", replace(torch.zeros(5), layer=0, **where))
    with pytest.raises(ValueError, match=f"unknown head {heads}; layer 0 has heads 0 to {heads - 1}"):
        run("mamba2", zero(layer=0, head=heads, **where))
    with pytest.raises(ValueError, match=f"layer {attends} has no recurrent state"):
        cp.patching.activation(model("olmo_hybrid"), [1, 2], [1, 3], site="recurrent", layers=[attends])
    with pytest.raises(ValueError, match="has no recurrent states to patch"):
        cp.patching.activation(loaded(), [1, 2], [1, 3], site="recurrent")


def test_a_hook_name_names_the_state() -> None:
    assert zero(request_id=0, site="blocks.2.attn.recurrent_state").place == ("recurrent", 2)
