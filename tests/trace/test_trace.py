"""The trace: canonical rows, roles and statuses, the ledger, and filters."""

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import ROLES, STATUSES
from cacheprobe.ops.equality import bitwise
from tests.tiny import PROMPTS, SMALL, loaded


@pytest.fixture(scope="module")
def drafted() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


@pytest.fixture(scope="module")
def mixed() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, deterministic=[0, 3])


@pytest.mark.parametrize("name", ["drafted", "mixed"])
def test_every_position_has_one_canonical_row(name: str, request: pytest.FixtureRequest) -> None:
    trace = request.getfixturevalue(name)
    for i, prompt in enumerate(PROMPTS):
        rows = trace.rows(i, "committed").sort_values("position")
        assert rows.position.tolist() == list(range(len(prompt) + 20 - 1))
        assert rows.token_id.tolist() == (prompt + trace.committed(i))[:-1]
        everything = trace.rows(i)
        assert set(everything.role) <= set(ROLES) and set(everything.status) <= set(STATUSES)
        assert (everything.role != "").all()
        assert ((everything.role == "rolled_back") == (everything.status == "rolled_back")).all()


def test_roles_follow_the_verdicts(drafted: cp.Trace) -> None:
    for i, prompt in enumerate(PROMPTS):
        roles = ["prompt"] * len(prompt) + ["committed"]
        for _, event in drafted.events().query(f"request_id == {i} and phase == 'verify'").iterrows():
            own = "recovered" if event.num_rolled_back else "bonus"
            roles += ["accepted"] * event.num_accepted + [own]
        assert drafted.rows(i, "committed").sort_values("position").role.tolist() == roles[:-1]


def test_rolled_back_rows_are_kept_with_their_states(drafted: cp.Trace) -> None:
    """A rejected draft is computed by the drafter (two layers here) and by the verifier (all three)."""
    lost = drafted.rows(0, "rolled_back")
    by_verifier = lost[lost.phase == "verify"]
    assert len(by_verifier) == drafted.events().query("request_id == 0").num_rolled_back.sum()
    states = drafted.vectors("S", 2, by_verifier)
    assert states.shape == (len(by_verifier), 32) and torch.isfinite(states).all()
    by_drafter = lost[lost.phase == "decode"]
    assert (by_drafter.num_layers == 2).all() and torch.isfinite(drafted.vectors("C", 1, by_drafter)).all()
    with pytest.raises(ValueError, match="stopped after layer 1"):
        drafted.vectors("S", 2, by_drafter)


def test_a_rolled_back_state_is_that_of_the_wrong_text(drafted: cp.Trace) -> None:
    """Not a relabelled committed row: running the wrong text from scratch gives this state."""
    event = drafted.events().query("request_id == 0 and num_rolled_back > 0").iloc[0]
    first_lost = event.draft_start + event.num_accepted
    row = drafted.rows(0, "rolled_back").query(f"step == {event.step} and position == {first_lost}")
    text = (PROMPTS[0] + drafted.committed(0))[:first_lost] + row.token_id.tolist()
    with torch.inference_mode():
        _, clean = loaded().bridge.run_with_cache(torch.tensor([text]))
    ours = drafted.vectors("S", 2, row)[0]
    assert (ours - clean["blocks.2.hook_resid_post"][0, -1]).abs().max() < 1e-5 * ours.abs().max().clamp(min=1)


def test_readings_cover_the_predicting_rows(drafted: cp.Trace) -> None:
    hypotheses = drafted.hypotheses(include_rolled_back=True)
    for i, prompt in enumerate(PROMPTS):
        rows = drafted.rows(i)
        wanted = rows[rows.position >= len(prompt) - 1]
        read = hypotheses[hypotheses.request_id == i].groupby("row").layer.count()
        assert read.to_dict() == wanted.set_index("row").num_layers.to_dict()


def test_readings_speak_of_the_next_committed_token(drafted: cp.Trace) -> None:
    hypotheses = drafted.hypotheses()
    for i, prompt in enumerate(PROMPTS):
        text = prompt + drafted.committed(i)
        for _, h in hypotheses[hypotheses.request_id == i].iterrows():
            assert h.committed_token_id == text[h.position + 1] and h["rank"] >= 0
            assert h.agrees == (h.token_id == h.committed_token_id) == (h["rank"] == 0)
    last = hypotheses.query("layer == 2 and status == 'committed'")
    assert last.agrees.all()  # greedy in float32: the last layer's first choice is what was committed


