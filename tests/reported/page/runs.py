"""Runs of every kind for the tests of the page, the report and the terminal, and what their tables say.

Every number here is computed with plain pandas from the tables of a trace.
"""

import html
import json
import re
import warnings
from collections.abc import Sequence
from functools import cache
from math import isclose
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch

import cacheprobe as cp
from cacheprobe.views.dashboard.app import make_app
from cacheprobe.views.dashboard.run_list import RunList
from tests.dash_page import save_thinking
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

NAMES = ("drafted", "undrafted", "half", "thinking", "broken", "imported")
_FOLDER = TemporaryDirectory()
LENGTHS = {"drafted": 20, "undrafted": 20, "half": 18, "broken": 20}
DISCARDED = ("rolled_back", "abandoned")


class Two:
    """Drafts the tokens 1 and 2; its third request fails after four tokens."""

    name = "two"

    def check(self, model: Any) -> None: ...

    def release(self, state: Any) -> None: ...

    def extend(self, context: Any, states: Sequence[Any]) -> Any:
        return [None if s.request_id == 2 and s.num_generated > 3 else [1, 2] for s in states]

    def __repr__(self) -> str:
        return "Two()"


@cache
def folder() -> Path:
    """drafted: sampled, by an early exit.  undrafted.  half: half of the requests deterministic, in bfloat16.
    thinking: a Thinking States model.  broken: two requests are preempted, and one of them fails.  imported."""
    folder = Path(_FOLDER.name)
    sampled = cp.SamplingParams(temperature=1.0, seed=3)
    settings: dict[str, dict[str, Any]] = {
        "drafted": dict(drafter=cp.drafters.EarlyExit(layer=1), sampling=sampled),
        "undrafted": {},
        "half": dict(deterministic=0.5),
        "broken": dict(deterministic=[0, 1, 2], drafter=Two(), max_kv_tokens=70),
    }
    for name, own in settings.items():
        model = loaded(dtype=torch.bfloat16 if name == "half" else torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one request is meant to fail
            own = {**SMALL, "max_new_tokens": LENGTHS[name], "capture": "SZ", **own}
            cp.run(model, PROMPTS, **own).save(folder / name)
    save_thinking(folder / "thinking")
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    settings = dict(output_hidden_states=True, output_logits=True, return_dict_in_generate=True)
    said = hf_model("llama").generate(ids, max_new_tokens=6, do_sample=False, **settings)
    cp.import_generate(said, attention_mask=torch.ones_like(ids), model=loaded()).save(folder / "imported")
    return folder


class Tables:
    """What the API says of one saved run."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.name
        self.trace = cp.load_trace(directory)
        self.events = self.trace.events()
        self.prompts = {r: len(request.prompt_token_ids) for r, request in enumerate(self.trace.requests)}
        self.has_readings = self.trace.hypothesis_table is not None
        if self.has_readings:
            table = self.trace.hypotheses(include_rolled_back=True)
            self.readings = table[table.site != "thought"].sort_values(["row", "layer"])
            self.layers = sorted(self.readings.layer.unique())

    def of(self, request: int) -> pd.DataFrame:
        """The events of one request, in order."""
        return self.events[self.events.request_id == request].sort_values("step")

    def drafts(self, events: pd.DataFrame | None = None) -> tuple[int, int, int, int]:
        """Draft tokens with a verdict: all, accepted, rejected (one a draft at most), and rolled back."""
        judged = (self.events if events is None else events).dropna(subset="num_accepted")
        drafted, accepted = judged.draft_token_ids.map(len), judged.num_accepted.astype(int)
        return int(drafted.sum()), int(accepted.sum()), int((drafted > accepted).sum()), int((drafted - accepted).sum())

    @cache  # noqa: B019
    def committed_readings(self, request: int) -> pd.DataFrame:
        """By position of the row that predicts a token: depth, whether the last layer has the committed token, its
        log-probability, and the entropy."""
        own = self.readings[(self.readings.request_id == request) & (self.readings.status == "committed")]
        lines = {}
        for position, row in own.groupby("position"):
            last = row.iloc[-1]
            lines[position] = dict(depth=depth(row), agrees=last.token_id == last.committed_token_id,
                                   logprob=last.committed_logprob_nats, entropy=last.entropy_nats)  # fmt: skip
        return pd.DataFrame(lines).T

    def depth_medians(self) -> dict[str, float]:
        """Median prediction depth of rows by verdict of the draft and kind of pass."""
        depths: dict[str, list[int]] = {}
        for _, row in self.readings.groupby("row"):
            first = row.iloc[0]
            if first.status in DISCARDED or (pd.notna(first.verdict) and first.verdict == "unverified"):
                continue
            kind = "draft" if first.phase == "decode" else "verify"
            name = "nothing drafted" if pd.isna(first.verdict) else f"draft {first.verdict}, {kind} pass"
            depths.setdefault(name, []).append(depth(row))
        return {name: median(of) for name, of in depths.items()}

    def rejected(self) -> list[dict[str, Any]]:
        """A line for each rejected draft, from events and readings."""
        lines, events = [], self.events
        for event in events.dropna(subset="num_accepted").sort_values(["request_id", "step"]).itertuples():
            accepted = int(event.num_accepted)
            if accepted == len(event.draft_token_ids):
                continue
            position = int(event.draft_start) + accepted
            line: dict[str, Any] = dict(request=event.request_id, step=event.step, position=position)
            line |= dict(lost=len(event.draft_token_ids) - accepted, drafted=int(event.draft_token_ids[accepted]))
            line |= dict(flip=None, margin=None, at_least=None)
            whole = [*self.trace.requests[event.request_id].prompt_token_ids, *self.trace.committed(event.request_id)]
            line["committed"] = whole[position] if position < len(whole) else None
            row = self.readings[(self.readings.request_id == event.request_id) & (self.readings.step == event.step)
                                & (self.readings.position == position - 1)]  # fmt: skip
            if len(row):
                last = row.iloc[-1]
                line["flip"] = depth(row) if last.token_id == line["committed"] else None
                top = dict(zip(last.top_token_ids.tolist(), last.top_logprob_nats.tolist(), strict=True))
                line["margin"] = last.committed_logprob_nats - top[line["drafted"]] if line["drafted"] in top else None
                line["at_least"] = last.committed_logprob_nats - top.get(line["drafted"], min(top.values()))
            lines.append(line)
        return lines

    def ended(self, request: int, step: int) -> bool:
        return step >= self.of(request).step.max()  # every run here is finished


def depth(row: pd.DataFrame) -> int:
    """First layer from which the first choice stays that of the last layer. row: readings of one row, by layer."""
    layers, tokens = row.layer.tolist(), row.token_id.tolist()
    return next(layer for i, layer in enumerate(layers) if set(tokens[i:]) == {tokens[-1]})


class Pages:
    """The views of a dashboard, as text."""

    def __init__(self) -> None:
        self.server = make_app(RunList.of([folder() / name for name in NAMES])).server.test_client()

    def answer(self, view: str, run: str, **question: Any) -> dict[str, Any]:
        asked = {view: {"run": NAMES.index(run), **question}}
        return json.loads(self.server.post("/ask", json=asked).get_data(as_text=True))

    def html(self, view: str, run: str, **question: Any) -> str:
        answer = self.answer(view, run, **question)
        assert "error" not in answer, answer["error"]
        return answer["html"] + answer.get("more", "")

    def words(self, view: str, run: str, **question: Any) -> str:
        return plain(self.html(view, run, **question))


@cache
def pages() -> Pages:
    return Pages()


@cache
def tables_of(name: str) -> Tables:
    return Tables(folder() / name)


def plain(markup: str) -> str:
    """The words of markup, without its tips, parted by spaces where tags are. Tokens such as <28> are left out."""
    markup = re.sub(r"<title>.*?</title>|<style>.*?</style>|<script>.*?</script>", "", markup, flags=re.S)
    return re.sub(r"<\d+>", "", html.unescape(re.sub(r"<[^>]+>", " ", markup)).replace("\xa0", " "))


def tips(markup: str) -> list[str]:
    """The hover texts, without tokens such as <28>."""
    found = re.findall(r"<title>(.*?)</title>", markup, re.S) + re.findall(
        r"""(?:data-says|title)="([^"]*)\"""", markup
    )
    return [re.sub(r"<\d+>", "", html.unescape(one)) for one in found]


def same(found: list[float], expected: list[float]) -> bool:
    """Whether the numbers are equal; the page shows nats with two digits."""
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(isclose(a, b, rel_tol=0, abs_tol=0.00501) for a, b in pairs)


def numbers(text: str) -> list[float]:
    """All numbers of a text, in order."""
    return [float(one) for one in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text.replace(",", "").replace("−", "-"))]
