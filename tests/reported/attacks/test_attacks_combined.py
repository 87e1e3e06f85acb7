"""Combinations and boundaries: preemption of edited requests, every 32nd pass, exact ties, training of draft heads."""

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import cacheprobe as cp
from cacheprobe.api import _plan
from cacheprobe.engine.checker import AGAIN_EVERY, RecomputeChecker
from cacheprobe.engine.drafters import DraftHead
from cacheprobe.engine.estimates.assumed import ALL_ACCEPTED
from cacheprobe.engine.estimates.counting import count
from cacheprobe.engine.passes import Entry, Pass
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.training.draft_head import _split, train_draft_head
from cacheprobe.training.settings import DraftHeadSettings
from tests.tiny import PROMPTS, hf_model, loaded

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


@pytest.mark.parametrize("drafter", [None, cp.drafters.EarlyExit(layer=0)])
def test_a_preempted_request_keeps_the_edit_that_it_began_with(drafter: Any) -> None:
    model, prompt = loaded(), [1, 2, 3, 4, 5, 6]
    snapshot = cp.kv_snapshot(model, prompt, capacity=96).edited(lambda old: old * -3, 1, layers=1, parts="V")
    requests = [[7, 8, 9], cp.Request(prompt, cached=snapshot, own_fingerprint=True)]
    settings: dict[str, Any] = dict(window=4, group=2, max_new_tokens=20, progress=False, capture="S")
    trace = cp.run(model, requests, drafter=drafter, max_kv_tokens=40, **settings)
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


# -- what an estimate says of prompts that are read once and shared


@pytest.mark.parametrize("prompt_hypotheses", [False, True])
def test_an_estimate_counts_the_readings_of_shared_prompts_as_the_run_makes_them(prompt_hypotheses: bool) -> None:
    model = loaded()
    prompts = [PROMPTS[0], PROMPTS[0], cp.Request([4, 5, 6, 7], cp.SamplingParams(n=3, temperature=1.0)), PROMPTS[1]]
    capture = cp.CaptureConfig("SZ", prompt_hypotheses=prompt_hypotheses, layers=(0, 2))
    settings: dict[str, Any] = dict(
        window=4, group=2, capacity=96, max_new_tokens=6, capture=capture, sampling=cp.SamplingParams(stop_token_ids=())
    )
    trace = cp.run(model, prompts, progress=False, **settings)
    plan = _plan(model, prompts, None, settings)
    tally = count(plan, None, plan.states(None), ALL_ACCEPTED)
    rows = trace.row_table
    lengths = rows.request_id.map({i: request.num_prompt_tokens for i, request in enumerate(trace.requests)})
    by_hand = 2 * (len(rows) if prompt_hypotheses else int((rows.position >= lengths - 1).sum()))
    assert tally.readings == len(trace.hypothesis_table) == by_hand


# -- exact ties


@cache
def tied() -> Any:
    """Every odd token's row of the unembedding is that of the even one before it, to the bit."""
    live = hf_model(seed=4)
    with torch.no_grad():
        live.lm_head.weight[1:96:2] = live.lm_head.weight[0:96:2]
    return cp.load_model(live)


@pytest.mark.parametrize("way", [{}, dict(deterministic=True), dict(drafter=cp.drafters.NGram()),
                                 dict(drafter=cp.drafters.EarlyExit(layer=0), deterministic=True)])  # fmt: skip
def test_of_equal_logits_the_lowest_id_is_chosen_everywhere(way: dict[str, Any]) -> None:
    settings: dict[str, Any] = dict(window=4, group=2, max_new_tokens=16, progress=False, capture="SZ")
    trace = cp.run(tied(), PROMPTS[:3], **settings, **way)
    committed = [token for i in range(3) for token in trace.committed(i)]
    assert all(token % 2 == 0 for token in committed) and len(set(committed)) > 3
    last = trace.hypotheses().query("layer == 2 and status == 'committed'")
    assert (last["rank"] == 0).all() and (last.token_id == last.committed_token_id).all()
    with torch.no_grad():
        for i in range(3):
            text = [*PROMPTS[i], *trace.committed(i)]
            logits = tied().bridge.original_model(torch.tensor([text[:-1]])).logits[0, len(PROMPTS[i]) - 1 :]
            nats = -cross_entropy(logits, torch.tensor(text[len(PROMPTS[i]) :]), reduction="none")
            assert trace.logprobs(i) == pytest.approx(nats.tolist(), abs=1e-4)  # other orders of sums


