"""The sentences of the page say what is so: of medians, ended requests, searches, filters, settings and refusals."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.views.dashboard.app import make_app
from cacheprobe.views.dashboard.run_list import RunList
from tests.dictionaries.planted import random_dictionary
from tests.reported.page.runs import folder, pages, plain, tables_of
from tests.tiny import PROMPTS, SMALL, loaded


def readings(*rows: tuple[str, ...]) -> pd.DataFrame:
    """Lens readings of rows whose committed token is "x": their first choices, from layer 0 on."""
    lines = [
        dict(row=row, request_id=0, position=row + 4, layer=layer, token=token, token_id=ord(token), status="committed",
             committed_token="x", committed_token_id=ord("x"), agrees=token == "x", site="S", lens="logit", step=row,
             phase="decode", role="committed", read_token="x", logprob_nats=-1.0, entropy_nats=1.0, rank=0,
             committed_logprob_nats=-1.0)
        for row, tokens in enumerate(rows) for layer, token in enumerate(tokens)
    ]  # fmt: skip
    return pd.DataFrame(lines)


@pytest.mark.parametrize(
    ("rows", "median"),
    [
        (("xxxx", "axxx", "aaxx", "aaax"), "layer 1.5 on"),
        (("xxxx", "axxx", "aaaa", "aaax"), "layer 2 on"),  # 0, 1, 3 and never
        (("xxxx", "aaaa"), "at half of the positions or more, no layer"),
        (("xaxx", "xxax"), "layer 2.5 on"),
    ],
)
def test_the_grids_title_has_the_median(rows: tuple[str, ...], median: str) -> None:
    assert median in cp.plots.lens_grid(readings(*rows), 0).finding


def counts_of(said: str) -> tuple[int, int]:
    """Lines in the list of rejected drafts, and lines that it names as left out."""
    shown = re.search(r"(\d+) to (\d+) of (\d+)|(\d+) lines?\b", said)
    assert shown is not None
    left_out = re.search(r"Not in this list: (\d+) line", said)
    return int(shown[3] or shown[4]), int(left_out[1]) if left_out else 0


def test_no_line_vanishes_from_the_rejected_drafts() -> None:
    """A range of layers, and the lines that have no layer, are together all lines."""
    lines = tables_of("drafted").rejected()
    never = sum(line["flip"] is None for line in lines)
    assert 0 < never < len(lines)
    for low, high in (("0", "2"), ("1", "1"), ("2", ""), ("", "1")):
        fits = [line for line in lines if line["flip"] is not None and int(low or 0) <= line["flip"] <= int(high or 9)]
        found = counts_of(pages().words("rejected", "drafted", page=0, flips=f"{low}:{high}"))
        assert found == (len(fits), never)
    assert counts_of(pages().words("rejected", "drafted", page=0, flips="none")) == (never, 0)
    unknown = sum(line["margin"] is None for line in lines)
    small = sum(line["margin"] is not None and line["margin"] <= 0 for line in lines)
    assert counts_of(pages().words("rejected", "drafted", page=0, margin=":0")) == (small, unknown)


def test_the_list_says_what_its_layer_is() -> None:
    said = pages().words("rejected", "drafted", page=0)
    assert "flips at" not in said and "committed first from layer" in said
    assert "the lens’s first choice from the named layer up to the last one" in said


def test_the_comparison_has_no_signs_of_python(tmp_path: Path) -> None:
    vectors = torch.ones(loaded().d_model) * 0.01
    edit = cp.interventions.add(vectors, request_id=0, site="S", layer=1, positions=(5, 6), own_fingerprint=True)
    kept = (cp.CaptureConfig("SZ", layers=(0, 1, 2)), cp.CaptureConfig("SZ", layers=(1, 2), statuses=("committed",)))
    stops = [cp.SamplingParams(stop_token_ids=ids) for ids in ((), (90, 91))]
    for name, capture, sampling, edits in zip("ab", kept, stops, ((), (edit,)), strict=True):
        settings = {**SMALL, "max_new_tokens": 3, "capture": capture, "sampling": sampling, "interventions": edits}
        cp.run(loaded(), PROMPTS[:2], **settings).save(tmp_path / name)
    server = make_app(RunList.of([tmp_path / "a", tmp_path / "b"])).server.test_client()
    answer = json.loads(server.post("/ask", json={"compare": dict(run=0, against=1, request=0)}).get_data(as_text=True))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", answer["html"].split("What was drafted")[0] + answer["more"])
    assert {"0 to 2", "1, 2", "90, 91", "committed"} <= set(cells)
    assert not [cell for cell in map(plain, cells) if re.search(r"[\[\]']|\bNone\b|\bTrue\b|\bFalse\b|\(\d", cell)]


def test_drafts_stand_above_the_token_that_replaced_them_in_the_order_of_their_steps() -> None:
    for name in ("drafted", "broken"):
        for request, prompt in tables_of(name).prompts.items():
            html = pages().html("text", name, request=request, measure="verdict", place=0)
            above = [line for line in tables_of(name).rejected() if line["request"] == request]
            for ruby in re.findall(r"<ruby>(.*?)</ruby>", html):
                at = int(re.findall(r'<span[^>]* data-position="(\d+)"', ruby)[0]) + 1
                drafts = re.findall(r'<del [^>]*data-step="(\d+)" data-position="(\d+)"[^>]*>&lt;(\d+)&gt;', ruby)
                expected = [line for line in above if line["position"] == at]
                assert [(int(step), int(place) + 1, int(token)) for step, place, token in drafts] == [
                    (line["step"], at, line["drafted"]) for line in sorted(expected, key=lambda line: line["step"])
                ]
            assert prompt and html.count("<del data-intent") == len(above)


@cache
def with_features() -> tuple[cp.Trace, Any]:
    kept = cp.CaptureConfig("Z", dictionary=random_dictionary(), top_features=6)
    trace = cp.run(loaded(), PROMPTS[:2], **{**SMALL, "max_new_tokens": 4}, capture=kept)
    trace.save(folder() / "features", overwrite=True)
    return trace, make_app(RunList.of([folder() / "features"])).server.test_client()


def test_the_features_of_a_token_are_its_own_and_the_largest_first() -> None:
    trace, server = with_features()
    features = trace.features()
    for position in range(4, 8):
        asked = dict(run=0, request=0, position=position, row=None, site="S", lens="recorded")
        card = json.loads(server.post("/ask", json={"card": asked}).get_data(as_text=True))["html"]
        own = features[(features.request_id == 0) & (features.position == position) & (features.status == "committed")]
        own = own.sort_values("activation", ascending=False)
        found = re.findall(r'data-feature="(\d+)">\d+</button> ([\d.]+)', card)
        assert [int(feature) for feature, _ in found] == own.feature.tolist() and found
        assert [float(value) for _, value in found] == pytest.approx(own.activation.tolist(), abs=0.0051)


MALFORMED = {
    "nested lists": '{"cache":{"run":' + "[" * 7000 + "]" * 7000 + "}}",
    "no JSON": "{",
    "bytes": b"\xff\xfe\x00",
    "a list": "[]",
    "a question that is a list": '{"cache":[1]}',
    "a number of 5,000 digits": '{"cache":{"run":' + "9" * 5000 + "}}",
    "an unknown view": '{"cash":{}}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_refused_with_a_sentence(name: str) -> None:
    answer = pages().server.post("/ask", data=MALFORMED[name], content_type="application/json")
    said = answer.get_data(as_text=True)
    assert answer.status_code == 400 and "<" not in said.split("{")[0]
    assert said.startswith(("questions are one JSON object", "there is no view 'cash'"))


def test_what_is_posted_elsewhere_is_refused_with_a_sentence() -> None:
    answer = pages().server.post("/_dash-update-component", data="{", content_type="application/json")
    assert (answer.status_code, answer.get_data(as_text=True)) == (
        400,
        "questions are posted to /ask, notes to /note\n",
    )


@pytest.mark.parametrize(
    ("view", "question", "said"),
    [
        ("cache", {}, "the question has no request"),
        ("cache", {"request": 0, "step": 10**30}, "step is a whole number of at most 9 digits"),
        ("timeline", {"requests": [10**8, 10**8 + 2], "steps": [0, 2], "width": 1}, "there is no request at"),
        ("range", {"request": 0, "position": float("nan"), "until": 2}, "position is a whole number"),
        ("flip", {"request": 0, "step": 5}, "the question has no do"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_by_name(view: str, question: dict[str, Any], said: str) -> None:
    assert said in pages().answer(view, "drafted", **question)["error"]
