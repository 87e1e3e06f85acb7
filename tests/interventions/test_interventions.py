"""Interventions under the cache against a plain hook in an uncached forward, and against the oracle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.edits.interventions import ablate, ablate_feature, add, hook, mean, replace, resample, swap, zero
from cacheprobe.ops.equality import bitwise, close
from tests.dictionaries.planted import random_dictionary
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

SUMS = "without a cache the sums have other shapes"
LAYER, HEAD, WIDTH = 1, 2, 8
LIGHT = {**SMALL, "max_new_tokens": 10, "capture": "S"}
Change = Tensor | float | Callable[[Tensor], Tensor]
"""A value, or a function from the old state to the new one."""
PLACES = [("S", None), ("T", None), ("C", None), ("pre", None), ("T", HEAD)]


@contextmanager
def hooked_slowly(model: torch.nn.Module, site: str, head: int | None, changes: dict[int, Change]) -> Iterator:
    """A PyTorch hook on the plain model: at each of the positions that a whole text reaches, a value is written."""
    block = model.model.layers[LAYER]

    def change(value: Tensor) -> None:
        part = value if head is None else value[..., head * WIDTH : (head + 1) * WIDTH]
        for position, new in changes.items():
            if position < value.shape[1]:
                part[0, position] = new(part[0, position].clone()) if callable(new) else new

    def after(module: object, args: tuple, output: Tensor | tuple) -> None:
        change(output[0] if isinstance(output, tuple) else output)

    if site == "pre":
        handle = block.register_forward_pre_hook(lambda module, args: change(args[0]))
    elif head is not None:
        handle = block.self_attn.o_proj.register_forward_pre_hook(lambda module, args: change(args[0]))
    else:
        handle = {"S": block, "T": block.self_attn, "C": block.mlp}[site].register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def generated_slowly(model: torch.nn.Module, prompt: list[int], length: int) -> tuple[list[int], Tensor]:
    """Greedy tokens, each by a whole uncached forward, and what leaves the last block, [t, m], in the last one."""
    text, last = list(prompt), []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0].clone()))
    with torch.inference_mode():
        for _ in range(length):
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(int(logits.argmax()))
    handle.remove()
    return text[len(prompt) :], last[-1]


@pytest.mark.parametrize(
    ("site", "head", "path"), [*((*place, "plain") for place in PLACES), ("T", HEAD, "bridge")], ids=str
)
def test_a_run_equals_a_plain_hook_without_a_cache(site: str, head: int | None, path: str) -> None:
    """A drafter that is mostly wrong: the changed positions are drafted, rolled back and computed again."""
    prompt, positions, width = PROMPTS[0], [2, 7, 9], 32 if head is None else WIDTH
    vectors = torch.randn(3, width, generator=torch.Generator().manual_seed(4))
    where = dict(request_id=1, site=site, layer=LAYER, head=head)
    changes = [replace(vectors, positions=positions, **where), zero(positions=[4, 10], **where)]
    settings = dict(**LIGHT, drafter=cp.drafters.EarlyExit(layer=0), path=path)
    trace = cp.run(loaded(), [PROMPTS[1], prompt], interventions=changes, **settings)

    values = {**dict(zip(positions, vectors, strict=True)), 4: 0.0, 10: 0.0}
    with hooked_slowly(model := hf_model(), site, head, values):
        tokens, states = generated_slowly(model, prompt, 10)
    assert trace.committed(1) == tokens
    assert close(trace.states("S", 2, 1), states, 1e-5, because=SUMS)
    assert trace.num_rolled_back > 0 and trace.edits().committed[0] == 3
    assert trace.fingerprint["interventions_act_through"] == f"hooks of the {path}"
    plain = cp.run(loaded(), [PROMPTS[1], prompt], **settings)
    assert not close(plain.states("S", 2, 1)[2:5], states[2:5], 1e-2, because="the control: the change shows")
    assert plain.committed(0) == trace.committed(0)


CHANGED = [0, 2]


def changes_of(dtype: torch.dtype) -> list[cp.interventions.Intervention]:
    """On two requests, at prompt and generated positions, at every kind of site, by values, functions and features."""
    states, made = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).to(dtype), []
    for request_id in CHANGED:
        own = dict(request_id=request_id, own_fingerprint=True)
        made += [
            zero(site="T", layer=0, head=1, **own),
            resample(states, seed=3, site="S", layer=1, positions=[1, 6, 12], **own),
            mean(states, site="pre", layer=2, positions=[2, 9, 13], **own),
            *ablate(states[:2], site="S", layers=[0, 1], **own),
            *hook("C", lambda state, context: state * context.position, layers=1, positions=[3, 9], **own),
            ablate_feature(random_dictionary("topk"), 5, **own),
        ]
    return made


def test_changed_deterministic_requests_equal_the_oracle_under_traffic() -> None:
    """Preemptions, late arrivals, a shared prompt, wrong drafts; requests that are not changed keep their bits."""
    model = loaded(dtype=torch.bfloat16)
    sampling = cp.SamplingParams(max_new_tokens=14)
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[4], [*PROMPTS[4]], PROMPTS[2]]
    requests = [cp.Request(prompt, sampling, arrival_step=2 * i) for i, prompt in enumerate(prompts)]
    settings = dict(**LIGHT, deterministic=[0, 1, 2])
    traffic = dict(max_kv_tokens=64, drafter=cp.drafters.EarlyExit(layer=1))
    changes = changes_of(torch.bfloat16)
    trace = cp.run(model, requests, interventions=changes, **settings, **traffic)
    oracle = cp.reference(model, requests[:3], interventions=changes, **settings)
    assert [trace.digest(i) for i in range(3)] == [oracle.digest(i) for i in range(3)]
    plain = cp.reference(model, requests[:3], **settings)
    assert [trace.digest(i) == plain.digest(i) for i in range(3)] == [False, True, False]
    assert trace.meta["preemptions"] and trace.num_rolled_back > 0


def test_steps_choose_passes_and_an_preemption_forgets_nothing() -> None:
    """Request 1 is preempted after the changed step; its row of that step is rewritten with the change."""
    prompts, settings = [PROMPTS[0], PROMPTS[4]], LIGHT
    where = dict(request_id=1, site="S", layer=1)
    trace = cp.run(loaded(), prompts, interventions=zero(steps=[2, 3], **where), max_kv_tokens=24, **settings)
    rows = trace.rows(1)
    changed = rows[rows.step.isin([2, 3])].position.tolist()
    assert changed and trace.meta["preemptions"][0][1] > 3
    by_position = cp.run(loaded(), prompts, interventions=zero(positions=changed, **where), **settings)
    assert trace.committed(1) == by_position.committed(1)
    assert trace.committed(1) != cp.run(loaded(), prompts, **settings).committed(1)


def test_swapped_requests_take_each_others_place() -> None:
    """All that the last block wrote of the prompt's last token decides the next one."""
    prompts = [[1, 2, 3, 4], [9, 8, 7, 6]]
    plain = cp.run(loaded(), prompts, **LIGHT)
    last = swap(plain, 0, 1, site="S", layer=2, positions=3)
    trace = cp.run(loaded(), prompts, interventions=last, **LIGHT)
    for a, b in ((0, 1), (1, 0)):
        assert trace.committed(a)[0] == plain.committed(b)[0] != plain.committed(a)[0]
        assert bitwise(trace.states("S", 2, a)[3], plain.states("S", 2, b)[3])
        assert bitwise(trace.states("S", 2, a)[:3], plain.states("S", 2, a)[:3])
    itself = cp.run(loaded(), prompts, interventions=swap(plain, 0, 0, site="S", layer=1, positions=[1, 2]), **LIGHT)
    assert itself.digest(0) == plain.digest(0)


