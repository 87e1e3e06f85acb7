"""Edits of states say how many committed, drafted and rejected rows they changed, and why they missed the committed
ones. The right tokens and states come from transformers with a forward hook."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.cli.look import show
from cacheprobe.edits import interventions as iv
from tests.by_hand import changed, forward, generated
from tests.tiny import hf_model, loaded

PROMPT, OTHER, NEW, LAYER = [1, 2, 3, 4, 5], [7, 8, 9], 12, 1
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(3))
WHERE = dict(request_id=0, site="S", layer=LAYER)
QUICK = dict(window=4, group=2, capacity=64, max_new_tokens=NEW)
DRAFTED = dict(**QUICK, drafter=cp.drafters.EarlyExit(layer=1))
REMEDY = r'phases=\("decode", "verify"\)'


def plain() -> list[int]:
    return generated(hf_model(), PROMPT, NEW)


def steered(positions: Sequence[int]) -> tuple[list[int], Tensor]:
    """The greedy tokens with the vector added to what leaves block 1 at these positions, and what leaves it then."""
    model = hf_model()

    def add(states: Tensor) -> None:
        states[:, [at for at in positions if at < states.shape[1]]] += VECTOR

    with changed(model.model.layers[LAYER], add):
        tokens = generated(model, PROMPT, NEW)
        return tokens, forward(model, [*PROMPT, *tokens[:-1]])[1][LAYER]


GENERATED = range(len(PROMPT), len(PROMPT) + NEW)


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def test_an_edit_of_drafts_alone_is_told_with_the_remedy() -> None:
    with pytest.warns(RuntimeWarning, match=f"changed no committed row, only others .*{REMEDY}"):
        trace = cp.run(loaded(), [PROMPT], interventions=iv.add(VECTOR, **WHERE, phases=("decode",)), **DRAFTED)
    assert trace.committed(0) == plain() != steered(GENERATED)[0]
    rows = trace.rows(0)
    drafts = rows[rows.phase == "decode"]
    (line,) = trace.edits().to_dict("records")
    for status in ("committed", "superseded", "rolled_back", "abandoned"):
        assert line[status] == (drafts.status == status).sum()
    assert line["committed"] == 0 < line["superseded"] + line["rolled_back"]


def test_the_remedy_steers_the_committed_text() -> None:
    tokens, states = steered(GENERATED)
    with no_warning():
        change = iv.add(VECTOR, **WHERE, phases=("decode", "verify"))
        trace = cp.run(loaded(), [PROMPT], interventions=change, **DRAFTED)
    assert trace.committed(0) == tokens != plain()
    torch.testing.assert_close(trace.states("S", LAYER, 0), states, rtol=1e-4, atol=1e-4)  # other order of sums
    (line,) = trace.edits().to_dict("records")
    assert line["committed"] == NEW - 1
    rows = trace.rows(0)
    assert line["rolled_back"] == ((rows.status == "rolled_back") & (rows.position >= len(PROMPT))).sum() > 0


def test_every_way_to_run_tells_it(tmp_path: Path) -> None:
    change = iv.add(VECTOR, **WHERE, phases=("decode",))
    stream = cp.stream(loaded(), [PROMPT], interventions=change, **DRAFTED)
    with pytest.warns(RuntimeWarning, match=REMEDY):
        list(stream)
    assert stream.trace().committed(0) == plain()
    with pytest.warns(RuntimeWarning, match=f"changed no row; .*{REMEDY}"):
        oracle = cp.reference(loaded(), [PROMPT], interventions=change, **DRAFTED)
    assert oracle.committed(0) == plain() and oracle.edits().committed.tolist() == [0]
    with pytest.warns(RuntimeWarning, match=REMEDY):
        trace = cp.run(loaded(), [PROMPT], interventions=change, **DRAFTED)
    with pytest.warns(RuntimeWarning, match=REMEDY):
        assert cp.verify(trace, progress=False).is_equal
    begun = cp.stream(loaded(), [PROMPT], interventions=change, out=tmp_path / "run", **DRAFTED)
    next(begun), next(begun)
    begun.close()
    with pytest.warns(RuntimeWarning, match=REMEDY):
        again = cp.resume(tmp_path / "run", loaded(), drafter=DRAFTED["drafter"], interventions=change)
    assert again.committed(0) == plain()


def test_a_deterministic_request_without_a_drafter_is_told_too() -> None:
    change = iv.zero(**WHERE, phases=("decode",), own_fingerprint=True)
    with pytest.warns(RuntimeWarning, match=REMEDY):
        trace = cp.run(loaded(), [PROMPT], deterministic=True, interventions=change, **QUICK)
    assert trace.committed(0) == plain()
    never_verified = iv.add(VECTOR, **WHERE, phases=("decode",))
    with no_warning():
        trace = cp.run(loaded(), [PROMPT], interventions=never_verified, **QUICK)
    assert trace.committed(0) == steered(GENERATED)[0] and trace.edits().committed.tolist() == [NEW - 1]


def test_a_sweep_tells_it_and_counts_the_rows(tmp_path: Path) -> None:
    grid = dict(model="coinflip-plain", task="coin_flip:people=2", drafter="early_exit:layer=1", window=4, seed=0)
    asked = dict(grid=grid, run=dict(n=1, max_new_tokens=4, capacity=128, group=1))
    grid["intervention"] = "add:site=S,layer=1,value=5,phases=decode"
    with pytest.warns(RuntimeWarning, match=REMEDY):
        cp.sweep(asked, out=tmp_path / "drafts", progress=False)
    (drafts,) = cp.load_sweep(tmp_path / "drafts").cells.to_dict("records")
    assert drafts["changed_rows"] == 0
    grid["intervention"] += "+verify"
    with no_warning():
        cp.sweep(asked, out=tmp_path / "both", progress=False)
    (both,) = cp.load_sweep(tmp_path / "both").cells.to_dict("records")
    assert both["changed_rows"] == both["tokens"] - 1 > 0


def test_positions_that_were_never_committed_are_named() -> None:
    first = plain()[:1]
    stopping = cp.SamplingParams(stop_token_ids=first)  # the request ends with its first token
    edits = [iv.zero(**WHERE, positions=[3, 6, 7]), iv.zero(**WHERE, positions=9)]
    with pytest.warns(RuntimeWarning) as told:
        trace = cp.run(loaded(), [PROMPT], interventions=edits, sampling=stopping, **QUICK)
    said = [str(one.message) for one in told]
    assert any("changed no committed row at 2 of its 3 positions: 6, 7; no pass computed" in one for one in said)
    assert any("changed no row; no pass computed a committed token there" in one for one in said)
    assert [*map(list, trace.edits().missed)] == [[6, 7], [9]] and trace.edits().committed.tolist() == [1, 0]


def test_an_edit_that_a_later_one_replaces_is_told() -> None:
    edits = [iv.add(VECTOR, **WHERE), iv.zero(**WHERE)]
    with pytest.warns(RuntimeWarning, match="add of request 0 .* a later intervention at the same place replaces"):
        trace = cp.run(loaded(), [PROMPT], interventions=edits, **QUICK)
    assert trace.edits().committed.tolist() == [0, len(PROMPT) + NEW - 1]
    assert bool((trace.states("S", LAYER, 0) == 0).all())
    with no_warning():
        sums = cp.run(loaded(), [PROMPT], interventions=edits[::-1], **QUICK)
    assert sums.edits().committed.tolist() == [len(PROMPT) + NEW - 1] * 2
    assert bool((sums.states("S", LAYER, 0) == VECTOR).all())


@pytest.mark.parametrize(
    ("make", "phases"),
    [
        (lambda **at: iv.replace(VECTOR, site="T", layer=LAYER, **at), ("verify",)),
        (lambda **at: iv.clamp(VECTOR, 0.5, 0.5, site="S", layers=[LAYER], **at), ("prefill",)),
        (lambda **at: iv.ablate(VECTOR, site="S", layers=LAYER, **at), None),
        (lambda **at: iv.hook("C", lambda state, context: state / 2, layers=LAYER, **at), ("verify",)),
        (lambda **at: iv.zero(site="T", head=2, layer=LAYER, **at), None),
    ],
)
def test_counts_are_those_of_the_states_that_differ(make: object, phases: "tuple[str, ...] | None") -> None:
    """What leaves the edited block differs from an unchanged forward of the same text at the edited rows alone, since
    the blocks below are unchanged."""
    with no_warning():
        trace = cp.run(loaded(), [OTHER, PROMPT], interventions=make(request_id=1, phases=phases), **DRAFTED)
    text, n = [*PROMPT, *trace.committed(1)][:-1], len(PROMPT)
    wanted = {("verify",): NEW - 1, ("prefill",): n, None: n + NEW - 1}[phases]
    assert trace.edits().committed.tolist() == [wanted]
    unchanged = forward(hf_model(), text)[1][LAYER]
    differs = (trace.states("S", LAYER, 1) - unchanged).abs().amax(-1) > 1e-4
    wanted_at = {("verify",): range(n, len(text)), ("prefill",): range(n), None: range(len(text))}[phases]
    assert differs.nonzero().flatten().tolist() == list(wanted_at)


def test_counts_are_saved_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edits = [iv.zero(request_id=0, site="T", layer=2, head=1, positions=[2, 3]), iv.add(VECTOR, **WHERE)]
    trace = cp.run(loaded(), [PROMPT], interventions=edits, **DRAFTED)
    assert f"interventions: 2, committed rows changed: {2 + len(PROMPT) + NEW - 1}" in repr(trace)
    again = cp.load_trace(trace.save(tmp_path / "run"))
    assert again.edits().equals(trace.edits()) and again.edits().committed.tolist() == [2, len(PROMPT) + NEW - 1]
    on_disk = cp.run(loaded(), [PROMPT], interventions=edits, out=tmp_path / "disk", **DRAFTED)
    assert on_disk.edits().equals(trace.edits())
    show(tmp_path / "run")
    assert "interventions, and the rows that each changed" in capsys.readouterr().out


def test_a_resumed_run_keeps_an_edit_of_earlier_steps(tmp_path: Path) -> None:
    change = iv.add(VECTOR, **WHERE, steps=range(3, 6))
    settings = {**QUICK, "window": 1}
    stream = cp.stream(loaded(), [PROMPT], interventions=change, out=tmp_path / "run", **settings)
    for _ in range(8):
        next(stream)
    stream.close()
    resumed = cp.resume(tmp_path / "run", loaded(), interventions=change)
    whole = cp.run(loaded(), [PROMPT], interventions=change, **settings)
    rows = whole.rows(0)
    edited = rows.position[rows.step.between(3, 5)].tolist()
    assert resumed.committed(0) == whole.committed(0) == steered(edited)[0] != plain()
    assert resumed.edits().equals(whole.edits()) and whole.edits().committed.tolist() == [len(edited)]


def test_a_snapshot_of_a_prompt_has_no_state_of_its_last_token() -> None:
    with pytest.raises(
        ValueError, match="position 4 is that of the prompt's last token, which a KVSnapshot leaves out"
    ):
        cp.kv_snapshot(loaded(), PROMPT, interventions=iv.zero(**WHERE, positions=4, own_fingerprint=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(positions=[1.5]), "one of positions must be a whole number of at least 0, got 1.5"),
        (dict(steps=2.0), "one of steps must be a whole number of at least 0, got 2.0"),
        (dict(layer=True), "layer must be a whole number, got True"),
        (dict(request_id=[0, 0]), r"request_id is \[0, 0\]; give each request once, or .all."),
        (dict(site="T", head=0.5), "head must be a whole number, got 0.5"),
    ],
)
def test_numbers_that_name_no_row_are_refused(change: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{message}|violates type hint"):  # if calls are checked
        iv.zero(**{**WHERE, **change})
