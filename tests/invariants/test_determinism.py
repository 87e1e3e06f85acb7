"""Invariants 1, 2, 3, 24 and 27: what a deterministic request says is its own, and others pay nothing for it."""

import random

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.models.base import CachedLM
from cacheprobe.models.fast import tape
from cacheprobe.ops import attention as request_attention
from tests.compiled import on_loops
from tests.invariants.machines import Spy, near_twins, rounding_by_shape, tiny, wide_bfloat16
from tests.invariants.runs import (
    HOT,
    NEW,
    PROMPTS,
    RUN,
    G,
    Outcome,
    W,
    Watched,
    babbler,
    future,
    outcome,
    random_batch,
    wrong_at,
)
from tests.planted import Planted, ends, in_some_narrow_passes
from tests.tiny import VOCAB, hf_model, loaded

pytestmark = pytest.mark.determinism


def alone(model: CachedLM, request: Request, **settings) -> Outcome:
    return outcome(cp.reference(model, [request], **{**RUN, **settings}))


def needle(sampling: SamplingParams = HOT, prompt: int = 0) -> Request:
    return Request(PROMPTS[prompt], sampling, is_deterministic=True, arrival_step=3)


def met_again(model: CachedLM, trials: int, seed: int, vocab: int = VOCAB) -> set[str]:
    """Compares a request in a random batch with the same request alone; returns which events the batch had."""
    rng = random.Random(seed)
    request = needle()
    want, seen = alone(model, request), set()
    for _ in range(trials):
        requests, place, settings = random_batch(rng, request, vocab)
        trace = cp.run(model, requests, **{**RUN, **settings})
        assert outcome(trace, place) == want, (place, settings)
        mine = trace.events().query(f"request_id == {place}")
        seen |= {"rollback"} if mine.num_rolled_back.sum() else set()
        seen |= {"preemption"} if place in dict(trace.meta["preemptions"]) else set()
        seen |= {"batch"} if trace.events().groupby("step").size().max() > 1 else set()
    return seen


def test_invariant_01_run_determinism_where_every_shape_rounds_differently() -> None:
    """Tokens, log-probabilities, states and readings are batch-invariant, at any arrival and limit."""
    assert met_again(rounding_by_shape(), trials=8, seed=3) == {"rollback", "preemption", "batch"}


def test_invariant_01_run_determinism_in_bfloat16() -> None:
    """The same over real kernels in bfloat16, of a model that is wide enough to make them disagree."""
    assert "batch" in met_again(wide_bfloat16(), trials=3, seed=4, vocab=499)


def test_invariant_01_run_determinism_over_repeats_and_orders() -> None:
    """Twice the same run, in both orders, gives the same bits."""
    a = cp.run(rounding_by_shape(), PROMPTS, **RUN, sampling=HOT, deterministic=True)
    b = cp.run(rounding_by_shape(), PROMPTS[::-1], **RUN, sampling=HOT, deterministic=True)
    assert [outcome(a, i) for i in range(5)] == [outcome(b, 4 - i) for i in range(5)]
    assert a.num_rolled_back > 0


def test_invariant_02_oracle_equality() -> None:
    """What is committed equals the slow oracle's: one verify pass a token, alone; whatever the window and the group."""
    for window, group in ((W, G), (1, 4), (6, 2)):
        settings = {**RUN, "window": window, "group": group, "sampling": HOT}
        trace = cp.run(rounding_by_shape(), PROMPTS[:4], **settings, deterministic=True)
        want = cp.reference(rounding_by_shape(), PROMPTS[:4], **settings)
        assert [outcome(trace, i) for i in range(4)] == [outcome(want, i) for i in range(4)]


def test_invariant_02_oracle_equality_as_the_users_can_ask_for_it() -> None:
    """`cp.verify` replays a run against the oracle and counts what it compared."""
    trace = cp.run(rounding_by_shape(), PROMPTS[:2], **RUN, sampling=HOT, deterministic=True)
    result = cp.verify(trace, rounding_by_shape(), progress=False)
    assert result.is_equal and result.num_states == sum(3 * 3 * (len(p) + NEW - 1) for p in PROMPTS[:2])


