"""What every drafter keeps, and the two that need no help of the main model: prompt lookup and a second model."""

import copy
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cacheprobe as cp
from cacheprobe.core import registry
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.engine.drafters import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    EarlyExit,
    Medusa,
    NGram,
    Replayed,
    Scripted,
    base,
)
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.heads.load_mtp import load_mtp
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.sampling import choose_token
from tests.by_hand import generated
from tests.models.heads.block_heads import often_right
from tests.models.heads.checkpoints import MIMO, save_with_module
from tests.models.heads.eagle3_heads import folder_for_three_layers
from tests.tiny import PROMPTS, SMALL, VOCAB, hf_model, loaded, perturbed
from tests.twins.equivalence import ngram_draft_slowly

GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=40, stop_token_ids=(), stop=())


def new_state(prompt: list[int], request_id: int = 0, **sampling) -> SequenceState:
    sampling = SamplingParams(**sampling).over(GREEDY)
    return SequenceState(Request("", sampling, request_id=request_id, prompt_token_ids=tuple(prompt)), True, sampling)


class Context:
    """A DraftContext for drafters that feed nothing to the main model."""

    model = SimpleNamespace(d_vocab=VOCAB, tokenizer=None)

    def feed_newest(self, states, num_layers=None):
        raise AssertionError("this drafter has no use for the main model")

    def choose(self, states, logits, drafted):
        texts = [[*state.token_ids, *state.draft, *own] for state, own in zip(states, drafted, strict=True)]
        return [
            choose_token(row, s.sampling, text, len(text)) for s, row, text in zip(states, logits, texts, strict=True)
        ]


@cache
def near() -> PlainLM:
    """A model of the main one's shape, a little off: right often, and not always."""
    return perturbed(loaded(), 0.01)


@cache
def same() -> PlainLM:
    """The main model's weights once more."""
    return cp.load_model(hf_model())


# -- every drafter


def with_module() -> MTP:
    """A drafter with a module of random weights for the main model, whose weights are in no file."""
    with TemporaryDirectory() as folder:
        save_with_module(hf_model(), hf_model(), MIMO, Path(folder))
        drafter = MTP()
        drafter._heads[loaded()] = load_mtp(cp.load_model(folder))
    return drafter


EXAMPLES: dict[str, Callable[[], Drafter]] = {
    "dflash": lambda: DFlash(often_right("dflash")),
    "draft_model": lambda: DraftModel(near()),
    "eagle3": lambda: Eagle3(folder_for_three_layers()),
    "early_exit": lambda: EarlyExit(layer=1),
    "medusa": lambda: Medusa(often_right("medusa")),
    "mtp": with_module,
    "replayed": lambda: Replayed({0: {1: [3, 4]}}),
    "scripted": lambda: Scripted(lambda state: [1, 2, 3]),
}
"""How to make the drafters that need arguments. Every other one is made without."""


def made(name: str) -> Drafter:
    """Returns a drafter of the registered name."""
    return EXAMPLES.get(name, registry.find("drafters", name))()


@cache
def oracle(temperature: float = 0.0) -> cp.Trace:
    """The verifier alone."""
    return cp.reference(loaded(), PROMPTS, **SMALL, sampling=SAMPLING[temperature])


@cache
def undrafted(temperature: float) -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, sampling=SAMPLING[temperature])


SAMPLING = {
    0.0: cp.SamplingParams(temperature=0.0),
    0.8: cp.SamplingParams(temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.1),
}


@pytest.mark.parametrize("temperature", SAMPLING)
@pytest.mark.parametrize("name", registry.names("drafters"))
def test_the_contract(name: str, temperature: float) -> None:
    """Run by the engine, a drafter changes no committed token, and no bit of a deterministic request's states."""
    drafter = made(name)
    assert drafter.name == name and isinstance(drafter, registry.find("drafters", name))
    assert isinstance(drafter, Drafter)
    assert repr(drafter).startswith(f"{type(drafter).__name__}(") and "\n" not in repr(drafter)
    drafter.release(new_state(PROMPTS[0]))  # a request may leave without ever having drafted

    settings: dict[str, Any] = {**SMALL, "sampling": SAMPLING[temperature], "drafter": drafter}
    trace = cp.run(loaded(), PROMPTS, **settings, deterministic=True)
    want = oracle(temperature)
    for i in range(len(PROMPTS)):
        assert trace.committed(i) == want.committed(i) == undrafted(temperature).committed(i)
        assert trace.digest(i) == want.digest(i)
    verify = trace.events().query("phase == 'verify'")
    assert verify.draft_token_ids.map(len).sum() > 0, "it drafts nothing here"
    if name in ("draft_model", "ngram"):
        assert verify.num_accepted.sum() > 0 and trace.num_rolled_back > 0


