"""The adaptive length: drafts stop where they cost more than they save, begin again where they pay, change no token."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import cacheprobe as cp
from cacheprobe.analysis.summary import summary
from cacheprobe.core.records import SamplingParams
from cacheprobe.engine import execution
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafts import timing
from tests.invariants.machines import rounding_by_shape, tiny
from tests.invariants.runs import HOT, PROMPTS, RUN, future, outcome
from tests.planted_drafts import planted
from tests.tiny import VOCAB, loaded, perturbed

pytestmark = pytest.mark.determinism

LONG: dict[str, Any] = {**RUN, "window": 8, "group": 3, "capacity": 160, "max_new_tokens": 40}
NEVER: dict[str, Any] = dict(draft=0.0, verify=100.0)
"""Costs with which no draft pays."""
AT_HALF: dict[str, Any] = dict(draft=0.0, verify={2: 1.3, 4: 1.4, 8: 1.5}, plain=(1.0, 1.0))
"""Costs with which long drafts of one request pay if about every second token is accepted."""


@dataclass(frozen=True, eq=False)
class Hasty(Drafter):
    """Drafts what the reference commits, wrong between two numbers of generated tokens; stops if it does not pay."""

    want: cp.Trace
    wrong: tuple[int, int] = (0, 0)
    drafted_layers: int = 0
    name: ClassVar[str] = "hasty"
    always_drafts: ClassVar[bool] = False

    def extend(self, context: Any, states: Sequence[Any]) -> list[list[int]]:
        """The rest of the text."""
        return [[] if state.draft else self._text(state) for state in states]

    def _text(self, state: Any) -> list[int]:
        is_wrong = self.wrong[0] <= state.num_generated < self.wrong[1]
        return future(self.want, state, 0 if is_wrong else None)


def drafters(model: Any) -> list[Drafter]:
    """One of each kind that stops."""
    own = perturbed(loaded("llama", model.dtype), 0.02)
    return [
        cp.drafters.NGram(), cp.drafters.EarlyExit(layer=1), cp.drafters.FastPath(), cp.drafters.DraftModel(own)
    ]  # fmt: skip


def phases(trace: cp.Trace) -> str:
    """A letter for each step that computes after the prefill, in order: d for decode, v for verify."""
    steps = trace.events().drop_duplicates("step").query("phase != 'prefill' and batch_rows > 0")
    return "".join(steps.phase.str[0])


def verified(trace: cp.Trace) -> list[int]:
    """Lengths of the verified drafts, by step."""
    return trace.events().query("phase == 'verify'").draft_token_ids.map(len).tolist()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("costs", [NEVER, AT_HALF], ids=["never", "at half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token_changes(sampling: SamplingParams, costs: dict[str, Any], dtype: torch.dtype) -> None:
    """In bfloat16 of the deterministic requests: the bits of other ones depend on their batch, drafted or not."""
    model = tiny(dtype)
    settings = {**LONG, "sampling": sampling, "deterministic": [0, 3]}
    want = cp.run(model, PROMPTS, **settings)
    for drafter in drafters(model):
        with planted(**costs):
            trace = cp.run(model, PROMPTS, **settings, drafter=drafter)
        for i in range(5) if dtype == torch.float32 else (0, 3):
            assert trace.committed(i) == want.committed(i), drafter
        assert cp.verify(trace, model, progress=False).is_equal


def test_deterministic_requests_keep_their_bits() -> None:
    """On a machine where every shape rounds differently, and with drafts that begin and stop."""
    model = rounding_by_shape()
    want = cp.reference(model, PROMPTS, **LONG, sampling=HOT)
    counts = set()
    for wrong in ((0, 0), (8, 30), (0, 100)):
        with planted(**AT_HALF):
            drafter = Hasty(want, wrong)
            trace = cp.run(model, PROMPTS, **LONG, sampling=HOT, drafter=drafter, deterministic=[0, 3], max_batch=2)
        for i in (0, 3):
            assert outcome(trace, i) == outcome(want, i)
        counts.add(trace.num_drafted)
    assert len(counts) == 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_without_drafts_a_run_has_the_passes_of_an_undrafted_one(deterministic: bool) -> None:
    plain = cp.run(tiny(), PROMPTS, **LONG, deterministic=deterministic)
    for drafter in drafters(tiny()):
        with planted(**NEVER):
            trace = cp.run(tiny(), PROMPTS, **LONG, deterministic=deterministic, drafter=drafter)
        assert phases(trace) == phases(plain)
        assert set(trace.ledger(0).provenance) == set(plain.ledger(0).provenance)


def test_prompts_that_may_not_be_read_together_are_read_as_without_a_drafter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of requests that are not deterministic, if drafts may stop: alone, each would take a pass. `cp.verify` compares
    the others."""
    tried: list[int] = []
    monkeypatch.setattr(execution, "batches_prompts", lambda model, config, hooked, count: tried.append(count))

    def shapes(trace: cp.Trace) -> list[list[Any]]:
        """Of each pass of prompts."""
        steps = trace.events().query("phase == 'prefill'").drop_duplicates("step")
        return steps[["batch_rows", "batch_slots"]].values.tolist()

    settings = {**LONG, "prefill_chunk": 16, "pad_prefill": None}
    plain = cp.run(tiny(), PROMPTS, **settings)
    for length, given in (("adaptive", None), (7, None), ("adaptive", [0])):
        trace = cp.run(
            tiny(), PROMPTS, **settings, drafter=cp.drafters.NGram(), draft_length=length, deterministic=given or False
        )
        assert tried.pop() == len(PROMPTS)
        is_free = length == "adaptive"
        assert (shapes(trace) == shapes(plain)) == (is_free and given is None)
        assert trace.meta.get("read_freely", []) == (list(range(1 if given else 0, 5)) if is_free else [])
        if given or not is_free:
            assert f"equal to the oracle: {40 * (1 if given else 5)} tokens" in repr(
                cp.verify(trace, tiny(), progress=False)
            )
    trace.save(tmp_path / "run")
    assert cp.load_trace(tmp_path / "run").meta["read_freely"] == [1, 2, 3, 4]