def test_swapped_heads_are_the_others() -> None:
    """One head of T goes over, and the others stay where they were."""
    prompts, settings = [[1, 2, 3, 4], [9, 8, 7, 6]], {**LIGHT, "capture": cp.CaptureConfig("ST", heads=("z",))}
    plain = cp.run(loaded(), prompts, **settings)
    trace = cp.run(
        loaded(), prompts, interventions=swap(plain, 0, 1, site="T", layer=1, head=2, positions=3), **settings
    )
    for a, b in ((0, 1), (1, 0)):
        ours, was, others = (run.heads("z", 1, i)[3] for run, i in ((trace, a), (plain, a), (plain, b)))
        assert bitwise(ours[2], others[2]) and bitwise(ours[[0, 1, 3]], was[[0, 1, 3]]) and not bitwise(ours, was)
        assert not bitwise(trace.states("T", 1, a)[3], plain.states("T", 1, a)[3])


def test_resampled_positions_draw_by_position_alone() -> None:
    states = torch.arange(60.0).reshape(30, 2)
    one = resample(states, seed=1, request_id=0, site="S", layer=0)
    drawn = one.vectors_at(list(range(50)))
    assert bitwise(one.vectors_at([17, 3]), drawn[[17, 3]]) and len(drawn.unique(dim=0)) > 15
    other = resample(states, seed=2, request_id=0, site="S", layer=0)
    assert not bitwise(other.vectors_at(list(range(50))), drawn)
    assert bitwise(mean(states, request_id=0, site="S", layer=0).vectors[0], states.mean(0))


def test_a_changed_run_is_replayed_with_its_changes(tmp_path) -> None:
    one = zero(request_id=1, site="T", layer=1, positions=[4], own_fingerprint=True)
    trace = cp.run(loaded(), PROMPTS[:2] + PROMPTS[4:], deterministic=[1, 2], interventions=one, **LIGHT)
    replay = cp.verify(trace, progress=False)
    assert replay.is_equal and replay.num_requests == 2
    trace.save(tmp_path / "run")
    again = cp.load_trace(tmp_path / "run", model=loaded())
    assert again.meta["interventions"] == trace.meta["interventions"]
    assert cp.verify(again, interventions=one, progress=False).is_equal
    with pytest.raises(ValueError, match="changed by interventions, which are not saved"):
        cp.verify(again, progress=False)
    other = zero(request_id=1, site="T", layer=1, positions=[3], own_fingerprint=True)
    with pytest.raises(ValueError, match="different schedules; interventions: 'request 1"):
        cp.verify(again, interventions=other, progress=False)


def test_a_result_that_is_not_finite_ends_the_request_alone() -> None:
    model = loaded(dtype=torch.float16)
    big = add(torch.full((32,), 6e4), request_id=0, site="S", layer=1, positions=[2])
    twice = [big, add(torch.full((32,), 6e4), request_id=0, site="S", layer=1, positions=[2])]
    with pytest.warns(RuntimeWarning, match="add of request 0 at site S of layer 1 makes a state of positions"):
        trace = cp.run(model, PROMPTS[:2], interventions=twice, **LIGHT)
    assert trace.meta["finish"] == {"0": "error", "1": "length"}


def test_hooks_are_gone_after_the_run() -> None:
    model = loaded()
    plain = cp.run(model, PROMPTS[:1], **LIGHT)
    for path in ("plain", "bridge"):
        cp.run(model, PROMPTS[:1], interventions=zero(request_id=0, site="S", layer=0), path=path, **LIGHT)
    again = cp.run(model, PROMPTS[:1], **LIGHT)
    assert again.digest(0) == plain.digest(0) and again.fingerprint == plain.fingerprint
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules())