def test_the_example_of_the_interface_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """drafters/base.py shows a whole drafter; a reader who copies it must get one that works."""
    lines = base.__doc__.splitlines()
    program = "\n".join(line[4:] for line in lines if line.startswith("    ") or not line)
    monkeypatch.setitem(registry._plugins, "drafters", dict(registry.available("drafters")))
    names: dict = {"__name__": "cacheprobe.engine.drafters.repeat_last"}
    exec(program, names)
    test_the_contract("repeat_last", 0.0)
    text = 3 * [7]
    assert names["RepeatLast"]().extend(Context(), [new_state(text)]) == [text]


# -- prompt lookup

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def lookup(text: list[int], *settings: int) -> list[int]:
    return NGram(*settings).extend(Context(), [new_state(text)])[0]


@given(texts, st.integers(1, 4), st.integers(1, 4), st.integers(1, 10))
def test_prompt_lookup_equals_its_twin(text: list[int], a: int, b: int, length: int) -> None:
    settings = max(a, b), min(a, b), length
    assert lookup(text, *settings) == ngram_draft_slowly(text, *settings)


@given(st.lists(texts, min_size=1, max_size=8), st.lists(texts, min_size=1, max_size=8))
def test_what_is_kept_of_a_text_grows_with_it(mine: list[list[int]], others: list[list[int]]) -> None:
    """Two requests turn by turn, one of which leaves and comes back."""
    drafter = NGram()
    a, b = new_state(mine[0], 0), new_state(others[0], 1)
    for more, other in zip([*mine[1:], []], [*others[1:], []], strict=False):
        drafts = drafter.extend(Context(), [a, b])
        assert drafts == [ngram_draft_slowly(state.token_ids, 8, 1, 8) for state in (a, b)]
        a.commit(tuple(more))
        b.commit(tuple(other))
        drafter.release(b)


def test_prompt_lookup_by_hand() -> None:
    assert lookup([1, 2, 3, 9, 1, 2, 3], 3, 1, 2) == [9, 1]
    assert lookup([1, 2, 8, 7, 1, 2, 9, 7, 7, 1, 2], 3, 1, 2) == [9, 7]  # equally often: the latest
    assert lookup([1, 2, 8, 1, 2, 8, 1, 2, 9, 1, 2], 2, 1, 1) == [8]  # the more frequent, though further back
    assert lookup([5, 2, 8, 7, 1, 2, 9, 7, 7, 5, 2], 3, 1, 2) == [8, 7]  # the longer one, though further back
    assert lookup([8, 1, 1], 1, 1, 4) == [1, 1, 1, 1]
    assert lookup([4, 5, 6, 4, 5], 3, 1, 8) == [6, 4, 5, 6, 4, 5, 6, 4]  # over its own copy
    assert lookup([1, 2, 3], 3, 1, 8) == [] == lookup([1], 3, 1, 8) == lookup([1, 2, 9, 2], 3, 2, 8)


def test_prompt_lookup_drafts_once_for_each_verification() -> None:
    state = new_state([1, 2, 1])
    state.draft.append(2)
    assert NGram().extend(Context(), [state]) == [[]]


@pytest.mark.parametrize("settings", [dict(max_ngram=1, min_ngram=2), dict(min_ngram=0), dict(length=0)])
def test_settings_that_draft_nothing_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="NGram"):
        NGram(**settings)


# -- a second model


@pytest.mark.parametrize("seed", range(3))
def test_a_second_model_drafts_what_it_would_say_alone(seed: int) -> None:
    """Requests of all ages in one batch: drafts accepted in part, rolled back, grown twice, requests that leave, come
    back and join. Every proposal is the small model's own uncached greedy continuation."""
    dice = random.Random(seed)
    small, drafter = hf_model("qwen2"), DraftModel(loaded("qwen2"), length=5)
    drafter.check(loaded())
    states: list[SequenceState] = []
    num_rolled_back = num_grown = 0
    for turn in range(14):
        if turn % 3 == 0:
            prompt = [dice.randrange(VOCAB) for _ in range(dice.choice([1, 3, 20, 70, 130]))]
            states.append(new_state(prompt, turn, max_new_tokens=100))
        dice.shuffle(states)
        asked = [state for state in states if dice.random() < 0.8]
        for state, proposal in zip(asked, drafter.extend(Context(), asked), strict=True):
            num_grown += bool(state.draft)
            assert len(proposal) == 5 - len(state.draft)
            assert proposal == generated(small, [*state.token_ids, *state.draft], len(proposal))
            strange = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 8))]
            match dice.randrange(6):
                case 0:  # some are kept, and the drafter is asked again before any verdict
                    state.draft.extend(proposal[: dice.randrange(5)])
                case 1:  # another drafter went on from there
                    state.draft.extend([*proposal[: dice.randrange(3)], *strange][: 4 - len(state.draft)])
                case 2:  # and was right, while this one was not asked
                    state.commit(tuple(strange))
                case 3:  # all accepted, with a bonus token
                    state.commit((*state.draft, *proposal, dice.randrange(VOCAB)))
                case _:  # rolled back at some place, possibly to another text of the same length
                    kept = [*state.draft, *proposal][: dice.randrange(5)]
                    num_rolled_back += 1
                    state.commit((*kept, dice.randrange(VOCAB)))
        if turn % 5 == 4:
            left = states.pop()
            drafter.release(left)
            if dice.random() < 0.5:
                states.append(left)
    assert num_rolled_back > 5 and num_grown > 2