def test_what_was_read_freely_is_rebuilt_as_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request's committed tokens are then read freely, too: no verify pass computed their keys."""
    monkeypatch.setattr(execution, "batches_prompts", lambda *given: False)
    settings = {**LONG, "prefill_chunk": 16, "pad_prefill": None, "max_kv_tokens": 180}
    for length in ("adaptive", 7):
        trace = cp.run(tiny(), PROMPTS, **settings, drafter=cp.drafters.FastPath(), draft_length=length)
        changes, found = trace.ledger_table, set()
        for request_id, step in trace.meta["preemptions"]:
            events = trace.events().query(f"request_id == {request_id} and step > {step} and phase != 'decode'")
            rebuilt = events[events.committed_token_ids.map(len) + events.draft_token_ids.map(len) == 0].step
            after = changes[(changes.request_id == request_id) & changes.step.isin(rebuilt)]
            found |= {*after.provenance} - {"free"}
        assert found == {"prefill", "decoded" if length == "adaptive" else "verified"}


def test_drafts_stop_and_begin_again() -> None:
    """A drafter that runs no model is asked while the run decodes, and drafts again where it is right."""
    long = {**LONG, "max_new_tokens": 120}
    want = cp.reference(tiny(), PROMPTS[:1], **long, sampling=HOT)
    with planted(**AT_HALF):
        trace = cp.run(tiny(), PROMPTS[:1], **long, sampling=HOT, drafter=Hasty(want, (9, 24)))
    drafts, length = trace.events().query("phase == 'verify'"), len(PROMPTS[0])
    assert drafts[drafts.draft_start < length + 9].draft_token_ids.map(len).max() == 7  # all that the window takes
    assert "dddddd" in phases(trace)
    assert drafts.draft_start.max() > length + 24
    assert trace.committed(0) == want.committed(0)


def test_right_first_tokens_alone_begin_no_long_draft() -> None:
    """The drafter is asked in every round, and its first token is always right, the others never. A long draft costs as
    much as six decode passes."""

    @dataclass(frozen=True, eq=False)
    class Beginner(Hasty):
        def extend(self, context: Any, states: Sequence[Any]) -> list[list[int]]:
            return [text[:1] + [(token + 1) % VOCAB for token in text[1:]] for text in super().extend(context, states)]

    want = cp.reference(tiny(), PROMPTS, **LONG)
    with planted(draft=0.0, verify=3.0, plain=(1.0, 1.0)):
        assert not cp.run(tiny(), PROMPTS, **LONG, drafter=Beginner(want)).num_drafted
        assert cp.run(tiny(), PROMPTS, **LONG, drafter=Beginner(want), draft_length=7).num_drafted


