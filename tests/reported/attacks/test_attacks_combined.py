"""Combinations and boundaries: preemption of edited requests, every 32nd pass, exact ties."""

from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.engine.checker import AGAIN_EVERY, RecomputeChecker
from cacheprobe.engine.passes import Entry, Pass
from cacheprobe.kvcache.sequence import SequenceState
from tests.by_hand import changed, generated
from tests.tiny import hf_model, loaded

# -- a preempted request that is not deterministic and began from an edited snapshot


@torch.inference_mode()
def continued(prompt: list[int], count: int, factor: float) -> list[int]:
    """Greedy tokens of transformers after its own cache was edited: values of position 1 in layer 1 are scaled."""
    live = hf_model()
    cache = live(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
    cache.layers[1].values[0, :, 1] *= factor
    text = [prompt[-1]]
    for _ in range(count):
        logits = live(torch.tensor([text[-1:]]), past_key_values=cache, use_cache=True).logits
        text.append(int(logits[0, -1].argmax()))
    return text[1:]


def test_a_preempted_request_keeps_the_edit_that_it_began_with() -> None:
    model, prompt = loaded(), [1, 2, 3, 4, 5, 6]
    snapshot = cp.kv_snapshot(model, prompt, capacity=96).edited(lambda old: old * -3, 1, layers=1, parts="V")
    requests = [[7, 8, 9], cp.Request(prompt, cached=snapshot, own_fingerprint=True)]
    settings: dict[str, Any] = dict(window=4, group=2, max_new_tokens=20, progress=False, capture="S")
    trace = cp.run(model, requests, drafter=cp.drafters.EarlyExit(layer=0), max_kv_tokens=40, **settings)
    assert [request_id for request_id, _ in trace.meta["preemptions"]].count(1) >= 1
    assert trace.committed(1) == continued(prompt, 20, -3.0) != continued(prompt, 20, 1.0)


# -- which prompt of a pass is computed again


def test_each_32nd_pass_of_several_prompts_checks_another_one_the_longest_first() -> None:
    cache, sampling = loaded().new_cache(4, 64), cp.SamplingParams(max_new_tokens=2, stop_token_ids=(), stop=())
    lengths = [9, 3, 7, 5]
    requests = [
        cp.Request("", sampling, is_deterministic=True, request_id=i, prompt_token_ids=(1,) * length)
        for i, length in enumerate(lengths)
    ]
    states = [SequenceState(request, True, sampling) for request in requests]
    for state in states:
        state.admit(cache)
    checker, chosen = RecomputeChecker(loaded()), {}
    entries = [Entry(state, state.request.prompt_token_ids, 0, True) for state in states]
    for number in range(9 * AGAIN_EVERY):
        a_pass = Pass(cache, number, "prefill", entries, 9, 4, is_without_pads=True)
        checker.plan(a_pass)
        if a_pass.recomputed is not None:
            chosen[number] = lengths[a_pass.recomputed]
    assert AGAIN_EVERY == 32 and list(chosen) == [32 * i for i in range(9)]
    assert list(chosen.values()) == [7, 5, 3, 9, 7, 5, 3, 9, 7]  # that at the first place last


# -- exact ties


# -- the first layer and the last step


def test_an_edit_of_layer_0_in_the_last_pass_decides_the_last_token() -> None:
    """The newest token is never fed, so the last pass stands at the position before it."""
    model, live, prompt, new = loaded(), hf_model(), [3, 1, 4, 1, 5], 6
    settings: dict[str, Any] = dict(max_new_tokens=new, progress=False, capture="S")
    plain = cp.run(model, [prompt], **settings).committed(0)
    last = len(prompt) + new - 2
    state = 5 * torch.randn(model.d_model, generator=torch.Generator().manual_seed(1))
    where: dict[str, Any] = dict(request_id=0, site="T", layer=0, positions=last)
    trace = cp.run(model, [prompt], interventions=[cp.interventions.add(state, **where)], **settings)
    with changed(live.model.layers[0].self_attn, lambda states: states[0, last].add_(state)):
        (want,) = generated(live, [*prompt, *plain[:-1]], 1)
    assert trace.committed(0) == [*plain[:-1], want]
