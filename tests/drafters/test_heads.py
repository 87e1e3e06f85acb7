"""Draft heads in the engine: the states that they read, their caches, their recorded rows, edits of their layers."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.records import DraftCosts, EngineError
from cacheprobe.engine import execution
from cacheprobe.engine.drafters.base import DraftContext
from cacheprobe.engine.drafters.chain import ChainDrafter
from cacheprobe.kvcache.own_cache import OwnCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.ops.equality import bitwise
from tests.models.heads.tiny_head import SITES, TinyHeadDrafter
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

ALWAYS = {**SMALL, "draft_length": 3}
PREEMPTED = {"max_kv_tokens": 70, "capacity": 64, "prefill_chunk": 16}
DOUBLED = [*PROMPTS, PROMPTS[0], PROMPTS[2]]
"""Two requests share a prompt with another one, whose keys, values and target states they copy."""


@torch.inference_mode()
def hidden_states(token_ids: Sequence[int]) -> Tensor:
    """What transformers says enters each block of the target, and leaves the last: [p, l + 1, m]."""
    out = hf_model()(torch.tensor([token_ids]), output_hidden_states=True)
    return torch.stack([states[0] for states in out.hidden_states], dim=1)


@dataclass(frozen=True, eq=False)
class Noting(TinyHeadDrafter):
    """Notes the target states of the whole committed text at every draft."""

    seen: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        for state in states:
            kept = context.target_states(state, 0, state.last_committed_position)
            self.seen.append((tuple(state.token_ids), kept.clone()))
        return super().extend(context, states)


@pytest.mark.parametrize("settings", [{}, PREEMPTED], ids=["plain", "preempted"])
def test_target_states_are_those_of_transformers_after_rollbacks_and_preemptions(settings: dict) -> None:
    """At every draft, of every committed position, the prompt included."""
    drafter = Noting()
    trace = cp.run(loaded(), DOUBLED, **{**ALWAYS, **settings}, drafter=drafter)
    assert trace.num_rolled_back and (not settings or trace.meta["preemptions"])
    assert len(drafter.seen) > 20
    for token_ids, kept in drafter.seen:
        want = hidden_states(token_ids)[:-1]
        assert len(kept) == len(token_ids) - 1
        for i, (_, layer) in enumerate(SITES[:1]):  # the last layer's is given after the final norm
            torch.testing.assert_close(kept[:, i], want[:, layer + 1], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True, eq=False)
class Apart(TinyHeadDrafter):
    """Runs its chains on a copy of its cache, which so never sees a draft token."""

    name: ClassVar[str] = "tiny-head"

    def _step(self, context: DraftContext, head: HeadLM, own: OwnCache, residual: Tensor, drafted: dict) -> Tensor:
        before = [tensor.clone() for tensor in (*own.cache.keys, *own.cache.values)]
        chain = self.copies.setdefault(id(own.cache), before)  # what chains have written so far
        for tensor, written in zip((*own.cache.keys, *own.cache.values), chain, strict=True):
            for state in drafted:
                row, fed = own.row_of(state), self._fed[state]
                tensor[row, :, fed:] = written[row, :, fed:]
        out = super()._step(context, head, own, residual, drafted)
        for tensor, whole, written in zip((*own.cache.keys, *own.cache.values), before, chain, strict=True):
            for state in drafted:
                row, fed = own.row_of(state), self._fed[state]
                written[row, :, fed:] = tensor[row, :, fed:]
            tensor.copy_(whole)
        return out

    copies: dict[int, list[Tensor]] = field(default_factory=dict)


def cached(drafter: TinyHeadDrafter, states: Sequence[SequenceState]) -> list[Tensor]:
    """Keys and values of the head's committed rows, by request."""
    (own,) = drafter._own.values()
    parts = []
    for state in states:
        row, fed = own.row_of(state), drafter._fed[state]
        parts += [tensor[row, :, :fed].clone() for tensor in (*own.cache.keys, *own.cache.values)]
    return parts


