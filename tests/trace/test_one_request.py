"""A Trace as a sequence of its requests, its repr, and what completion shows of it and of the package's modules."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS[:4], **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


def test_a_trace_is_a_sequence_of_its_requests(trace: cp.Trace) -> None:
    assert len(trace) == 4 and [one.request_id for one in trace] == [0, 1, 2, 3]
    assert [one.request_id for one in trace[1:3]] == [1, 2] and trace[-1].request_id == 3
    assert trace[torch.tensor(2)].request_id == 2
    for wrong in (4, -5):
        with pytest.raises(IndexError, match=r"no request -?\d in this trace; it has requests 0 to 3"):
            trace[wrong]


def test_a_request_has_the_lines_of_its_own(trace: cp.Trace) -> None:
    """Each table against pandas' choice among all lines."""
    for one in trace:
        for name in ("rows", "events", "hypotheses", "rejected"):
            whole = getattr(trace, name)()
            own = whole[whole.request_id == one.request_id].reset_index(drop=True)
            pd.testing.assert_frame_equal(getattr(one, name)().reset_index(drop=True), own)
        every = trace.hypotheses(include_rolled_back=True)
        assert len(one.hypotheses(include_rolled_back=True)) == (every.request_id == one.request_id).sum()
        assert one.prompt_token_ids == tuple(PROMPTS[one.request_id]) == one.prompt
        assert one.tokens == trace.committed(one.request_id) and len(one.tokens) == 20
        assert (one.text, one.finish) == (trace.text(one.request_id), "length")


def test_the_repr_of_a_request_says_what_became_of_it(trace: cp.Trace) -> None:
    one = max(trace, key=lambda one: len(one.rejected()))
    assert f"{one.request_id}: {len(one.prompt)} token ids → '" in repr(one)
    assert f", 20 tokens, {len(one.rejected())} rejected drafts, ended by length)" in repr(one)


def test_thoughts_belong_to_their_request() -> None:
    examples = cp.tasks.CoinFlip(people=3).examples(2, seed=3)
    held = cp.run(cp.load_model("coinflip-thinking"), examples, max_new_tokens=4, progress=False)
    sites = {one.request_id: one.hypotheses().groupby("site").size().to_dict() for one in held}
    whole = held.hypotheses()
    assert "thought" in sites[0]
    assert sites == {i: whole[whole.request_id == i].groupby("site").size().to_dict() for i in (0, 1)}
    assert isinstance(held[0].prompt, str) and repr(held[0]).startswith(f"RequestTrace(0: '{held[0].prompt[:20]}")
    assert "; thinking path, torch" in repr(held)


def test_the_repr_names_the_code_that_computed_the_run() -> None:
    """Compiled loops are there on processors that `cacheprobe doctor` knows; torch computes elsewhere."""
    by_torch = cp.load_model(hf_model("llama"), products="torch")
    assert "; plain path, torch" in repr(cp.run(by_torch, PROMPTS[:1], **SMALL))
    assert "; bridge path, TransformerLens" in repr(cp.run(by_torch, PROMPTS[:1], **SMALL, path="bridge"))
    code = "compiled loops" if loaded().fingerprint()["products"] != "torch" else "torch"
    assert f"; plain path, {code}" in repr(cp.run(loaded(), PROMPTS[:1], **SMALL))
    live = hf_model("llama")
    kept = dict(return_dict_in_generate=True, output_hidden_states=True, output_logits=True)
    out = live.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, do_sample=False, **kept)
    assert re.search(r"; imported from \w+", repr(cp.import_generate(out, model=loaded())))


def test_completion_shows_what_the_pages_use(trace: cp.Trace) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md")]
    used = {name for text in texts for name in re.findall(r"\btrace\.([a-z_]+)\b(?!\.md)", text)} - {"py", "md"}
    shown = dir(trace)
    assert len(used) > 15 and used <= set(shown), used - set(shown)
    hidden = {"row_table", "event_table", "lookup", "judged_readings", "state_indices", "reading_later"}
    assert all(hasattr(trace, name) for name in hidden) and not hidden & set(shown)
    assert not any(name.startswith("_") for name in shown)


def test_completion_of_modules_shows_their_public_names() -> None:
    names = ("analysis", "tasks", "drafters", "interventions", "lenses", "patching", "plots", "probes")
    for module in (cp, *(getattr(cp, name) for name in names)):
        extra = {"__version__"} if module is cp else set()
        assert set(dir(module)) == {*module.__all__, *extra}, module.__name__
        assert all(hasattr(module, name) for name in dir(module))
