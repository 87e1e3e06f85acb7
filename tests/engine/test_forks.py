"""Going on from the middle of a generation, against the generation that was not interrupted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.ops.equality import bitwise
from tests.thinking.test_thinking_engine import FREE, RUN, lm
from tests.tiny import PROMPTS, SMALL, loaded

KEPT = [cp.Request(prompt, keep_kv=True) for prompt in PROMPTS[:3]]
LIGHT = {**SMALL, "capture": "S"}
ALIKE = dict(prefill_group=SMALL["group"], prefill_chunk=SMALL["window"])
"""A prefill pass in the shape of a verify pass."""


def same(a: KVSnapshot, b: KVSnapshot) -> bool:
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return a.token_ids == b.token_ids and all(bitwise(x, y) for x, y in pairs)


@pytest.mark.parametrize(("drafter", "temperature"), [(None, 0.0), (cp.drafters.EarlyExit(layer=0), 1.0)], ids=str)
def test_forks_say_what_the_whole_run_says(drafter, temperature: float) -> None:
    """Of verified and of plain requests, from within prompts and from behind them: the same tokens in float32."""
    settings = {**LIGHT, "capture": None, "sampling": cp.SamplingParams(temperature=temperature), "seed": 3}
    whole = cp.run(loaded(), KEPT, drafter=drafter, deterministic=[0], **settings)
    texts = [[*prompt, *whole.committed(i)] for i, prompt in enumerate(PROMPTS[:3])]
    places = [(i, length) for i, text in enumerate(texts) for length in (2, *range(len(text) - 18, len(text) - 1, 4))]
    forks = cp.run(loaded(), [cp.analysis.fork(whole, *place) for place in places], drafter=drafter, **settings)
    for j, (i, length) in enumerate(places):
        assert forks.committed(j) == texts[i][max(length + 1, len(PROMPTS[i])) :] != [], (i, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fork_has_the_same_bits_where_all_passes_have_one_shape(dtype: torch.dtype) -> None:
    """Tokens, log-probabilities, states and cache rows, under traffic, preemptions and wrong drafts."""
    model, drafter = loaded(dtype=dtype), cp.drafters.EarlyExit(layer=0)
    requests = [cp.Request(r.prompt, is_deterministic=True, keep_kv=True) for r in KEPT]
    whole = cp.run(model, requests, drafter=drafter, max_kv_tokens=80, **LIGHT, **ALIKE)
    assert whole.num_rolled_back > 0 and whole.meta["preemptions"]
    for length in (4, 13):
        fork = cp.analysis.fork(whole, 0, length)
        going_on = replace(fork, keep_kv=True)
        again = cp.run(model, [[7, 7], going_on], drafter=drafter, **LIGHT, **ALIKE)
        num_left = len(again.committed(1))
        assert again.committed(1) == whole.committed(0)[-num_left:]
        assert again.logprobs(1) == whole.logprobs(0)[-num_left:]
        assert bitwise(again.states("S", 2, 1), whole.states("S", 2, 0)[length:])
        assert same(cp.analysis.kv_snapshot(again, 1), cp.analysis.kv_snapshot(whole, 0))


def test_rows_of_a_run_are_what_its_cache_held() -> None:
    """With the ledger's provenance; the oracle keeps the same, and a prompt's are those of `cp.kv_snapshot`."""
    request = cp.Request(PROMPTS[0], is_deterministic=True, keep_kv=True)
    trace = cp.run(loaded(), [request, KEPT[1]], **LIGHT)
    rows = cp.analysis.kv_snapshot(trace, 0)
    assert rows.token_ids == (*PROMPTS[0], *trace.committed(0)[:-1])
    assert list(rows.provenance) == trace.ledger(0).provenance.tolist() == ["prefill"] * 5 + ["verified"] * 19
    assert set(cp.analysis.kv_snapshot(trace, 1).provenance) == {"prefill", "decoded"}
    assert same(rows, cp.analysis.kv_snapshot(cp.reference(loaded(), [request], **LIGHT), 0))
    assert same(cp.analysis.kv_snapshot(trace, 0, 4), cp.kv_snapshot(loaded(), PROMPTS[0], capacity=96))


def test_a_running_request_can_be_forked() -> None:
    """Between two pieces, with drafts open: a snapshot holds what was committed, and is no view of the cache."""
    settings = dict(SMALL, drafter=cp.drafters.EarlyExit(layer=0))
    settings.pop("progress")
    whole = cp.run(loaded(), KEPT[:2], capture=None, progress=False, **settings)
    stream, taken = cp.stream(loaded(), [PROMPTS[0], KEPT[1]], **settings), []
    for piece in stream:
        if piece.request_id == 0 and piece.finish is None:
            taken.append(stream.kv_snapshot(0))
    assert len(taken) > 3 and len({len(rows) for rows in taken}) > 3
    for rows in taken[::4]:
        assert (
            same(rows, cp.analysis.kv_snapshot(whole, 0, len(rows)))
            and rows.provenance == cp.analysis.kv_snapshot(whole, 0, len(rows)).provenance
        )
        fork = cp.run(loaded(), cp.analysis.fork(whole, 0, len(rows), rows), capture=None, progress=False, **settings)
        assert fork.committed(0) == whole.committed(0)[len(rows) + 1 - len(PROMPTS[0]) :]
    assert same(stream.kv_snapshot(1), cp.analysis.kv_snapshot(whole, 1))
    with pytest.raises(ValueError, match="request 0 holds 0 cache slots now, of 24: .*length"):
        stream.kv_snapshot(0)
    with pytest.raises(KeyError, match="no request 2"):
        stream.kv_snapshot(2)


def test_an_edited_fork_goes_another_way_and_its_ledger_says_so() -> None:
    whole = cp.run(loaded(), KEPT, deterministic=True, **LIGHT)
    rows = cp.analysis.kv_snapshot(whole, 0, 12)
    edited = rows.edited(lambda old: old * -3, [6, 9], layers=1).masked(2)
    requests = [cp.analysis.fork(whole, 0, 12), cp.analysis.fork(whole, 0, 12, edited)]
    trace = cp.run(loaded(), requests, **LIGHT)
    assert trace.committed(0) == whole.committed(0)[8:] != trace.committed(1)
    names = trace.ledger(1).provenance.tolist()
    assert [p for p, name in enumerate(names) if name == "edited"] == [2, 6, 9]
    assert names[:13] == ["prefill"] * 2 + ["edited"] + ["prefill"] * 2 + ["verified", "edited"] + ["verified"] * 2 + [
        "edited", "verified", "verified", "prefill"
    ]  # fmt: skip
    assert trace.digest(1) == cp.reference(loaded(), requests[1], **LIGHT).digest(0)
    assert trace.fingerprint["cached"] == f"request 0: {rows.digest()}; request 1: {edited.digest()}"


def test_what_cannot_be_forked_is_named(tmp_path: Path) -> None:
    trace = cp.run(loaded(), [KEPT[0], PROMPTS[1]], **LIGHT)
    with pytest.raises(ValueError, match=r"request 1 were not kept.*run it with cp.Request\(prompt, keep_kv=True"):
        cp.analysis.kv_snapshot(trace, 1)
    with pytest.raises(KeyError, match="no request 2 in this trace; it has 0 to 1"):
        cp.analysis.fork(trace, 2, 3)
    with pytest.raises(ValueError, match="rows of 24 positions cannot be cut to 25; give 1 to 24"):
        cp.analysis.fork(trace, 0, 25)
    with pytest.raises(ValueError, match="fork of request 0 at 24: it had said all of its 20 tokens.* at 23 or before"):
        cp.analysis.fork(trace, 0, 24)
    with pytest.raises(ValueError, match=r"the rows have 4 positions, not 9; cut\(\) them"):
        cp.analysis.fork(trace, 0, 9, cp.analysis.kv_snapshot(trace, 0, 4))
    stored = cp.load_trace(trace.save(tmp_path / "run"))
    with pytest.raises(ValueError, match="request 0 were not kept, and no stored run has any; run it again"):
        cp.analysis.kv_snapshot(stored, 0)
    with pytest.raises(ValueError, match="ThinkingCache holds more than keys and values"):
        cp.run(lm(), cp.Request([5, 9, 7, 11] * 2, keep_kv=True), sampling=FREE, **RUN)