def test_a_heads_cache_is_that_of_a_head_that_never_saw_a_rejected_token(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[type, dict[int, list[Tensor]]] = {}
    release = ChainDrafter.release

    def noting(self: TinyHeadDrafter, state: SequenceState) -> None:
        if state in self._fed:
            kept.setdefault(type(self), {})[state.request_id] = cached(self, [state])
        release(self, state)

    monkeypatch.setattr(ChainDrafter, "release", noting)
    traces = [cp.run(loaded(), PROMPTS, **ALWAYS, drafter=drafter) for drafter in (TinyHeadDrafter(), Apart())]
    assert traces[0].num_rolled_back > 10
    assert all(traces[0].committed(i) == traces[1].committed(i) for i in range(len(PROMPTS)))
    seen, apart = (kept[kind] for kind in (TinyHeadDrafter, Apart))
    assert seen.keys() == apart.keys() == {*range(len(PROMPTS))}
    for request in seen:
        assert all(bitwise(a, b) for a, b in zip(seen[request], apart[request], strict=True))


@pytest.mark.parametrize("settings", [{}, PREEMPTED], ids=["plain", "preempted"])
def test_a_heads_rows_are_recorded_once_and_have_the_states_of_its_own_forward(settings: dict) -> None:
    drafter = TinyHeadDrafter()
    trace = cp.run(loaded(), DOUBLED, **{**ALWAYS, **settings}, drafter=drafter)
    head = trace.head
    assert head is not None and (not settings or trace.meta["preemptions"])
    module = head.model.live
    for i in range(len(DOUBLED)):
        rows = head.rows(i, status="committed").sort_values("position")
        text = [*DOUBLED[i], *trace.committed(i)]
        assert rows.position.tolist() == list(range(1, rows.position.max() + 1))
        assert rows.token_id.tolist() == text[1 : len(rows) + 1]
        states = torch.stack([trace.states(*site, i) for site in SITES], dim=1)[: len(rows)]
        with torch.inference_mode():
            module.given = module.entering(states)[None]
            want = module.residual(torch.tensor([rows.token_id.tolist()]))[0]
        module.given = None
        # 1e-4: sums of three layers, of numbers up to 5, in another order
        torch.testing.assert_close(head.vectors("S", max(head.store.layers), rows), want, rtol=1e-4, atol=1e-4)


def test_rows_of_a_chain_have_its_steps_and_the_verdict_on_what_they_drafted() -> None:
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter())
    rows, events = trace.head.rows(), trace.events()
    last = max(trace.head.store.layers)
    read = trace.hypotheses(include_rolled_back=True, include_head=True)
    read = read[(read.phase == "draft") & (read.layer == read.layer.max())]
    assert read.layer.max() == loaded().n_layers + last
    drafted = events[events.draft_token_ids.map(len) > 0]
    for event in drafted.itertuples():
        born = events[(events.request_id == event.request_id) & (events.step < event.step)]
        born = born[born.proposed_token_ids.map(len) > 0]
        own = rows[(rows.request_id == event.request_id) & (rows.step == born.step.max()) & rows.chain_step.notna()]
        assert own.chain_step.tolist() == list(range(1, len(event.draft_token_ids) + 1))
        assert own.position.tolist() == list(range(event.draft_start - 1, event.draft_start - 1 + len(own)))
        lines = read[(read.request_id == event.request_id) & (read.step == born.step.max()) & read.chain_step.notna()]
        assert lines.token_id.tolist() == list(event.draft_token_ids)  # greedy: the head's first choices
        accepted = int(event.num_accepted)
        want = ["accepted"] * accepted + ["rejected"] * (len(lines) > accepted)
        assert lines.verdict.tolist() == want + ["unverified"] * (len(lines) - len(want))


def test_edits_reach_a_head_and_change_no_committed_token() -> None:
    plain = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter(), deterministic=[0])
    first = loaded().n_layers
    edit = cp.interventions.zero(site="T", layer=first, request_id=0)
    edited = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter(), deterministic=[0], interventions=edit)
    assert [edited.committed(i) for i in range(5)] == [plain.committed(i) for i in range(5)]
    assert edited.logprobs(0) == plain.logprobs(0)
    assert not edited.head.vectors("T", 0, edited.head.rows(0)).any()
    assert edited.head.vectors("T", 0, edited.head.rows(1)).any()
    assert edited.edits().committed[0] == len(edited.head.rows(0, status="committed"))
    drafts = [trace.events().proposed_token_ids[trace.events().request_id == 0] for trace in (plain, edited)]
    assert [tuple(ids) for ids in drafts[0]] != [tuple(ids) for ids in drafts[1]]
    head_layers = len(edited.head.store.layers)
    for wrong, said in [
        (dict(layer=first + head_layers), "unknown layer"),
        (dict(layer=first, phases=("verify",)), "phase draft alone"),
    ]:
        with pytest.raises(ValueError, match=said):
            one = cp.interventions.zero(site="T", request_id=1, **wrong)
            cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter(), interventions=one)


