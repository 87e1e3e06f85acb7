"""A fault in a user's own drafter, lens or task concerns the request it belongs to: the others cannot tell."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, ClassVar

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.passes import EngineError
from cacheprobe.tasks import CoinFlip
from cacheprobe.tasks.base import Example
from tests.tiny import PROMPTS, SMALL, VOCAB, loaded

BAD = 1
"""The request that a fault belongs to."""
OTHERS = [i for i in range(len(PROMPTS)) if i != BAD]
RUN = {**SMALL, "max_new_tokens": 8}


class Own:
    """A user's drafter, which proposes two tokens for each request."""

    name: ClassVar[str] = "own"

    def check(self, model: Any) -> None: ...

    def release(self, state: Any) -> None: ...

    def extend(self, context: Any, states: Sequence[Any]) -> Any:
        return [[1, 2] for _ in states]


def faulty(entry: Callable[[], Any] | None = None, whole: Callable[[list], Any] | None = None, is_late: bool = False):
    """A drafter whose fault comes with request BAD, at once or once it has committed some tokens.

    entry: makes what it proposes for that request.  whole: makes what it returns of what it would have returned.
    """

    class Faulty(Own):
        def extend(self, context: Any, states: Sequence[Any]) -> Any:
            ours = [s.request_id == BAD and (not is_late or s.num_generated > 3) for s in states]
            right = [entry() if mine and entry else [1, 2] for mine in ours]
            return whole(right) if any(ours) and whole else right

    return Faulty()


@cache
def undisturbed(kind: str = "drafted") -> cp.Trace:
    settings = {"drafted": {"drafter": Own()}, "plain": {}}[kind]
    return cp.run(loaded(), PROMPTS, **RUN, deterministic=True, **settings)


def fail(error: BaseException) -> Callable[..., Any]:
    def raises(*args: Any) -> Any:
        raise error

    return raises


def require_isolated(trace: cp.Trace, message: str) -> None:
    """Request BAD alone ended with an error, by name; the others have every token and state that they always have."""
    want = undisturbed()
    assert set(trace.meta["errors"]) == {str(BAD)} and trace.meta["finish"][str(BAD)] == "error"
    said = trace.meta["errors"][str(BAD)]
    assert f"request {BAD} step " in said.replace("requests", "request") and message in said, said
    assert trace.committed(BAD) == want.committed(BAD)[: len(trace.committed(BAD))]
    for i in OTHERS:
        assert trace.committed(i) == want.committed(i) and trace.digest(i) == want.digest(i)


