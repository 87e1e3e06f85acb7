"""cp.estimate: passes, rows, bytes and time of a run before it starts, against those of the run itself."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.drafters.replayed import Replayed
from cacheprobe.engine.estimates import run as module
from cacheprobe.engine.estimates import times
from cacheprobe.engine.estimates.run import Bounds, Estimate
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.trace.trace import Trace
from tests.compiled import on_loops
from tests.thinking.test_thinking_engine import lm as thinking_lm
from tests.tiny import PROMPTS, hf_model, loaded

SETTINGS: dict[str, Any] = dict(
    window=4, group=2, capacity=96, max_new_tokens=20, sampling=cp.SamplingParams(stop_token_ids=())
)
MIXED = [
    *PROMPTS, PROMPTS[0], cp.Request([4, 5, 6], cp.SamplingParams(max_new_tokens=3, n=2, temperature=1.0)),
    cp.Request([9] * 30, arrival_step=5),
]  # fmt: skip
"""Mixed lengths, equal prompts, samples of one prompt, a later arrival."""
CAPTURES = {
    "none": None,
    "STCZ": "STCZ",
    "one layer": cp.CaptureConfig("STCZ", layers=(1,)),
    "positions": cp.CaptureConfig("SZ", positions=(0, 3, 9)),
    "decode in float64": cp.CaptureConfig("TC", phases=("decode",), dtype="float64"),
    "committed": cp.CaptureConfig("S", statuses=("committed",), every=2),
    "heads": cp.CaptureConfig("S", heads=("q", "k", "v", "z", "pattern")),
    "prompt readings": cp.CaptureConfig("Z", prompt_hypotheses=True, top_k=2),
}


def phases(trace: Trace) -> dict[str, int]:
    """Number of passes of a trace by phase; a step of a drafter without a pass has a batch of no rows."""
    steps = trace.event_table[trace.event_table.batch_rows > 0].drop_duplicates("step")
    found = Counter(steps.phase)
    return {phase: found[phase] for phase in ("prefill", "decode", "verify")}


def state_bytes(trace: Trace) -> int:
    """Bytes of every captured tensor."""
    store = trace.store
    held = [store.all_of(site, layer) for site in (*store.sites, *store.heads) for layer in store.layers]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def passes(estimate: Estimate, side: int = 1) -> dict[str, float]:
    """The estimated passes by phase. side: 0 if all drafts are accepted, 2 if none is."""
    return {phase: getattr(estimate, f"{phase}_passes")[side] for phase in ("prefill", "decode", "verify")}


def require_equal(estimate: Estimate, trace: Trace, side: int = 1) -> None:
    """Passes, rows, readings and bytes of states are the run's."""
    assert passes(estimate, side) == phases(trace)
    assert estimate.rows[side] == len(trace.row_table) and estimate.state_bytes[side] == state_bytes(trace)
    assert estimate.readings[side] == (0 if trace.hypothesis_table is None else len(trace.hypothesis_table))


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
def test_passes_and_bytes_are_those_of_the_run(capture: Any, tmp_path: Path) -> None:
    """Readings of shared prompts are counted as often as the run makes them. Files: within a factor of two, since
    tokens and texts are compressed."""
    estimate = cp.estimate(loaded(), MIXED, capture=capture, **SETTINGS)
    trace = cp.run(loaded(), MIXED, capture=capture, progress=False, **SETTINGS)
    require_equal(estimate, trace)
    assert estimate.prompt_tokens == sum(r.num_prompt_tokens for r in trace.requests)
    assert estimate.new_tokens == sum(map(len, trace.tokens.values()))
    files = sum(path.stat().st_size for path in trace.save(tmp_path / "run").iterdir())
    assert files / 2 < estimate.disk_bytes.likely < 2 * files


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 1, "deterministic": True},
        {"window": 1, "deterministic": 0.5, "max_batch": 2},
        {"window": 1, "deterministic": 0.5, "max_kv_tokens": 60},
        {"prefill_group": 2, "window": 1, "deterministic": True},
        {"determinism": "invariant", "deterministic": 0.5, "max_batch": 4},
        {"interventions": cp.interventions.zero(request_id=1, site="S", layer=0)},
    ],
    ids=str,
)
def test_passes_are_exact_where_nothing_is_drafted(settings: dict[str, Any]) -> None:
    given = {**SETTINGS, "max_new_tokens": 12, **settings, "capture": "S"}
    model = on_loops(cp.load_model(hf_model()))  # the invariant way needs them
    require_equal(cp.estimate(model, MIXED, **given), cp.run(model, MIXED, progress=False, **given))