def test_states_patched_into_a_head_decide_what_it_drafts() -> None:
    """The last layer's S, from a run whose head had other weights: the head drafts what it reads in that state."""
    other, where = TinyHeadDrafter(scale=0.2), dict(site="S", layer=loaded().n_layers + 2, request_id=0)
    source = cp.run(loaded(), PROMPTS[:1], **ALWAYS, drafter=other)
    rows = source.head.rows(0)
    first = rows[rows.chain_step == 1].iloc[:1]
    patch = cp.interventions.replace(source.head.vectors("S", 2, first), positions=first.position.tolist(), **where)
    runs = [cp.run(loaded(), PROMPTS[:1], **ALWAYS, drafter=TinyHeadDrafter(), interventions=p) for p in ((), patch)]
    drafts = [run.events().proposed_token_ids for run in runs]
    first_of = [next(ids[0] for ids in proposed if len(ids)) for proposed in drafts]
    read = runs[0].head.model.read_out(source.head.vectors("S", 2, first)).argmax(-1)
    assert first_of[1] == int(read) != first_of[0]
    assert runs[0].committed(0) == runs[1].committed(0)
    with pytest.raises(ValueError, match="this trace is of a draft head"):
        cp.interventions.swap(source.head, 0, 0, site="S", layer=0, positions=[2])


def test_a_head_refuses_requests_that_start_from_a_snapshot() -> None:
    snapshot = cp.kv_snapshot(loaded(), PROMPTS[0], capacity=96)
    request = cp.Request(PROMPTS[0], cached=snapshot)
    with pytest.raises(ValueError, match="request 0 starts from a KVSnapshot"):
        cp.run(loaded(), [request], **ALWAYS, drafter=TinyHeadDrafter())


def test_a_head_that_fails_once_leaves_every_row_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third chain of several requests fails, after the rows of committed tokens were computed in the same step."""
    run, chains = HeadLM.run, iter(range(100_000))

    def failing(self: HeadLM, token_ids: Tensor, *args: object) -> Tensor:
        if token_ids.shape[1] == 1 and len(token_ids) > 1 and next(chains) == 3:
            raise RuntimeError("a fault of the head")
        return run(self, token_ids, *args)

    want = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter())
    monkeypatch.setattr(HeadLM, "run", failing)
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter())
    assert next(chains) > 4 and not trace.meta["errors"]
    assert [trace.committed(i) for i in range(5)] == [want.committed(i) for i in range(5)]
    for i in range(len(PROMPTS)):
        positions = trace.head.rows(i, status="committed").position
        assert sorted(positions) == list(range(1, positions.max() + 1))
        torch.testing.assert_close(trace.head.states("S", 0, i), want.head.states("S", 0, i)[: len(positions)])


def test_a_trained_lens_and_a_probe_read_head_and_model_alike() -> None:
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter())
    for part in (trace, trace.head):
        lens = cp.lenses.TunedLens.fresh(part.model)
        generator = torch.Generator().manual_seed(0)
        weights, biases = (torch.randn(one.shape, generator=generator) / 10 for one in (lens.weights, lens.biases))
        rows = part.rows(0, status="committed").tail(3)
        read = cp.analysis.read_states(part, replace(lens, weights=weights, biases=biases), rows=rows)
        states = part.vectors("S", 1, rows)
        parts = part.model.output_parts()
        with torch.inference_mode():
            want = (parts.norm(states + states @ weights[1] + biases[1]) @ parts.weight.T).argmax(-1)
        assert read[read.layer == 1].token_id.tolist() == want.tolist()
    vectors = {"model": trace.rows(status="committed"), "head": trace.head.rows(status="committed")}
    for name, rows in vectors.items():
        states = (trace if name == "model" else trace.head).vectors("S", 2, rows)
        labels = (rows.token_id % 2).tolist()  # of the token that the row was fed
        found = cp.probes.fit({("S", 2): states}, labels, range(len(rows))).table
        assert len(found) == 1 and found.accuracy[0] > 0.6


def test_a_replay_of_a_stored_run_drafts_what_the_run_drafted() -> None:
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter())
    kept = cp.run(loaded(), PROMPTS, **SMALL, capture="SZ")
    table = cp.analysis.acceptance(kept, TinyHeadDrafter(), windows=4, draft_length=3, progress=False)
    events = trace.events()
    for line in table.itertuples():
        own = events[events.request_id == line.request_id]
        assert line.drafted == own.draft_token_ids.map(len).sum()
        assert line.accepted == own.num_accepted.fillna(0).sum()
    tokens_only = cp.run(loaded(), PROMPTS[:1], **SMALL, capture="Z")
    with pytest.raises(ValueError, match="capture"):
        cp.analysis.acceptance(tokens_only, TinyHeadDrafter(), windows=4, progress=False)


def test_without_a_head_its_readings_are_refused() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=cp.drafters.NGram())
    assert trace.head is None
    with pytest.raises(ValueError, match="recorded no draft head"):
        trace.hypotheses(include_head=True)


# -- found by reading


def test_a_chain_that_fails_once_is_made_again_without_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    want = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter(), capture=None)
    step, chains = ChainDrafter._step, iter(range(100_000))

    def failing(self: ChainDrafter, *args: object) -> Tensor:
        if next(chains) == 3:
            raise RuntimeError("a fault of the head")
        return step(self, *args)

    monkeypatch.setattr(ChainDrafter, "_step", failing)
    trace = cp.run(loaded(), PROMPTS, **ALWAYS, drafter=TinyHeadDrafter(), capture=None)
    assert next(chains) > 4 and not trace.meta["errors"]
    assert [trace.committed(i) for i in range(5)] == [want.committed(i) for i in range(5)]


def test_edits_of_a_head_act_without_capture_too() -> None:
    edit = cp.interventions.zero(site="S", layer=loaded().n_layers + 2, request_id=0)
    runs = [
        cp.run(loaded(), PROMPTS[:1], **ALWAYS, drafter=TinyHeadDrafter(), capture=capture, interventions=edit)
        for capture in (None, "STCZ")
    ]
    drafts = [[tuple(ids) for ids in run.events().proposed_token_ids] for run in runs]
    assert drafts[0] == drafts[1]
    assert runs[0].edits().rolled_back[0] == runs[1].edits().rolled_back[0] > 0
    cp.verify(cp.run(loaded(), PROMPTS[:1], **ALWAYS, drafter=TinyHeadDrafter(), deterministic=True))


def test_layers_that_nothing_has_are_refused() -> None:
    edit = cp.interventions.zero(site="S", layer=999, request_id=0)
    with pytest.raises(ValueError, match="unknown layer 999; the model has layers 0 to 2$"):
        cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=cp.drafters.NGram(), interventions=edit)
    with pytest.raises(ValueError, match="unknown layer 999; the model has layers 0 to 2, its draft head 3 to 5"):
        cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=TinyHeadDrafter(), interventions=edit)


def test_drafts_that_do_not_pay_have_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adaptive length drops them after the head has run; the model's own drafts of these positions are others."""
    costs = DraftCosts(plain=(1.0, 1.2), draft=(0.001, 0.001), verify={4: 4.0})
    monkeypatch.setattr(execution, "costs_of", lambda *args: costs)
    settings = {**SMALL, "max_new_tokens": 40}
    trace = cp.run(loaded(), PROMPTS[:3], **settings, drafter=TinyHeadDrafter(scale=0.3), deterministic=True)
    read = trace.hypotheses(include_rolled_back=True, include_head=True)
    read = read[(read.phase == "draft") & (read.layer == read.layer.max())]
    assert read.drafted_token_id.isna().any()
    own = read[read.drafted_token_id.notna()]
    assert (own.token_id == own.drafted_token_id).all()