def test_a_drafter_that_runs_the_model_is_tried_rarely() -> None:
    """Every token is wrong: trials waste 3 % of the undrafted time at most."""
    long = {**LONG, "max_new_tokens": 120, "window": 4}
    want = cp.reference(tiny(), PROMPTS[:1], **long, sampling=HOT)
    with planted(draft=0.2, verify=1.2):
        trace = cp.run(tiny(), PROMPTS[:1], **long, sampling=HOT, drafter=Hasty(want, (0, 1000), drafted_layers=1))
    drafted = trace.events().query("phase == 'verify'").draft_token_ids.map(len)
    wasted = sum(0.2 * count + 1.2 - 1 for count in drafted)
    assert 0 < wasted <= 0.03 * 119 + 1
    assert drafted.index.max() - drafted.index.min() > 30  # again later, and not only at first
    with planted(draft=1.0, verify=1.2):  # right or wrong, they could not pay
        trace = cp.run(tiny(), PROMPTS[:1], **long, sampling=HOT, drafter=Hasty(want, drafted_layers=1))
    assert not trace.num_drafted


def test_a_drafter_that_is_right_drafts_all_that_pays() -> None:
    want = cp.reference(tiny(), PROMPTS[:1], **LONG, sampling=HOT)
    for draft, longest in ((0.1, 7), (0.6, 3)):  # a pass of four tokens takes less than one of eight
        with planted(draft=draft, verify={4: 1.0, 8: 1.6}):
            trace = cp.run(tiny(), PROMPTS[:1], **LONG, sampling=HOT, drafter=Hasty(want, drafted_layers=1))
        assert max(verified(trace)) == longest


def test_a_number_and_a_script_draft_always() -> None:
    want = cp.reference(tiny(), PROMPTS[:1], **LONG, sampling=HOT)
    script = cp.drafters.Scripted(lambda state: future(want, state, 0))
    for drafter, length in ((Hasty(want, (0, 1000)), 7), (Hasty(want, (0, 1000)), 3), (script, "adaptive")):
        with planted(**NEVER):
            trace = cp.run(tiny(), PROMPTS[:1], **LONG, sampling=HOT, drafter=drafter, draft_length=length)
        wanted = 7 if isinstance(length, str) else length
        assert verified(trace) == [min(wanted, left) for left in range(38, -1, -1)]


@pytest.mark.parametrize("acceptance", ["equality", "rejection"])
def test_the_same_run_twice_is_one_record(acceptance: str) -> None:
    settings = {**LONG, "sampling": HOT, "acceptance": acceptance, "max_kv_tokens": 80, "deterministic": [1]}
    for drafter in (cp.drafters.NGram, lambda: cp.drafters.EarlyExit(layer=1)):
        with planted(draft=0.02, verify=1.4):
            a, b = (cp.run(tiny(), PROMPTS, **settings, drafter=drafter()) for _ in range(2))
        assert a.events().drop(columns="seconds").equals(b.events().drop(columns="seconds"))
        assert a.meta["draft_costs"] == b.meta["draft_costs"]


def test_a_run_goes_on_with_its_own_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {name: value for name, value in LONG.items() if name != "progress"}
    with planted(**AT_HALF):
        whole = cp.run(tiny(), PROMPTS, **LONG, drafter=cp.drafters.NGram(), deterministic=True)
        stream = cp.stream(
            tiny(),
            PROMPTS,
            **settings,
            drafter=cp.drafters.NGram(),
            deterministic=True,
            out=tmp_path / "run",
            capture="STCZ",
        )
        for _ in range(12):
            next(stream)
        stream.close()
    monkeypatch.setattr(execution, "costs_of", None)  # it would fail
    again = cp.resume(tmp_path / "run", tiny(), drafter=cp.drafters.NGram(), progress=False)
    assert again.meta["draft_costs"] == whole.meta["draft_costs"]
    assert [again.committed(i) for i in range(5)] == [whole.committed(i) for i in range(5)]
    assert [again.digest(i) for i in range(5)] == [whole.digest(i) for i in range(5)]


# -- what is measured


