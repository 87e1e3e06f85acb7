"""What an intervention could not do is refused by name, before anything is computed."""

import pytest
import torch

import cacheprobe as cp
from cacheprobe.edits.interventions import add, replace, swap, zero
from cacheprobe.edits.interventions.checks import require_hooks
from cacheprobe.engine.drafters import DraftModel, EarlyExit, FastPath, NGram
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.ops.equality import close
from tests.by_hand import first_of
from tests.drafters.test_drafters import near
from tests.interventions.test_interventions import SUMS, generated_slowly, hooked_slowly
from tests.thinking.test_thinking_engine import RUN, lm
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

S1 = dict(request_id=0, site="S", layer=1)
LIGHT = {**SMALL, "max_new_tokens": 6, "capture": "S"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zero(**{**S1, "site": "Q"}), "unknown site for zero 'Q'; choose one of S, T, C, pre"),
        (lambda: zero(**S1, head=1), "only sites T and recurrent have heads"),
        (lambda: zero(**S1, positions=[3, -1]), "one of positions must be a whole number of at least 0, got -1"),
        (lambda: zero(**S1, positions=[]), "positions is empty, so nothing would change"),
        (lambda: zero(**S1, positions=[3, 3]), "one of positions is given twice"),
        (
            lambda: zero(**S1, phases="warm-up"),
            "unknown phase for zero 'warm-up'; choose one of prefill",
        ),
        (lambda: replace(torch.zeros(2, 32), **S1, positions=[1, 2, 3]), "2 vectors for 3 positions"),
        (lambda: replace(torch.zeros(2, 32), **S1), "2 vectors for all positions"),
        (lambda: replace(torch.zeros(1, 2, 3), **S1), r"vectors must be \[w\] or \[n, w\], got \[1, 2, 3\]"),
        (lambda: add(torch.tensor([1.0, float("nan")]), **S1), "vectors hold NaN or infinity"),
    ],
)
def test_an_intervention_checks_itself(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def by_hand(text: list[int], num_layers: int, changes: dict[int, float]) -> tuple[torch.Tensor, int]:
    """Returns what leaves block `num_layers` - 1 at the last token [m], and the greedy token after it, by Hugging
    Face's model with a plain hook that writes `changes` after block 1."""
    model, held = hf_model(), []
    with hooked_slowly(model, "S", None, changes), torch.inference_mode():
        block = model.model.layers[num_layers - 1]  # its hook comes after the one that changes
        handle = block.register_forward_hook(lambda module, args, out: held.append(first_of(out)[0, -1].clone()))
        model(torch.tensor([text]), use_cache=False)
        handle.remove()
        return held[0], int(model.lm_head(model.model.norm(held[0])).argmax())


@pytest.mark.parametrize(("drafter", "num_layers"), [(FastPath(), 3), (EarlyExit(layer=1), 2)], ids=str)
def test_the_last_draft_that_can_be_changed_is_changed(drafter: Drafter, num_layers: int) -> None:
    """The other side of the refusals: at the highest layer and position that drafts reach, and in the draft alone."""
    last = 8
    one = zero(**S1, positions=last, phases="decode")
    wide = {**LIGHT, "window": 6}  # all that can be drafted, in one window
    trace = cp.run(loaded(), PROMPTS[:1], interventions=one, drafter=drafter, **wide)
    rows, proposed = trace.rows(0), trace.events().set_index("step").proposed_token_ids
    differ = 0
    drafts = rows[(rows.phase == "decode") & (rows.position == last)]
    for index, row in drafts.iterrows():
        before = rows[:index].groupby("position").token_id.last()  # what the cache held then
        text = [*before.loc[: last - 1], row.token_id]
        states, token = by_hand(text, num_layers, {last: 0.0})
        (mine,) = trace.vectors("S", num_layers - 1, drafts.loc[[index]])
        assert close(mine, states, 1e-5, because=SUMS) and list(proposed[row.step]) == [token]
        unchanged, other = by_hand(text, num_layers, {})
        assert not close(mine, unchanged, 1e-2, because="the control: the change shows")
        differ += token != other
    assert differ == len(drafts) == trace.edits()[["superseded", "rolled_back", "abandoned"]].sum(axis=1)[0] > 0
    assert trace.committed(0) == cp.run(loaded(), PROMPTS[:1], **wide).committed(0)


def test_the_oracle_takes_what_its_run_was_given() -> None:
    """Both are equal in bits, and what Hugging Face's model says with a plain hook at the same position."""
    one = zero(**S1, positions=7, phases=("decode", "verify"), own_fingerprint=True)
    settings = dict(LIGHT, deterministic=True, interventions=one)
    trace, oracle = (go(loaded(), PROMPTS[:1], drafter=NGram(), **settings) for go in (cp.run, cp.reference))
    assert trace.digest(0) == oracle.digest(0)
    with hooked_slowly(model := hf_model(), "S", None, {7: 0.0}):
        tokens, states = generated_slowly(model, PROMPTS[0], 6)
    assert oracle.committed(0) == tokens
    assert close(oracle.states("S", 2, 0), states, 1e-5, because=SUMS)
    plain = cp.reference(loaded(), PROMPTS[:1], **{**settings, "interventions": ()})
    assert not close(plain.states("S", 2, 0)[7], states[7], 1e-2, because="the control: the change shows")


@pytest.mark.parametrize(
    ("one", "settings", "message"),
    [
        (zero(**{**S1, "layer": 3}), {}, "zero of request 0 at site S of layer 3: unknown layer 3; .*layers 0 to 2"),
        (zero(**{**S1, "request_id": 1}), {}, "no request 1; the run has 0 to 0"),
        (zero(request_id=0, site="T", layer=0, head=4), {}, "unknown head 4; layer 0 has heads 0 to 3"),
        (replace(torch.zeros(8), **S1), {}, "vectors of width 8, where states have 32"),
        (replace(torch.zeros(32), request_id=0, site="T", layer=0, head=1), {}, "width 32, where states have 8"),
        (zero(**S1, positions=[4, 10]), {}, "position 10 lies outside the request, which computes 0 to 9 at most"),
        (zero(**S1, positions=4, phases="decode"), {}, "never computed in phase decode, but in prefill"),
        (zero(**S1), {"deterministic": True}, "deterministic; changed.*say so with own_fingerprint=True"),
        (
            zero(**S1, steps=2, own_fingerprint=True),
            {"deterministic": True},
            "on the traffic; leave out steps=",
        ),
        (zero(**S1, phases="decode"), {"drafter": NGram()}, r"in prefill or verify \(drafts of ngram, window of"),
        (zero(**S1, phases="decode"), {"drafter": EarlyExit(layer=0)}, "drafts of early_exit"),
        (
            zero(**S1, positions=[4, 6], phases="decode", own_fingerprint=True),
            {"deterministic": True, "window": 1},
            r"in prefill or verify \(.* window of 1\); leave out phases=",
        ),
        (zero(**S1, positions=9, phases="decode"), {"drafter": FastPath()}, r"in verify \("),
        ("zero", {}, "an intervention is made by cp.interventions.zero"),
    ],
)
def test_a_run_refuses(one, settings: dict, message: str) -> None:
    given = [one] if isinstance(one, str) else one
    with pytest.raises(ValueError, match=message):
        cp.run(loaded(), PROMPTS[:1], interventions=given, **{**LIGHT, **settings})


def test_drafts_of_another_model_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="drafts of draft_model"):
        one = zero(**S1, phases="decode")
        cp.run(loaded(), PROMPTS[:1], interventions=one, drafter=DraftModel(near()), **LIGHT)