def test_a_second_model_keeps_rows_only_for_requests_that_live() -> None:
    drafter = DraftModel(loaded("qwen2"))
    for _ in range(6):  # none of these is released: their run was broken off
        states = [new_state(prompt, i) for i, prompt in enumerate(PROMPTS)]
        drafter.extend(Context(), states)
        assert len(drafter._reader.fed) == len(PROMPTS) == drafter._reader.own.cache.rows
        del states
    states = [new_state(prompt, i) for i, prompt in enumerate(PROMPTS)]
    drafter.extend(Context(), states[:3])
    drafter.release(states[1])
    drafter.extend(Context(), states[3:4])
    assert {state.request_id: drafter._reader.own.row_of(state) for state in drafter._reader.fed} == {0: 0, 2: 2, 3: 1}


def test_a_second_model_stops_where_nothing_more_could_be_committed() -> None:
    want = generated(hf_model(), PROMPTS[0], 6)
    assert len(set(want[:3])) == 3

    def draft(length: int = 6, **settings) -> list[int]:
        state = new_state(PROMPTS[0], **settings)
        return DraftModel(loaded(), length).extend(Context(), [state])[0]

    assert draft() == want
    assert draft(max_new_tokens=4) == want[:3]
    assert draft(stop_token_ids=(want[2],)) == want[:3]
    state = new_state(PROMPTS[0])
    state.draft_cap = 2
    assert DraftModel(loaded(), 6).extend(Context(), [state]) == [want[:2]]
    state.draft.extend(want[:2])
    state.draft_cap = None
    assert DraftModel(loaded(), 2).extend(Context(), [state]) == [[]]


def test_a_second_model_is_silent_past_its_own_context() -> None:
    """The small model may have the shorter context: candidates end with it, and the run goes on without them."""
    model = loaded("gpt2")
    drafter = DraftModel(model, length=4)
    states = [new_state([1] * n, n) for n in (model.n_ctx - 1, model.n_ctx, model.n_ctx + 1, 5)]
    assert [len(proposal) for proposal in drafter.extend(Context(), states)] == [2, 1, 0, 4]


def test_a_second_model_that_does_not_fit_is_refused_by_name() -> None:
    main = loaded()
    DraftModel(loaded("qwen2")).check(main)  # no tokenizer: there are only ids to compare

    larger = copy.copy(loaded("qwen2"))
    larger.d_vocab = VOCAB + 1
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB + 1}.*one of {VOCAB}"):
        DraftModel(larger).check(main)
    with pytest.raises(ValueError, match="the very weights"):
        cp.run(loaded(), PROMPTS[0], **SMALL, drafter=DraftModel(loaded()))
    with pytest.raises(ValueError, match="length=0"):
        DraftModel(loaded(), length=0)


def test_a_second_model_that_gives_nan_is_named() -> None:
    model = copy.copy(loaded("qwen2"))
    model.name, model.forward = (
        "broken",
        lambda *args, **settings: loaded("qwen2").forward(*args, **settings) * torch.nan,
    )
    with pytest.raises(ValueError, match="draft model broken gives NaN"):
        DraftModel(model).extend(Context(), [new_state([1, 2])])


# -- in the main loop


@pytest.mark.parametrize("acceptance", ["equality", "rejection"])
@pytest.mark.parametrize(
    "sampling",
    [cp.SamplingParams(), cp.SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.2)],
    ids=["greedy", "sampled"],
)
def test_the_same_weights_are_always_right(sampling: cp.SamplingParams, acceptance: str) -> None:
    """Every candidate is chosen with the noise, and after the tokens, that the verifier uses for its position; under
    rejection, it is drawn from the distribution that the verifier finds again."""
    drafter = DraftModel(same(), length=3)
    trace = cp.run(loaded(), PROMPTS, **SMALL, sampling=sampling, drafter=drafter, acceptance=acceptance)
    verify = trace.events().query("phase == 'verify'")
    assert verify.num_accepted.sum() > 60 and trace.num_rolled_back == 0


def test_a_second_model_follows_requests_that_were_preempted() -> None:
    """Rows run out, arrivals are late: a request gives up both of its caches, and both are built again."""
    late = [cp.Request(prompt, arrival_step=4 * i) for i, prompt in enumerate(PROMPTS)]
    settings = dict(drafter=DraftModel(near()), deterministic=True, max_kv_tokens=90, max_batch=3)
    trace = cp.run(loaded(), late, **SMALL, **settings)
    assert trace.meta["preemptions"]
    assert [trace.committed(i) for i in range(5)] == [oracle().committed(i) for i in range(5)]
    assert [trace.digest(i) for i in range(5)] == [oracle().digest(i) for i in range(5)]