def test_rank_is_null_where_nothing_was_committed() -> None:
    """A request ends at a stop token while wrong drafts lie beyond it: nothing ever stood where they speak of."""
    stops = cp.SamplingParams(stop_token_ids=(30,))
    trace = cp.run(loaded(), PROMPTS, **SMALL, sampling=stops, drafter=cp.drafters.Scripted(lambda state: [1, 2, 3]))
    hypotheses = trace.hypotheses(include_rolled_back=True)
    ends = {i: len(prompt) + len(trace.committed(i)) for i, prompt in enumerate(PROMPTS)}
    beyond = hypotheses.position + 1 >= hypotheses.request_id.map(ends)
    assert beyond.any() and (hypotheses.status[beyond] == "rolled_back").all()
    for column in ("committed_token_id", "committed_token", "rank", "committed_logprob_nats", "agrees"):
        assert (hypotheses[column].isna() == beyond).all(), column


def test_a_request_that_ended_before_its_first_step_has_an_empty_ledger() -> None:
    """The largest step of no events was NaN, and an error about that."""
    stream = cp.stream(loaded(), PROMPTS[:1], **{name: value for name, value in SMALL.items() if name != "progress"})
    stream.cancel(0)
    assert [piece.finish for piece in stream] == ["cancelled"]
    trace = stream.trace()
    assert len(trace.events()) == 0 and trace.ledger(0).empty
    with pytest.raises(ValueError, match="no step 0 in this trace; it has none"):
        trace.ledger(0, 0)


def test_ledger_tells_the_life_of_a_window(drafted: cp.Trace, mixed: cp.Trace) -> None:
    event = drafted.events().query("request_id == 0 and num_rolled_back > 0").iloc[0]
    before, after = drafted.ledger(0, event.step - 1), drafted.ledger(0, event.step)
    assert set(before.provenance) == {"prefill", "provisional"} | ({"verified"} if event.draft_start > 6 else set())
    assert set(after.provenance) == {"prefill", "verified"}
    assert len(after) == event.draft_start + event.num_accepted
    for step in (-1, drafted.events().step.max() + 1):
        with pytest.raises(ValueError, match=f"no step {step} in this trace; it has 0 to"):
            drafted.ledger(0, step)
    for i, prompt in enumerate(PROMPTS):
        ledger = mixed.ledger(i)
        assert ledger.provenance.tolist() == ["prefill"] * len(prompt) + ["verified" if i in (0, 3) else "decoded"] * 19


def test_capture_filters() -> None:
    config = cp.CaptureConfig(sites="SZ", positions=tuple(range(4, 9)), phases=("prefill", "verify"), dtype="bfloat16")
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=config, layers=[0, -1], drafter=cp.drafters.FastPath())
    rows = trace.rows(0)
    kept = rows[rows.state_index >= 0]
    assert set(kept.position) == set(range(4, 9)) and "decode" not in set(kept.phase)
    whole = cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=cp.drafters.FastPath())
    same = whole.rows(0).loc[kept.index]
    assert bitwise(trace.vectors("S", 2, kept), whole.vectors("S", 2, same).bfloat16())
    assert set(trace.hypotheses().layer) == {0, 2} and set(trace.hypotheses().position) == set(range(4, 9))
    with pytest.raises(ValueError, match="positions="):
        trace.states("S", 0, 0)
    with pytest.raises(ValueError, match="layer 1 was not captured"):
        trace.vectors("S", 1, kept)
    with pytest.raises(ValueError, match="site T was not captured"):
        trace.states("T", 0, 0)


def test_prompt_hypotheses_on_request() -> None:
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, capture=cp.CaptureConfig(prompt_hypotheses=True))
    first = trace.hypotheses().query("request_id == 0 and layer == 2")
    assert sorted(first.position) == list(range(5 + 20 - 1))
    assert first.sort_values("position").committed_token_id.tolist() == PROMPTS[0][1:] + trace.committed(0)


def test_recording_does_not_touch_the_run() -> None:
    """Tokens with and without recording are ==, other people's hooks stay, ours go."""
    model = loaded()
    calls = []
    handle = model.bridge.hook_dict["blocks.1.hook_out"].add_hook(lambda value, hook: calls.append(1))
    with_all = cp.run(model, PROMPTS, **SMALL)
    counted = len(calls)
    with_none = cp.run(model, PROMPTS, **SMALL, capture="Z", layers=[0])
    assert [with_all.committed(i) for i in range(5)] == [with_none.committed(i) for i in range(5)]
    assert counted and len(calls) == 2 * counted
    hooked = [name for name, point in model.bridge.hook_dict.items() if point.fwd_hooks]
    assert set(hooked) <= {"blocks.1.hook_out", "blocks.1.hook_resid_post", "blocks.2.hook_resid_pre"}
    handle.hook.remove()
    model.bridge.hook_dict["blocks.1.hook_out"].fwd_hooks.remove(handle)


