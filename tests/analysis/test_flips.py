"""What would have flipped the verdict on a rejected draft, against one plain uncached forward for each edit."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.analysis.flips import EDITS, Rejection, _groups, _states_to_write, _Written
from cacheprobe.edits.patching.cells import run_cells, run_once
from cacheprobe.ops.equality import close
from tests.tiny import PROMPTS, SMALL, hf_model, loaded
from tests.twins.flip_slowly import flip_slowly

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": dict(drafter=cp.drafters.EarlyExit(layer=1)),
    "gpt2": dict(drafter=cp.drafters.EarlyExit(layer=0)),
    "ngram": dict(drafter=cp.drafters.NGram()),
    "sampled": dict(drafter=cp.drafters.EarlyExit(layer=1), sampling=cp.SamplingParams(temperature=0.8, seed=3)),
}
BECAUSE = "the edited runs are computed in one batch, whose sums are taken in another order"


def family(name: str) -> str:
    return name if name == "gpt2" else "llama"


@cache
def run(name: str) -> cp.Trace:
    settings = {**SMALL, "capture": "STC", "deterministic": True, **SETTINGS[name]}
    return cp.run(loaded(family(name)), PROMPTS[:3], **settings)


def rejection(name: str, which: int = -1) -> tuple[int, int]:
    line = run(name).rejected().iloc[which]
    return int(line.request_id), int(line.step)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_edit_is_the_naive_run(name: str) -> None:
    num_flips = 0
    for which in (0, -1):
        place = rejection(name, which)
        found = cp.analysis.flip(run(name), *place, progress=False)
        slow = flip_slowly(run(name), hf_model(family(name)), *place)
        lines = {(one.edit, one.site, one.layer): one for one in found.table.itertuples()}
        assert lines.keys() == slow.logits.keys()
        assert {edit for edit, _, _ in lines} == set(EDITS) - ({"drafter"} if name == "ngram" else set())
        assert (found.meta["drafted_token_id"], found.meta["committed_token_id"]) == (slow.drafted, slow.committed)
        before = float(slow.unedited[slow.drafted] - slow.unedited[slow.committed])
        wanted = [float(row[slow.drafted] - row[slow.committed]) for row in slow.logits.values()]
        ours = [[lines[key].difference_nats, lines[key].change_nats] for key in slow.logits]
        twin = [[nats, nats - before] for nats in wanted]
        assert close(torch.tensor(ours), torch.tensor(twin), 1e-4, because=BECAUSE)
        assert {key: lines[key].token_id for key in lines} == slow.chosen
        assert {key: lines[key].flips for key in lines} == {k: t == slow.drafted for k, t in slow.chosen.items()}
        assert max(wanted) - min(wanted) > 0.1  # the control: edits differ
        num_flips += int(found.table.flips.sum())
    assert num_flips > 0


def test_the_exit_state_in_the_last_layer_flips_the_verdict() -> None:
    """It is what the drafter read its token from; in the layers that both ran, its states change nothing."""
    found = cp.analysis.flip(run("llama"), *rejection("llama"), edits=["drafter"], progress=False)
    own = found.table[found.table.layer <= 1]
    assert len(own) == 6 and own.change_nats.abs().max() < 1e-4 and not own.flips.any()
    [last] = found.table[found.table.layer == 2].itertuples()
    assert (last.site, last.from_layer, last.flips) == ("S", 1, True)


def test_the_states_themselves_change_nothing() -> None:
    """The negative control, of the runs that edits are made in; half the state is the control of the control."""
    model, ids = loaded("gpt2"), tuple(PROMPTS[4])
    base = run_once(model, ids, "STC")
    places = [(site, layer) for site in "STC" for layer in range(3)]
    for scale, is_same in ((1.0, True), (0.5, False)):
        states = [_Written("own", site, layer, layer, base.at(site, layer)[-1] * scale) for site, layer in places]
        cells = [cell for group in _groups(base, states) for cell in group.cells(()).values()]
        with torch.inference_mode():
            logits = run_cells(model, base, cells)
        wanted = base.logits.expand_as(logits)
        assert close(logits, wanted, 1e-5, because=BECAUSE) == is_same


def test_progress_is_told_and_only_what_was_wanted_is_computed() -> None:
    told: list[tuple[int, int]] = []
    found = cp.analysis.flip(
        run("llama"), *rejection("llama"), sites="SC", edits=("mean", "zero"), progress=lambda *done: told.append(done)
    )
    assert told == [(3, 12), (6, 12), (9, 12), (12, 12)]
    assert set(found.table.site) == {"S", "C"} and set(found.table.edit) == {"zero", "mean"}
    assert f"of {len(found.table)} edits" in repr(found) and "step" in repr(found)
    assert found.plot() == cp.plots.flip_grid(found.table)


def test_a_loaded_run_needs_a_model_and_gives_the_same(tmp_path: Path) -> None:
    place = rejection("llama")
    again = cp.load_trace(run("llama").save(tmp_path / "run"))
    with pytest.raises(ValueError, match="loaded without its model"):
        cp.analysis.flip(again, *place)
    one, other = (cp.analysis.flip(t, *place, model=loaded(), progress=False) for t in (run("llama"), again))
    assert one.table.equals(other.table) and one.meta == other.meta


def changed(**meta: Any) -> cp.Trace:
    trace = copy.copy(run("llama"))
    trace.meta = {**trace.meta, **meta}
    return trace


@cache
def without_states() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:3], **SMALL, **SETTINGS["llama"], deterministic=True, capture=None)


def moved(trace: cp.Trace) -> cp.Trace:
    """A trace whose verifier chose another token than the model does."""
    trace, (request_id, step) = copy.copy(trace), rejection("llama")
    events = trace.event_table.copy()
    line = (events.request_id == request_id) & (events.step == step)
    events["target_token_ids"] = [[0] * len(t) if hit else t for t, hit in zip(events.target_token_ids, line)]  # noqa: B905
    trace.event_table = events
    return trace


@pytest.mark.parametrize(
    ("of", "settings", "message"),
    [
        (lambda: run("llama"), dict(step=0), r"request \d step 0: expected a step that rejected.*trace.rejected\(\)"),
        (lambda: run("llama"), dict(request_id=9), "no request 9"),
        (lambda: run("llama"), dict(sites="SQ"), "unknown site 'Q'"),
        (lambda: run("llama"), dict(edits=["one"]), "unknown edit 'one'; edits are zero, mean"),
        (lambda: run("llama"), dict(edits=[]), "unknown edit ''"),
        (lambda: run("llama"), dict(model=loaded("gpt2")), "the trace is of weights"),
        (
            without_states,
            dict(edits=["drafter"]),
            r"request \d step \d+: expected states for the edit 'drafter', got none.*leave the edit out",
        ),
        (lambda: changed(interventions=["x"]), {}, "expected a run without interventions, got one"),
        (lambda: moved(run("llama")), {}, r"step \d+: expected '<0>', the verifier's choice.*got .*nats apart"),
    ],
)
def test_what_cannot_be_edited_is_refused(of: Any, settings: dict[str, Any], message: str) -> None:
    request_id, step = rejection("llama")
    with pytest.raises((ValueError, KeyError), match=message):
        cp.analysis.flip(of(), **{"request_id": request_id, "step": step, **settings}, progress=False)


def test_zero_and_mean_need_no_states() -> None:
    found = cp.analysis.flip(without_states(), *rejection("llama"), edits=("zero", "mean"), progress=False)
    whole = cp.analysis.flip(run("llama"), *rejection("llama"), edits=("zero", "mean"), progress=False)
    by_default = cp.analysis.flip(without_states(), *rejection("llama"), progress=False)
    assert len(by_default.meta["left_out"]) == 2
    measured = ["difference_nats", "change_nats"]
    for one in (found, by_default):
        assert one.table.drop(columns=measured).equals(whole.table.drop(columns=measured))
        ours, theirs = (torch.tensor(flips.table[measured].to_numpy()) for flips in (one, whole))
        assert close(ours, theirs, 1e-4, because="edited runs are not deterministic requests")


def test_a_text_of_one_token_has_no_mean() -> None:
    base, trace = run_once(loaded(), (5,), "STC"), run("llama")
    one = Rejection(0, 3, 1, 7, 8, 2, (5,))
    written, left_out = _states_to_write(trace, one, base, "STC", None)
    assert "mean" not in {edit.edit for edit in written} and any(why.startswith("mean: ") for why in left_out)
    with pytest.raises(ValueError, match="for the edit 'mean', got none: .*has one token"):
        _states_to_write(trace, one, base, "STC", ["mean"])