MEASURED = """
import json, sys
import cacheprobe as cp
from cacheprobe.engine.drafts import timing
from tests.invariants.machines import tiny
from tests.invariants.runs import PROMPTS, RUN
measure, calls = timing.measure, []
timing.measure = lambda *given: calls.append(1) or measure(*given)
trace = cp.run(tiny(), PROMPTS, **RUN, drafter=cp.drafters.NGram(length=int(sys.argv[1])))
print(json.dumps([len(calls), trace.meta["draft_costs"]]))
"""


def test_costs_are_measured_once(tmp_path: Path) -> None:
    """Another process takes those on the disk; another drafter has others, and so has another number of threads."""
    found = []
    for length, threads in ((2, 2), (2, 2), (3, 2), (2, 1)):
        environment = {**os.environ, "CACHEPROBE_CACHE": str(tmp_path), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, str(length)],
            env={**environment, "MKL_NUM_THREADS": str(threads)},
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert ("measuring what drafts of ngram cost" in done.stderr) is (len(found) != 1)
        found.append(json.loads(done.stdout))
    assert [calls for calls, _ in found] == [1, 0, 1, 1]
    assert found[0][1] == found[1][1] and len(list((tmp_path / "draft-costs").glob("*.json"))) == 3


def test_costs_that_cannot_be_kept_are_measured_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that is a file; and a damaged file is written anew."""
    costs, calls = timing.DraftCosts((1.0, 1.0), (0.1, 0.1), {8: 1.0}, 0.0, 0.0), []
    monkeypatch.setattr(timing, "measure", lambda *given: (calls.append(1), costs)[1])
    monkeypatch.setattr(execution, "costs_of", timing.costs_of)
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path))
    folder = tmp_path / "draft-costs"
    folder.write_text("a file")
    for count in (1, 2):
        cp.run(tiny(), PROMPTS[:1], **LONG, drafter=cp.drafters.NGram())
        assert len(calls) == count
    folder.unlink()
    for count, content in ((3, "{}"), (4, "{"), (5, ""), (5, None)):
        cp.run(tiny(), PROMPTS[:1], **LONG, drafter=cp.drafters.NGram())
        assert len(calls) == count
        (file,) = folder.iterdir()
        if content is not None and content != "":
            file.write_text(content)


@pytest.mark.parametrize("make", [cp.drafters.NGram, cp.drafters.FastPath, lambda: drafters(loaded())[3]])
def test_every_cost_is_measured(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds above zero, for each width that a verify pass may have."""
    plans = []
    monkeypatch.setattr(execution, "costs_of", lambda plan, checker: plans.append((plan, checker)))
    cp.run(loaded(), PROMPTS, **LONG, drafter=make())
    ((plan, checker),) = plans
    costs = timing.measure(plan, checker, plan.drafter)
    assert tuple(costs.verify) == (*checker.narrow_widths, 8)
    assert min(*costs.plain, *costs.draft, *costs.verify.values()) > 0 <= costs.row
    assert costs.draft_rows == {"fast_path": 1.0}.get(plan.drafter.name, 0.0)
    assert type(costs).from_record(json.loads(json.dumps(costs.record()))) == costs


# -- what a run says


def test_a_run_says_what_its_drafts_cost() -> None:
    want = cp.reference(tiny(), PROMPTS[:1], **LONG, sampling=HOT)
    settings = {**LONG, "sampling": HOT}
    with planted(draft=0.0, verify=1.4):
        trace = cp.run(tiny(), PROMPTS[:1], **settings, drafter=Hasty(want, (0, 100)), draft_length=3)
        right = cp.run(tiny(), PROMPTS[:1], **settings, drafter=Hasty(want), draft_length=3)
    said = "drafts: 0 % accepted, 111 tokens rolled back, 1.4 times the time of no drafts"
    assert trace.draft_line == said and said in repr(trace) and said in summary(trace)
    assert right.draft_line == "drafts: 100 % accepted, 0 tokens rolled back, 0.4 times the time of no drafts"
    with planted(draft=0.25, verify=3.0, plain=(1.0, 2.0)):
        none = cp.run(tiny(), PROMPTS[:1], **settings, drafter=Hasty(want))
    assert none.draft_line == (
        "drafts: none (a draft token of 8 requests takes 0.12 of their decode pass, a verify pass of 3 takes 1.50)"
    )
    assert cp.run(tiny(), PROMPTS[:1], **settings).draft_line == ""