FAULTS = {
    "an entry is None": (faulty(entry=lambda: None), "must propose a list of token ids, got None"),
    "a token is None": (faulty(entry=lambda: [None]), "a proposed token must be a whole number, got None"),
    "a token is a float": (faulty(entry=lambda: [1.0]), "a proposed token must be a whole number, got 1.0"),
    "a token is outside": (faulty(entry=lambda: [VOCAB]), f"proposed token {VOCAB}, outside the vocabulary of {VOCAB}"),
    "None is returned": (faulty(whole=lambda right: None), "must return 1 lists of token ids, one for each"),
    "a list is left over": (faulty(whole=lambda right: [*right, []]), "one for each request, got 2 lists"),
    "it raises a TypeError": (faulty(entry=fail(TypeError("no"))), "drafter own failed with TypeError: no"),
    "it raises a KeyError": (faulty(whole=fail(KeyError("no"))), "drafter own failed with KeyError: 'no'"),
    "it fails later": (faulty(entry=lambda: [None], is_late=True), "a proposed token must be a whole number, got None"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafters_fault_ends_the_request_that_it_belongs_to(fault: str) -> None:
    drafter, message = FAULTS[fault]
    with pytest.warns(RuntimeWarning, match=f"request {BAD} ended with an error"):
        trace = cp.run(loaded(), PROMPTS, **RUN, deterministic=True, drafter=drafter)
    require_isolated(trace, message)
    assert bool(fault == "it fails later") == (len(trace.committed(BAD)) > 1)


def test_a_scripts_fault_is_told_of_every_request() -> None:
    """`Scripted` asks a function of the user's; 1.5 was taken for token 1."""
    with pytest.raises(EngineError, match=r"request 0 step \d+: drafter scripted failed with \w+Error"):
        cp.run(loaded(), PROMPTS[:2], **RUN, drafter=cp.drafters.Scripted(lambda s: [1.5]))


def test_an_endless_proposal_is_cut() -> None:
    trace = cp.run(loaded(), PROMPTS, **RUN, deterministic=True, drafter=faulty(entry=lambda: count(1)))
    assert [trace.committed(i) for i in range(5)] == [undisturbed().committed(i) for i in range(5)]


def test_a_drafter_may_run_passes_and_choose_tokens() -> None:
    """They are those of the fast path. A forward of the model by itself, without the engine, is not recorded."""

    class Looks(Own):
        def extend(self, context: Any, states: Sequence[Any]) -> Any:
            context.model.bridge.forward(torch.tensor([[1, 2]]))
            logits = context.feed_newest(states)
            return [[token_id] for token_id in context.choose(states, logits)]

    trace, want = (
        cp.run(loaded(), PROMPTS, **RUN, deterministic=True, drafter=drafter, path="bridge")
        for drafter in (Looks(), cp.drafters.FastPath())
    )
    assert [trace.digest(i) for i in range(5)] == [want.digest(i) for i in range(5)]
    assert trace.num_rolled_back == want.num_rolled_back


def test_a_fault_in_release_loses_no_token() -> None:
    class Forgetful(Own):
        def release(self, state: Any) -> None:
            raise KeyError(state.request_id)

    with pytest.warns(RuntimeWarning, match="request 0: drafter own failed with KeyError: 0, in release"):
        trace = cp.run(loaded(), PROMPTS, **RUN, deterministic=True, drafter=Forgetful(), max_kv_tokens=70)
    assert not trace.meta["errors"]
    assert [trace.digest(i) for i in range(5)] == [undisturbed().digest(i) for i in range(5)]


def test_a_drafter_whose_check_fails_is_refused_at_the_start() -> None:
    drafter = type("Changed", (Own,), {"check": fail(KeyError("x"))})()
    with pytest.raises(ValueError, match="check of drafter own failed, KeyError"):
        cp.run(loaded(), PROMPTS, **RUN, drafter=drafter)


# -- lenses


@dataclass
class OwnLens:
    """The logit lens of a user's own, but for the states of some requests."""

    wrong: Callable[[torch.Tensor, torch.Tensor], Any]
    """(logits of a tile [n, v], flags [n] of the rows to spoil) -> what it returns of a tile that has such rows."""
    marked: torch.Tensor
    """[k, m] states that it fails on."""
    name: ClassVar[str] = "own"
    sites: ClassVar[tuple[str, ...]] = ("S",)

    @classmethod
    def fresh(cls, model: Any) -> "OwnLens":
        return cls(lambda logits, spoiled: logits, torch.zeros(1, model.d_model))

    def check(self, model: Any) -> None: ...

    def logits(self, model: Any, states: torch.Tensor, layers: torch.Tensor) -> Any:
        logits = model.read_out(states)
        spoiled = (states[:, None] == self.marked).all(-1).any(-1)
        return self.wrong(logits, spoiled) if bool(spoiled.any()) else logits


def spoil(value: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda logits, spoiled: torch.where(spoiled[:, None], value, logits)


LENS_FAULTS = {
    "raises": (fail(IndexError("no such layer")), "lens own failed with IndexError: no such layer; expected were"),
    "None": (lambda logits, spoiled: None, f"lens own must return logits [480, {VOCAB}], got None"),
    "a shape": (lambda logits, spoiled: logits[:, :-1], f"logits [480, {VOCAB}], got [480, {VOCAB - 1}] of float32"),
    "too few rows": (lambda logits, spoiled: logits[:-1], f"must return logits [480, {VOCAB}], got [479, {VOCAB}]"),
    "ids": (lambda logits, spoiled: logits.argsort(-1), f"logits [480, {VOCAB}], got [480, {VOCAB}] of int64"),
    "NaN": (spoil(float("nan")), "with a finite largest one, got NaN or infinity"),
    "nothing possible": (spoil(float("-inf")), "with a finite largest one, got NaN or infinity"),
}  # fmt: skip


def marked_states() -> torch.Tensor:
    """S of layer 1 at two late positions of request BAD: some of its readings succeed before."""
    return undisturbed("plain").states("S", 1, BAD)[-3:-1]


@pytest.mark.parametrize("fault", LENS_FAULTS)
def test_a_lens_fault_concerns_the_readings_of_one_request(fault: str) -> None:
    """Its tokens and states stay, and so does all of the others, their readings bit for bit."""
    wrong, message = LENS_FAULTS[fault]
    with pytest.warns(RuntimeWarning, match=rf"request {BAD} step \d+ layer \d: lens own"):
        trace = cp.run(loaded(), PROMPTS, **RUN, deterministic=True, lens=OwnLens(wrong, marked_states()))
    want = undisturbed("plain")
    assert list(trace.missing) == [f"Z of request {BAD}"] and not trace.meta["errors"]
    said = trace.missing[f"Z of request {BAD}"]
    assert message in said and "its tokens and states stay" in said
    if fault in ("NaN", "nothing possible"):  # the fault's own row is known
        assert "layer 1:" in said
    assert [trace.digest(i) for i in range(5)] == [want.digest(i) for i in range(5)]
    ours, theirs = trace.hypotheses(), want.hypotheses()
    theirs = theirs[theirs.request_id != BAD].reset_index(drop=True)
    assert set(ours.request_id) == set(OTHERS)
    key = ["request_id", "row", "layer"]
    ours, theirs = (t.sort_values(key, ignore_index=True).drop(columns="lens") for t in (ours, theirs))
    assert ours.equals(theirs[ours.columns])


@pytest.mark.parametrize("fault", ["raises", "NaN"])
def test_a_lens_that_always_fails_leaves_tokens_and_states(fault: str) -> None:
    wrong, _ = LENS_FAULTS[fault]
    lens = OwnLens(lambda logits, spoiled: wrong(logits, torch.ones_like(spoiled)), torch.zeros(1, loaded().d_model))
    with pytest.warns(RuntimeWarning, match=r"request \d step \d+ layer \d: lens own"):
        trace = cp.run(loaded(), PROMPTS, **RUN, deterministic=True, lens=lens)
    assert [trace.digest(i) for i in range(5)] == [undisturbed("plain").digest(i) for i in range(5)]
    assert set(trace.missing) == {"Z", *(f"Z of request {i}" for i in range(5))}
    with pytest.raises(ValueError, match=r"this trace has no Z: request \d step \d+ layer \d: lens own"):
        trace.hypotheses()


def test_a_stored_trace_says_what_was_not_read_and_a_reading_afterwards_fails_by_name(tmp_path) -> None:
    lens = OwnLens(LENS_FAULTS["raises"][0], marked_states())
    with pytest.warns(RuntimeWarning, match="lens own"):
        trace = cp.run(loaded(), PROMPTS, **RUN, deterministic=True, lens=lens)
    trace.save(tmp_path / "run")
    assert cp.load_trace(tmp_path / "run").missing == trace.missing
    with pytest.raises(cp.lenses.base.LensError, match=rf"request {BAD} step \d+ layer \d: lens own"):
        cp.analysis.read_states(trace, lens)
    assert len(cp.analysis.read_states(trace, cp.lenses.LogitLens()))


# -- tasks


@dataclass(frozen=True)
class OwnExample(Example):
    """A coin-flip example whose answers cannot be told."""

    answers_fail: Callable[..., Any] = tuple

    def prompt_text(self, tokenizer: Any = None) -> str:
        return "ab"

    def answer_token_ids(self, tokenizer: Any) -> Any:
        return self.answers_fail()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (fail(KeyError("x")), "failed, KeyError: 'x'"),
        (lambda: None, "must return a list of token ids, got None"),
        (lambda: ["a"], r"must return a list of token ids, got \['a'\]"),
        (lambda: [VOCAB], f"gave token {VOCAB}, outside the vocabulary of {VOCAB}"),
        (fail(ValueError("told apart later")), None),
    ],
)
def test_a_task_that_cannot_tell_its_answers_loses_that_measure_alone(answers, message, monkeypatch) -> None:
    model = loaded()
    monkeypatch.setattr(type(model), "encode", lambda self, text, **options: tuple(ord(c) % VOCAB for c in text))
    example = OwnExample(CoinFlip().example(0, 0).question, answers_fail=answers)
    prompts = [PROMPTS[0], example, PROMPTS[2]]
    want = cp.run(model, [PROMPTS[0], [ord(c) % VOCAB for c in "ab"], PROMPTS[2]], **RUN, path="plain")
    with pytest.warns(RuntimeWarning) if message else monkeypatch.context():
        trace = cp.run(model, prompts, **RUN, path="plain")
    assert [trace.committed(i) for i in range(3)] == [want.committed(i) for i in range(3)]
    assert list(trace.missing) == (["answers of request 1"] if message else [])
    if message:
        said = trace.missing["answers of request 1"]
        assert said.startswith("request 1: answer_token_ids of its task's OwnExample")
        assert re.search(message, said)