def test_vectors_must_be_finite_in_the_models_dtype() -> None:
    with pytest.raises(ValueError, match="infinite in torch.float16, and a slot that is not finite poisons attention"):
        cp.run(loaded(dtype=torch.float16), PROMPTS[:1], interventions=add(torch.full((32,), 1e6), **S1), **LIGHT)


def test_a_model_without_hooks_is_refused() -> None:
    class Bare:
        name = "bare"

    with pytest.raises(ValueError, match="bare has no `editing`, so interventions cannot act on it"):
        require_hooks(Bare())


def test_swaps_are_refused_where_positions_do_not_mean_the_same() -> None:
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8]]
    plain = cp.run(loaded(), prompts, **LIGHT)
    where = dict(site="S", layer=1, positions=[1])
    with pytest.raises(ValueError, match="the prompts of requests 0 and 2 have 3 and 2 tokens"):
        swap(plain, 0, 2, **where)
    with pytest.raises(ValueError, match="no request 3 in the trace; it has 0 to 2"):
        swap(plain, 0, 3, **where)
    with pytest.raises(ValueError, match="position 8 lies outside request 1, which computed 0 to 7"):
        swap(plain, 0, 1, **{**where, "positions": [8]})
    with pytest.raises(ValueError, match="say which positions= to swap"):
        swap(plain, 0, 1, site="S", layer=1)
    with pytest.raises(ValueError, match=r"site z was not captured.*CaptureConfig\(heads=\('z',\)\)"):
        swap(plain, 0, 1, site="T", layer=1, head=0, positions=1)
    with pytest.raises(ValueError, match="layer 5 was not captured"):
        swap(plain, 0, 1, site="S", layer=5, positions=1)
    pair = swap(plain, 0, 1, **where)
    with pytest.raises(ValueError, match="made for a prompt of 3 tokens, request 1 has 4"):
        cp.run(loaded(), [[1, 2, 3], [1, 2, 3, 4]], interventions=pair, **LIGHT)
    changed = cp.run(loaded(), prompts[:2], interventions=pair, **LIGHT)
    with pytest.raises(ValueError, match="own run was changed by interventions"):
        swap(changed, 0, 1, **where)


def test_positions_among_cached_rows_are_not_computed() -> None:
    rows = cp.kv_snapshot(loaded(), PROMPTS[0], capacity=96)
    with pytest.raises(ValueError, match="position 3 lies in the 4 cached rows"):
        cp.run(loaded(), cp.Request(PROMPTS[0], cached=rows), interventions=zero(**S1, positions=[3, 4]), **LIGHT)


def test_a_thinking_model_is_changed_in_every_round() -> None:
    """Thoughts after the changed position follow from it; those before do not, and the oracle has the same."""
    model, prompt = lm(), [5, 9, 7, 11] * 4
    one = zero(request_id=0, site="S", layer=1, positions=[6], own_fingerprint=True)
    free = cp.Request(prompt, cp.SamplingParams(stop_token_ids=()))
    settings = {**RUN, "deterministic": True, "max_new_tokens": 4}
    trace = cp.run(model, [free], interventions=one, **settings)
    oracle, plain = (cp.reference(model, [free], interventions=given, **settings) for given in (one, ()))
    assert trace.digest(0) == oracle.digest(0) != plain.digest(0)
    assert not trace.states("S", 1, 0)[6].any() and bool(trace.states("S", 1, 0)[5].any())
    assert trace.thoughts_said(0)[0] == plain.thoughts_said(0)[0] and trace.thoughts_said(0) != plain.thoughts_said(0)


def test_surgery_refuses_a_cache_that_holds_more_than_keys_and_values() -> None:
    with pytest.raises(ValueError, match="ThinkingCache holds more than keys and values"):
        cp.kv_snapshot(lm(), [5, 9, 7, 11] * 2, capacity=64)