@pytest.mark.parametrize("is_accepted", [True, False])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_the_bounds_are_runs_of_the_best_and_of_the_worst_drafts(is_accepted: bool, length: int) -> None:
    """A drafter that knows the text, and one that is always wrong. Neither is called by the estimate."""
    model, calls = loaded(), []
    texts = cp.run(model, PROMPTS, capture=None, progress=False, **SETTINGS).tokens

    def script(state: Any) -> list[int]:
        calls.append(state)
        right = texts[state.request_id][state.num_generated :][:length]
        return right if is_accepted else [(token + 1) % model.d_vocab for token in right]

    given = {**SETTINGS, "window": length + 1, "capture": "SZ", "drafter": cp.drafters.Scripted(script)}
    estimate = cp.estimate(model, PROMPTS * 8, **given)
    assert not calls and "the drafter scripted itself takes no time" in repr(estimate)
    estimate = cp.estimate(model, PROMPTS, **given)
    require_equal(estimate, cp.run(model, PROMPTS, progress=False, **given), 0 if is_accepted else 2)
    assert estimate.state_bytes.least < estimate.state_bytes.most


@pytest.mark.parametrize(
    ("drafter", "num_copies"),
    [(cp.drafters.EarlyExit(layer=0), 16), (cp.drafters.FastPath(), 8), (Replayed(), 8)],
    ids=str,
)
def test_what_is_likely_lies_between_the_bounds(drafter: Any, num_copies: int) -> None:
    """The drafts of FastPath are all accepted, and nearly none of EarlyExit's with these weights."""
    prompts = (
        [cp.Request(ids, forced_token_ids=tuple(range(20))) for ids in PROMPTS]
        if drafter.name == "replayed"
        else PROMPTS
    )
    given = {**SETTINGS, "drafter": drafter, "capture": "S"}
    estimate = cp.estimate(loaded(), prompts * num_copies, **given)
    found = phases(cp.run(loaded(), prompts * num_copies, progress=False, **given))
    for phase, likely in passes(estimate).items():
        assert passes(estimate, 0)[phase] <= likely <= passes(estimate, 2)[phase]
        assert likely == pytest.approx(found[phase], rel=0.3, abs=3)  # of 24 drafts, how many are accepted varies
    assert "as in two short runs" in repr(estimate)