def test_captured_states_are_copies() -> None:
    """An in-place edit further up changes the model's tensors and not what was kept before it."""
    model = loaded()
    plain = cp.run(model, PROMPTS[:1], **SMALL, path="bridge")  # where the edit will act
    with model.bridge.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda value, hook: value.mul_(1.0))]):
        again = cp.run(model, PROMPTS[:1], **SMALL)
    assert plain.digest(0) == again.digest(0)
    a, b = again.states("S", 0, 0), again.states("S", 1, 0)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_filters_that_match_nothing_say_so() -> None:
    ends_at_once = cp.SamplingParams(stop_token_ids=range(97))
    asked = cp.CaptureConfig(positions=(20,))
    nothing = cp.run(loaded(), PROMPTS[:1], **SMALL, capture=asked, sampling=ends_at_once)
    with pytest.raises(ValueError, match="positions=\\(20,\\).*kept no row"):
        nothing.hypotheses()
    with pytest.raises(ValueError, match="was not kept"):
        nothing.states("S", 0, 0)


@pytest.mark.parametrize(
    "capture",
    ["Z", cp.CaptureConfig(sites="STC", layers=(1,)), cp.CaptureConfig(positions=(3, 4), dtype="float16")],
    ids=["Z", "one layer", "positions"],
)
def test_a_filtered_run_verifies(capture) -> None:
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, capture=capture, deterministic=[0], drafter=cp.drafters.FastPath())
    result = cp.verify(trace, progress=False)
    assert result.is_equal and result.num_tokens == 40
    assert (result.num_states > 0) == bool(trace.store.sites)


def test_empty_answers_are_errors(drafted: cp.Trace) -> None:
    with pytest.raises(KeyError, match="no request 9"):
        drafted.states("S", 0, 9)
    with pytest.raises(ValueError, match="unknown status"):
        drafted.rows(0, "lost")
    with pytest.raises(ValueError, match="unknown site"):
        drafted.states("Q", 0, 0)
    with pytest.raises(ValueError, match="no thoughts"):
        drafted.thoughts()
    with pytest.raises(ValueError, match="read no lens"):
        cp.run(loaded(), PROMPTS[:1], **SMALL, capture="T").hypotheses()
    assert "rolled back" in repr(drafted) and "5 requests" in repr(drafted)


def test_layers_count_from_the_end_too() -> None:
    """Before, layer -1 was refused as one that was not captured."""
    trace = cp.run(loaded(), PROMPTS[:2], **SMALL, capture=cp.CaptureConfig("STC", heads=("z", "pattern")))
    rows = trace.rows(1, "committed")
    for negative, layer in ((-1, 2), (-3, 0)):
        assert torch.equal(trace.states("S", negative, 0), trace.states("S", layer, 0))
        assert torch.equal(trace.vectors("T", negative, rows), trace.vectors("T", layer, rows))
        assert torch.equal(trace.heads("z", negative, 1), trace.heads("z", layer, 1))
        assert torch.equal(trace.pattern(negative, 1), trace.pattern(layer, 1))
        assert torch.equal(trace.pattern_rows(negative, rows)[3], trace.pattern_rows(layer, rows)[3])
    for layer in (3, -4):
        with pytest.raises(ValueError, match=r"layer (3|-4) was not captured; this run kept layers \[0, 1, 2\]"):
            trace.states("S", layer, 0)


def test_the_last_layer_is_the_models_also_if_it_was_not_kept(drafted: cp.Trace) -> None:
    some = cp.run(loaded(), PROMPTS[:1], **SMALL, layers=[0, 1], capture="S")
    with pytest.raises(ValueError, match=r"layer 2 was not captured; this run kept layers \[0, 1\]"):
        some.states("S", -1, 0)
    row = drafted.row_table[drafted.row_table.num_layers == 2].row.iloc[:1].tolist()
    with pytest.raises(ValueError, match="stopped after layer 1, so there is no state at layer 2"):
        drafted.vectors("S", -1, row)


def test_rows_of_all_requests_are_a_copy(drafted: cp.Trace) -> None:
    rows = drafted.rows()
    pd.testing.assert_frame_equal(rows, drafted.row_table)
    pd.testing.assert_frame_equal(
        drafted.rows(status="rolled_back"), drafted.row_table.query("status == 'rolled_back'")
    )
    rows["token"] = "changed"
    assert not (drafted.row_table.token == "changed").any()
    with pytest.raises(KeyError, match="no request 9"):
        drafted.rows(9)