def test_invariant_02_oracle_equality_on_both_paths_in_both_dtypes() -> None:
    """The same on the bridge and on the plain model, in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        for path in ("bridge", "plain"):
            settings = {**RUN, "sampling": HOT, "path": path}
            trace = cp.run(loaded("llama", dtype), PROMPTS[:2], **settings, deterministic=True)
            want = cp.reference(loaded("llama", dtype), PROMPTS[:2], **settings)
            assert [outcome(trace, i) for i in range(2)] == [outcome(want, i) for i in range(2)]
            assert trace.fingerprint["path"] == path


def test_invariant_03_candidate_independence() -> None:
    """Candidates decide how many tokens a pass commits, and never which: right, wrong, random, or stop tokens."""
    model = rounding_by_shape()
    prompts = [PROMPTS[4], PROMPTS[0], PROMPTS[1]]
    stop = cp.reference(model, prompts[:1], **RUN, sampling=HOT, capture=None).committed(0)[6]
    sampling = SamplingParams(temperature=HOT.temperature, seed=HOT.seed, stop_token_ids=(stop,))
    want = cp.reference(model, prompts, **RUN, sampling=sampling, capture="S")
    assert want.meta["finish"]["0"] == "stop"
    scripts = {
        "right": lambda state: future(want, state),
        "wrong": lambda state: [(t + 1) % VOCAB for t in future(want, state)] or [1],
        "stop": lambda state: [stop] * 3,
        "stop late": lambda state: [*future(want, state)[:1], stop, 5],
        "none": lambda state: [],
        "lowest": lambda state: [0] * 99,
    }
    drafters = [cp.drafters.Scripted(script) for script in scripts.values()]
    drafters += [babbler(1), cp.drafters.FastPath(), cp.drafters.EarlyExit(layer=0)]
    costs = set()
    for drafter in drafters:
        settings = {**RUN, "drafter": drafter, "sampling": sampling, "capture": "S"}
        trace = cp.run(model, prompts, **settings, deterministic=True)
        assert [outcome(trace, i) for i in range(3)] == [outcome(want, i) for i in range(3)]
        costs.add(trace.num_rolled_back)
    assert len(costs) > 4


def test_invariant_03_candidate_independence_with_a_mismatch_in_every_row() -> None:
    """A first mismatch at each place of the draft in turn, the last one and none included."""
    want = cp.reference(tiny(), PROMPTS[:3], **RUN)
    places = [2, 0, 1, None]
    trace = cp.run(tiny(), PROMPTS[:3], **RUN, drafter=wrong_at(want, places), deterministic=True)
    assert [outcome(trace, i) for i in range(3)] == [outcome(want, i) for i in range(3)]
    full = trace.events().query("phase == 'verify'")
    full = full[full.draft_token_ids.map(len) == W - 1]
    assert set(full.num_accepted) == {0, 1, 2, 3}


def test_invariant_03_candidate_independence_where_attention_depends_on_the_width() -> None:
    """The drafts of all requests of a pass could choose its width, which may decide bits: of softcapped attention, for
    one, where torch computes it. The trial of the shapes has no text where this fault shows."""
    model = on_loops(cp.load_model(hf_model("gemma2", torch.float32)))
    drafter = cp.drafters.Scripted(lambda state: [1, 2, 3] if len(state.token_ids) % 2 else [])
    prompts = [[5, 6, 7], [*range(20, 32)], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
    settings = dict(drafter=drafter, window=4, group=4, capacity=64, max_new_tokens=24)
    fault = Planted("attention by scores", in_some_narrow_passes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_attention, "serves", lambda q: False)
        patch.setattr(tape, "serves", lambda q: False)
        verdict = ends(model, fault, prompts, **settings)
    assert verdict.kind == "right" and fault.num_calls, verdict


def test_invariant_24_selectivity() -> None:
    """Flag off: no verify pass, no fixed prefill, nobody's tokens changed. Flag on for some: the others decode on."""
    model = Spy(tiny())
    plain = cp.run(model, PROMPTS, **RUN, sampling=HOT)
    assert set(plain.events().phase) == {"prefill", "decode"}
    assert {call.shape for call in model.calls} == {(5, 11)} | {(5, 1)}
    mixed = cp.run(tiny(), PROMPTS, **RUN, sampling=HOT, deterministic=[1, 3])
    verified = mixed.events().query("phase == 'verify'")
    assert set(verified.request_id) == {1, 3}
    for i in (0, 2, 4):  # float32: another batch height is no reason for another token
        assert mixed.committed(i) == plain.committed(i)
        ledger = mixed.ledger(i)
        assert set(ledger.provenance) == {"prefill", "decoded"}
        steps = mixed.events().query(f"request_id == {i} and phase == 'decode'")
        assert len(steps) == NEW - 1


def test_invariant_24_selectivity_with_riders() -> None:
    """A window of one row: never-verified requests ride in the dummies' places and are none the worse for it."""
    settings = {**RUN, "window": 1, "group": 4, "sampling": HOT}
    model = rounding_by_shape()
    want = cp.reference(model, PROMPTS, **settings)
    trace = cp.run(model, PROMPTS, **settings, deterministic=[0, 2])
    for i in (0, 2):
        assert outcome(trace, i) == outcome(want, i)
    shapes = trace.events().query("phase == 'verify'")
    assert set(shapes.batch_rows) == {4} and set(shapes.batch_slots) == {1}
    assert set(shapes.request_id) > {0, 2}, "nobody rode along"
    plain = cp.run(tiny(), PROMPTS, **settings)
    ridden = cp.run(tiny(), PROMPTS, **settings, deterministic=[0, 2])
    assert [ridden.committed(i) for i in range(5)] == [plain.committed(i) for i in range(5)]


def test_invariant_24_selectivity_riders_fill_places_and_take_none() -> None:
    """Riders never add a pass: passes are as many as the verified requests alone would need."""
    settings = {**RUN, "window": 1, "group": 2, "sampling": HOT}
    run = Watched(tiny(), PROMPTS, **{k: v for k, v in settings.items() if k != "progress"}, deterministic=[0, 1, 2])
    for _ in run:
        pass
    by_step = run.trace.events().query("phase == 'verify'").groupby("step").request_id.apply(set)
    assert all(ids & {0, 1, 2} for ids in by_step)
    assert all(len(ids) <= 2 for ids in by_step)


def test_invariant_27_negative_control() -> None:
    """With verification off, real kernels give other tokens in other batches; on, they do not.

    In float32: there are processors on which no product in bfloat16 depends on the batch.
    """
    model = near_twins()
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 20))] for _ in range(9)]
    settings = {**RUN, "max_new_tokens": 40, "capture": None}
    together = cp.run(model, prompts, **settings)
    smaller = cp.run(model, prompts[1:6], **settings)
    alone = cp.run(model, prompts, **settings, max_batch=1)
    differing = [i for i in range(9) if together.committed(i) != alone.committed(i)]
    differing += [i for i in range(1, 6) if smaller.committed(i - 1) != alone.committed(i)]
    assert differing, "no sequence diverged: this machine's kernels are batch-invariant, or the model is too small"
    prompt = prompts[differing[0]]
    verified = [cp.run(model, batch, **settings, deterministic=[0]) for batch in ([prompt], [prompt, *prompts[:3]])]
    assert verified[0].committed(0) == verified[1].committed(0)
