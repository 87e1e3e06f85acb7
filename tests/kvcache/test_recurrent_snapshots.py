"""Snapshots with recurrent states: runs that continue from one, against the run of the whole prompt."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.kvcache.recurrent import LayerStates
from cacheprobe.kvcache.surgery import KVSnapshot, put_snapshot
from cacheprobe.models.plain.lm import PlainLM
from tests.field.tiny_family import tiny_family
from tests.tiny import loaded

_SLOW = ("olmo_hybrid", "rwkv", "xlstm", "falcon_h1", "nemotron_h", "zamba2")
FAMILIES = ["bamba", "mamba2", *(pytest.param(family, marks=pytest.mark.slow) for family in _SLOW)]
PROMPT, OTHER = (3, 10, 17, 24, 31, 38, 45, 52, 59), (5, 80, 33, 4, 7, 8, 9, 10, 11)
PADDED = dict(prefill_chunk=4, pad_prefill=True)
"""Makes a prefill pass as wide as a verify pass, so that one token has the same bits in both."""
SHAPE: dict[str, Any] = dict(
    window=4, group=2, prefill_group=2, capacity=96, max_new_tokens=6, progress=False, deterministic=True, **PADDED
)


@cache
def model(family: str) -> PlainLM:
    one = cp.load_model(copy.deepcopy(tiny_family(family)), products="torch")
    assert isinstance(one, PlainLM)
    return one


def run(family: str, request: Any, **settings: Any) -> cp.Trace:
    heads = ("recurrent",) if model(family).state_shapes else ()
    return cp.run(model(family), [request], capture=cp.CaptureConfig(heads=heads), **{**SHAPE, **settings})


def snapshot(family: str, prompt: tuple[int, ...] = PROMPT) -> KVSnapshot:
    return cp.kv_snapshot(model(family), prompt, capacity=96, **PADDED)


def continued(rows: KVSnapshot, prompt: tuple[int, ...] = PROMPT) -> cp.Request:
    return cp.Request(prompt, cached=rows, own_fingerprint=True)


def logits_after(family: str, rows: KVSnapshot, token_id: int) -> torch.Tensor:
    """Logits of one more token after a snapshot in a new cache."""
    held = model(family).new_cache(1, 16)
    held.allocate()
    put_snapshot(rows, held, 0)
    return model(family).forward(torch.tensor([[token_id]]), held, [0], [len(rows)]).clone()


def same_states(family: str, whole: cp.Trace, part: cp.Trace, start: int) -> bool:
    """True if all positions from `start` on have the same bits, of the stream and of recurrent states."""
    one, pairs = model(family), list[tuple[torch.Tensor, torch.Tensor]]()
    for layer in range(one.n_layers):
        pairs.append((whole.states("S", layer, 0)[start:], part.states("S", layer, 0)))
    for layer in one.state_shapes:
        pairs.append((whole.heads("recurrent", layer, 0)[start:], part.heads("recurrent", layer, 0)))
    assert pairs[-1][1].numel() and bool(pairs[-1][1].isfinite().all())
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_continues_from_a_snapshot(family: str) -> None:
    whole, rows = run(family, PROMPT), snapshot(family)
    assert len(rows) == len(PROMPT) - 1 and set(rows.states) == set(model(family).initial)
    for length in (len(rows), 5, 1):
        part = run(family, continued(rows.cut(length)))
        assert part.committed(0) == whole.committed(0)
        assert same_states(family, whole, part, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_goes_on_as_its_run_did(family: str) -> None:
    whole = run(family, cp.Request(PROMPT, keep_kv=True))
    for length in (4, len(PROMPT) + 2):
        fork = run(family, cp.analysis.fork(whole, 0, length))
        num_left = fork.requests[0].sampling.max_new_tokens
        assert num_left and fork.committed(0) == whole.committed(0)[-num_left:]
        assert same_states(family, whole, fork, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_states_give_other_logits(family: str) -> None:
    mine, others = snapshot(family), snapshot(family, OTHER)
    exchanged = replace(mine, states=others.states)
    assert torch.equal(logits_after(family, mine, 7), logits_after(family, snapshot(family), 7))
    assert not torch.equal(logits_after(family, exchanged, 7), logits_after(family, mine, 7))
    assert not same_states(family, run(family, PROMPT), run(family, continued(exchanged)), len(mine))


def test_a_digest_depends_on_the_last_state() -> None:
    rows, last = snapshot("bamba"), len(PROMPT) - 2
    assert rows.digest() == snapshot("bamba").digest()

    def changed(position: int) -> KVSnapshot:
        layer = max(rows.states)
        of_layer: dict[int, LayerStates] = dict(rows.states[layer])
        of_layer[position] = {key: value + 1 for key, value in of_layer[position].items()}
        return replace(rows, states={**rows.states, layer: of_layer})

    assert changed(last).digest() != rows.digest()
    assert changed(last - 1).digest() == rows.digest(), "no later token starts from it"


def test_other_or_missing_states_are_refused_by_name() -> None:
    rows = snapshot("bamba")
    said = "recurrent states of layers .* take the rows from this model"
    lacking = {layer: states for layer, states in rows.states.items() if layer != max(rows.states)}
    for states in ({}, lacking, snapshot("mamba2").states):
        with pytest.raises(ValueError, match=said):
            run("bamba", continued(replace(rows, states=states)))
    for other in (cp.kv_snapshot(loaded(), PROMPT), snapshot("mamba2")):
        with pytest.raises(ValueError, match="take (them|the rows) from this model"):
            run("bamba", continued(other))
    with pytest.raises(ValueError, match="take (them|the rows) from this model"):
        cp.run(loaded(), [continued(rows)], **SHAPE)
    few = {layer: {len(rows) - 1: of_layer[len(rows) - 1]} for layer, of_layer in rows.states.items()}
    with pytest.raises(ValueError, match="states of layer . after position 4 were not kept"):
        replace(rows, states=few).cut(5)