# -- the first layer and the last step


@pytest.mark.parametrize("site", ["S", "T", "C"])
def test_an_edit_of_layer_0_in_the_last_pass_decides_the_last_token(site: str) -> None:
    """The newest token is never fed, so the last pass stands at the position before it."""
    model, live, prompt, new = loaded(), hf_model(), [3, 1, 4, 1, 5], 6
    settings: dict[str, Any] = dict(max_new_tokens=new, progress=False, capture="S")
    plain = cp.run(model, [prompt], **settings).committed(0)
    last = len(prompt) + new - 2
    state = 5 * torch.randn(model.d_model, generator=torch.Generator().manual_seed(1))
    where: dict[str, Any] = dict(request_id=0, site=site, layer=0, positions=last)
    trace = cp.run(model, [prompt], interventions=[cp.interventions.add(state, **where)], **settings)
    block = live.model.layers[0]

    def change(module: Any, args: Any, out: Any) -> None:
        (out if isinstance(out, torch.Tensor) else out[0])[0, last] += state

    handle = {"S": block, "T": block.self_attn, "C": block.mlp}[site].register_forward_hook(change)
    with torch.no_grad():
        want = int(live(torch.tensor([[*prompt, *plain[:-1]]])).logits[0, -1].argmax())
    handle.remove()
    assert trace.committed(0) == [*plain[:-1], want]


# -- training of a draft head


@pytest.fixture(scope="module")
def recorded() -> cp.Trace:
    prompts = [[i, 2 * i, 3, 5] for i in range(1, 9)]
    return cp.run(loaded(), prompts, max_new_tokens=14, progress=False, capture="S", window=4, group=2)


SETTINGS: dict[str, Any] = dict(steps=4, batch=16, hidden=8, learning_rate=3e-3, held_out=0.25)


def test_the_pairs_are_a_state_the_next_token_and_the_state_at_that(recorded: cp.Trace) -> None:
    """Token p + 1 of the text exactly, and transformers' own states of the last layer at p and p + 1."""
    model, live = loaded(), hf_model()
    sides = _split(recorded, model, DraftHeadSettings(**SETTINGS), torch.Generator().manual_seed(0))
    texts = [(*request.prompt_token_ids, *recorded.committed(i)) for i, request in enumerate(recorded.requests)]
    seen: list[torch.Tensor] = []
    handle = live.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].clone()))
    with torch.no_grad():
        for text in texts:
            live(torch.tensor([text[:-1]]))
    handle.remove()
    assert len(sides[0].token_ids) + len(sides[1].token_ids) == sum(len(text) - 2 for text in texts)
    used = []
    for side in sides:
        start = 0
        while start < len(side.token_ids):
            fits = [
                i for i, text in enumerate(texts)
                if i not in used and side.token_ids[start : start + len(text) - 2].tolist() == list(text[1:-1])
            ]  # fmt: skip
            assert fits, "the tokens are no request's text from its second token on"
            used.append(fits[0])
            end = start + len(texts[fits[0]]) - 2
            states = seen[fits[0]]
            torch.testing.assert_close(side.states[start:end], states[:-1], rtol=1e-4, atol=1e-4)  # order of sums
            torch.testing.assert_close(side.next_states[start:end], states[1:], rtol=1e-4, atol=1e-4)
            start = end
    assert sorted(used) == list(range(8))


def test_every_step_draws_other_pairs_and_the_seed_decides_which(
    recorded: cp.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[tuple[int, ...]] = []
    draw = torch.randint

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = draw(*args, **kwargs)
        if out.shape == (SETTINGS["batch"],):
            draws.append(tuple(out.tolist()))
        return out

    monkeypatch.setattr(torch, "randint", noted)
    for seed in (0, 0, 1):
        train_draft_head(recorded, DraftHeadSettings(**SETTINGS, seed=seed), progress=False)
    first, again, other = draws[:4], draws[4:8], draws[8:]
    assert len(draws) == 12 and first == again and len({*first, *other}) == 8


def test_another_weight_of_the_tokens_changes_the_head(recorded: cp.Trace) -> None:
    heads: list[DraftHead] = [
        train_draft_head(recorded, DraftHeadSettings(**SETTINGS, token_weight=weight), progress=False)
        for weight in (0.1, 0.1, 2.0)
    ]
    learnt = ("joint", "up", "down")
    same, other = ([torch.equal(heads[0].weights[n], one.weights[n]) for n in learnt] for one in heads[1:])
    assert all(same) and not any(other)