def test_the_cache_is_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "max_batch": 3, "capture": None}
    estimate = cp.estimate(loaded(), PROMPTS, **settings)
    made: list[KVCache] = []
    allocate = KVCache.__init__

    def allocated(self: KVCache, *args: Any, **kwargs: Any) -> None:
        allocate(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(KVCache, "__init__", allocated)
    cp.run(loaded(), PROMPTS, progress=False, **settings)
    whole = max(made, key=lambda cache: cache.cache_bytes)
    slots = [len(prompt) + settings["max_new_tokens"] + settings["window"] for prompt in PROMPTS]
    taken = [min(-(-count // 64) * 64, whole.capacity) for count in sorted(slots)[-3:]]
    assert estimate.cache_bytes * whole.rows * whole.capacity == whole.cache_bytes * (sum(taken) + 64)
    assert estimate.peak_bytes.least > estimate.cache_bytes


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock by which passes take hours and nothing else takes time. Returns its time."""
    clock = [0.0]
    run = ModelRunner.run

    def costly(self: ModelRunner, *args: Any, **settings: Any) -> Any:
        result = run(self, *args, **settings)
        batch, width = self.shape
        clock[0] += 1 + batch * width / 100
        return result

    monkeypatch.setattr(ModelRunner, "run", costly)
    monkeypatch.setattr(times.time, "perf_counter", lambda: clock[0])
    yield clock


@pytest.mark.parametrize(
    "settings",
    [{}, {"deterministic": True}, {"deterministic": 0.5}, {"drafter": cp.drafters.EarlyExit(layer=0)}],
    ids=str,
)
def test_the_time_is_that_of_the_passes_and_a_twentieth_of_it_is_spent(
    settings: dict[str, Any], hours: list[float]
) -> None:
    """1.3: the part of accepted drafts and the widths of verify passes vary along a text."""
    given = {**SETTINGS, "capacity": 160, "max_new_tokens": 100, "capture": "S", **settings}
    prompts = [[n, n + 1, n + 2, 5, 6, *range(n)] for n in range(40)]
    cp.run(loaded(), prompts[:1], progress=False, **given)  # pass shapes are tried once
    began = hours[0]
    estimate = cp.estimate(loaded(), prompts, **given)
    spent = hours[0] - began
    cp.run(loaded(), prompts, progress=False, **given)
    taken = hours[0] - began - spent
    assert estimate.seconds is not None and taken / 1.3 < estimate.seconds.likely < 1.3 * taken
    assert spent <= taken / 20


def test_a_short_run_is_not_timed(hours: list[float]) -> None:
    cp.run(loaded(), PROMPTS, progress=False, capture="S", **SETTINGS)
    began = hours[0]
    estimate = cp.estimate(loaded(), PROMPTS, capture="S", **SETTINGS)
    assert hours[0] == began and estimate.seconds is None and "time:    not measured" in repr(estimate)


def test_nothing_is_recorded_and_the_model_is_untouched() -> None:
    """The same run, estimated before and not, has the same results and leaves the same random numbers."""
    model, prompts = loaded(), PROMPTS * 16
    given = {**SETTINGS, "deterministic": True, "drafter": cp.drafters.EarlyExit(layer=0), "capture": "STCZ"}
    before = cp.run(model, prompts, progress=False, **given)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert cp.estimate(model, prompts, **given).seconds is not None
    assert torch.equal(torch.rand(3), expected)
    after = cp.run(model, prompts, progress=False, **given)
    assert [before.digest(i) for i in range(80)] == [after.digest(i) for i in range(80)]
    assert not any(hook.fwd_hooks for hook in model.bridge.hook_dict.values())


# -- what is refused, and what is printed


def test_a_run_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the checks of a run, or, for what those leave out, by the estimate itself."""
    with pytest.raises(ValueError, match=r"largest that fits: .*capacity=\d+"):
        cp.estimate(loaded(), [1, 2, 3], capacity=10**9, max_new_tokens=5)
    monkeypatch.setattr(module, "available_bytes", lambda: 10_000)
    with pytest.raises(ValueError, match=r"needs about .* of memory, .*10,000 bytes.* available; capture fewer sites"):
        cp.estimate(loaded(), PROMPTS, **SETTINGS)
    monkeypatch.undo()
    estimate = cp.estimate(loaded(), PROMPTS, **SETTINGS)
    estimate.require_disk(tmp_path / "not" / "there")
    free = module.shutil.disk_usage(tmp_path).free
    large = replace(estimate, disk_bytes=Bounds(free * 2, free * 2, free * 2))
    with pytest.raises(ValueError, match="free; capture fewer sites.* or save to another disk"):
        large.require_disk(tmp_path)
    with pytest.raises(ValueError, match="is a Thinking States model, whose run cannot be estimated"):
        cp.estimate(thinking_lm(), [[1, 2, 3, 4]], max_new_tokens=2, window=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"widow": 3}, "widow"), ({"capture": "X"}, "unknown site"), ({"max_new_tokens": 90}, "capacity is 96")],
)
def test_settings_are_those_of_a_run(settings: dict[str, Any], message: str) -> None:
    given = {**SETTINGS, **settings}
    for call in (cp.estimate, cp.run):
        with pytest.raises((ValueError, TypeError), match=message):
            call(loaded(), PROMPTS, **given)


def test_an_estimate_says_what_it_assumed() -> None:
    change = cp.interventions.zero(request_id=1, site="S", layer=0)
    estimate = cp.estimate(loaded(), PROMPTS, capture="STC", interventions=change, **SETTINGS)
    text = repr(estimate)
    assert text.startswith(
        "Estimate of 5 requests: 57 prompt tokens, up to 100 new tokens\n  passes:  1 prefill, 19 decode"
    )
    for said in ("every request generates all its new tokens", "interventions take no time"):
        assert said in text
    assert Bounds(3, 3, 3).text() == "3" and Bounds(3, 4, 1200).text() == "4 (3 to 1,200)"
    assert Bounds(2e9, 3e9, 3e9).text("bytes") == "3.00 GB (2.00 GB to 3.00 GB)"
    assert Bounds(0.5, 90, 7200).text("seconds") == "90 s (0.5 s to 2.0 h)"
    with pytest.raises(FrozenInstanceError):
        estimate.new_tokens = 3  # type: ignore[misc]