KEPT = """
import copy, gc, weakref
import cacheprobe as cp
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.tiny import PROMPTS, SMALL, hf_model

drafter, heads = TinyHeadDrafter(), []

def run():
    model = cp.load_model(copy.deepcopy(hf_model()))
    cp.run(model, PROMPTS[:1], **SMALL, draft_length=3, drafter=drafter)
    heads.append(weakref.ref(drafter.head(model)))

run(), run(), gc.collect(), gc.collect()
print([head() for head in heads])
"""


def test_a_drafter_keeps_no_head_of_a_model_that_is_gone() -> None:
    """In a process of its own: shape checks keep what they have seen."""
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[None, None]", done.stderr[-500:]


def test_a_head_that_gives_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = HeadLM.run
    monkeypatch.setattr(HeadLM, "run", lambda self, *args: run(self, *args) * torch.nan)
    with pytest.raises(EngineError, match="request.* step .*the draft head tiny-head gives NaN or infinite states"):
        cp.run(loaded(), PROMPTS[:2], **ALWAYS, drafter=TinyHeadDrafter())


def test_readings_of_a_head_beside_readings_that_come_later() -> None:
    later = cp.run(loaded(), PROMPTS[:2], **ALWAYS, drafter=TinyHeadDrafter(), lens="later")
    now = cp.run(loaded(), PROMPTS[:2], **ALWAYS, drafter=TinyHeadDrafter())
    columns = ["request_id", "layer", "position", "token_id", "verdict"]
    tables = [run.hypotheses(True, include_head=True)[columns] for run in (later, now)]
    pd.testing.assert_frame_equal(*tables)
    short = cp.run(loaded(), PROMPTS[:2], **{**ALWAYS, "max_new_tokens": 1}, drafter=TinyHeadDrafter())
    assert len(short.hypotheses(include_head=True)) == len(short.hypotheses())
