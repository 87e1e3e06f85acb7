"""Every number of the page is the one that the tables of the API give, on runs of every kind."""

import re
from collections.abc import Iterator
from math import isclose

import pandas as pd
import pytest

import cacheprobe as cp
from tests.reported.page.runs import DISCARDED, NAMES, Tables, numbers, pages, plain, same, tables_of, tips


@pytest.fixture(params=NAMES)
def tables(request: pytest.FixtureRequest) -> Tables:
    return tables_of(request.param)


def outcomes(tables: Tables, request: int) -> list[tuple[int, int, bool]]:
    """(step, step that drafted it, whether it was an accepted draft) of each generated token."""
    tokens, born = [], []
    for event in tables.of(request).itertuples():
        if event.phase == "prefill":
            born = []
        if len(event.proposed_token_ids):
            born += [event.step] * len(event.proposed_token_ids)
            continue
        accepted = 0 if pd.isna(event.num_accepted) else int(event.num_accepted)
        drafted = born[len(born) - len(event.draft_token_ids) :]
        for i in range(len(event.committed_token_ids)):
            is_accepted = i < accepted
            tokens.append((event.step, drafted[i] if is_accepted else event.step, is_accepted))
        born = [] if pd.notna(event.num_accepted) else born
    return tokens


def rejected_places(tables: Tables, request: int) -> list[tuple[int, int]]:
    """(step, position) of each rejected draft of a request."""
    own = tables.of(request).dropna(subset="num_accepted")
    own = own[own.draft_token_ids.map(len) > own.num_accepted]
    return [(e.step, int(e.draft_start + e.num_accepted)) for e in own.itertuples()]


def test_the_line_about_the_run(tables: Tables) -> None:
    facts = pages().answer("facts", tables.name)
    said = facts["says"].replace(str(tables.trace.meta["drafter"]), "").replace(tables.trace.fingerprint["dtype"], "")
    drafted, accepted, rejected, lost = tables.drafts()
    counts = [drafted, accepted, lost, *([rejected, lost - rejected] if lost > rejected else [])] if drafted else []
    short = numbers(tables.trace.draft_line)
    assert numbers(said) == [len(tables.trace.requests), tables.events.step.nunique(), *counts, *short]
    by_request = {r: tables.drafts(tables.of(r))[3] for r in tables.prompts}
    assert facts["by_losses"] == sorted(by_request, key=lambda r: (-by_request[r], r))
    assert (facts["first"], facts["last"]) == (tables.events.step.min(), tables.events.step.max())


def test_the_slider(tables: Tables) -> None:
    for request in tables.prompts:
        story = pages().answer("story", tables.name, request=request)
        own = tables.of(request)
        committed = own.committed_token_ids.map(len).cumsum()
        assert (story["prompt"], story["tokens"]) == (tables.prompts[request], committed.iloc[-1])
        for (step, words, _, count), event, total in zip(story["steps"], own.itertuples(), committed, strict=True):
            assert (step, count) == (event.step, total)
            assert numbers(words) == verdict(event)


def verdict(event: object) -> list[float]:
    """The numbers in words such as "1 of 3 accepted, 2 rolled back"."""
    if pd.isna(event.num_accepted) or not len(event.draft_token_ids):
        return []
    accepted, drafted = int(event.num_accepted), len(event.draft_token_ids)
    return [accepted, drafted, *([drafted - accepted] if drafted > accepted else [])]


def test_the_timeline_and_the_strip(tables: Tables) -> None:
    last, count = int(tables.events.step.max()), len(tables.prompts)
    end = min(last + 1, 80)
    html = pages().html("timeline", tables.name, requests=[0, count], steps=[0, end], width=2000)
    expected = set()
    for event in tables.events[tables.events.step < end].itertuples():
        places = (
            []
            if pd.isna(event.draft_start)
            else [event.draft_start, event.draft_start + len(event.target_token_ids) - 1]
        )
        expected.add((event.request_id, event.step, *verdict(event), *places))
    assert {tuple(numbers(tip)) for tip in tips(html)} == expected
    drafted, accepted, _, lost = tables.drafts()
    title, note = re.findall(r"<h2>(.*?)</h2>|<p class='note'>(.*?)</p>", html)
    most = [tables.drafts(tables.of(r))[3] for r in tables.prompts]
    worst = [r for r, n in enumerate(most) if n == max(most)]
    who = [worst[0], max(most)] if len(worst) == 1 else [len(worst), max(most)]
    share = [round(100 * accepted / drafted), drafted, *who] if lost else [drafted] if drafted else []
    assert numbers(title[0]) == share
    assert numbers(note[1]) == [count, *([0, end - 1, last] if end <= last else [])]
    for part in re.findall(
        r'fill-(red|green)" x="(\d+)" y="[\d.]+" width="1" height="([\d.]+)"', pages().html("overview", tables.name)
    ):
        all_drafts, kept, _, gone = tables.drafts(tables.events[tables.events.step == int(part[1])])
        assert isclose(float(part[2]), 10 * (kept if part[0] == "green" else gone) / all_drafts, abs_tol=0.006)


def some_steps(tables: Tables, request: int) -> Iterator[int]:
    """The first, a middle, the last one of the request, one after it, and the one after a preemption."""
    steps = tables.of(request).step.tolist()
    yield from {steps[0], steps[len(steps) // 2], steps[-1], int(tables.events.step.max())}


def test_the_cache(tables: Tables) -> None:
    config, size = tables.trace.meta["config"], tables.trace.meta.get("cache_row_bytes")
    for request in tables.prompts:
        for step in some_steps(tables, request):
            held = tables.trace.ledger(request, step)
            html = pages().html("cache", tables.name, request=request, step=step)
            title = plain(re.findall(r"<h2>(.*?)</h2>", html)[0])
            if held.empty:
                assert numbers(title) in ([request, step], [request]) and "no cache slots" in title
                continue
            has_ended, counts = tables.ended(request, step), held.provenance.value_counts().to_dict()
            assert ("has ended and freed its" in title) == has_ended and ("holds" in title) != has_ended
            start = [request, len(held)] if has_ended else [request, len(held), step]
            assert numbers(title)[: len(start)] == start
            assert {name: int(n) for n, name in re.findall(r"(\d+) (\w+)(?:,|$)", title.split(": ")[1])} == counts
            strip = [t for t in tips(html) if t.startswith(f"request {request}, slot") and "pending" not in t]
            slots = [
                re.fullmatch(r"request \d+, slots? (\d+)(?: to (\d+))?: (\w+), written in step (\d+)", t) for t in strip
            ]
            drawn = {(p, m[3], int(m[4])) for m in slots if m for p in range(int(m[1]), int(m[2] or m[1]) + 1)}
            assert drawn == set(zip(held.position, held.provenance, held.step, strict=True))
            in_use = [tables.trace.ledger(r, step) for r in tables.prompts if not tables.ended(r, step)]
            in_use = [len(one) for one in in_use if len(one)]
            memory = numbers(re.findall(r"(?:This request has|\d+ of \d+ slots)[^<]*", plain(html))[0])
            own = [len(held)] if has_ended else [len(held), config["capacity"]]
            assert memory[: len(own) + 2] == [*own, sum(in_use), len(in_use)]
            if size is not None:
                shown, unit = re.findall(r"in use ([\d.]+) (\w+) of keys", plain(html).replace(",", ""))[0]
                scale = {"bytes": 1, "KiB": 2**10, "MiB": 2**20}[unit]
                assert isclose(float(shown), size * sum(in_use) / scale, abs_tol=0.06)


def test_the_grid_of_tokens(tables: Tables) -> None:
    """A token's margin is that of the pass which chose it, in the order of the passes."""
    count, last = len(tables.prompts), int(tables.events.step.max())
    margin = tables.events.set_index(["request_id", "step"]).margin_nats
    html = pages().html("decode", tables.name, request=0, requests=[0, count], places=[0, 40], place=0, step=last)
    expected = {}
    for request in tables.prompts:
        for place, (step, born, _) in enumerate(outcomes(tables, request)):
            nats = margin[request, born]
            expected[request, place + 1] = [born, *([step] if step != born else []), *([] if pd.isna(nats) else [nats])]
    shown = [numbers(tip) for tip in tips(html)]
    assert {(int(tip[0]), int(tip[1])) for tip in shown} == set(expected)
    assert all(same(tip[2:], expected[int(tip[0]), int(tip[1])]) for tip in shown)
    first = len(tables.trace.committed(0))
    assert numbers(plain(re.findall(r"<h2>(.*?)</h2>", html)[0]))[:3] == [last, 0, first]


def test_the_grid_of_tokens_while_drafts_are_open(tables: Tables) -> None:
    count, steps = len(tables.prompts), sorted(tables.events.step.unique())
    for step in steps[:: len(steps) // 5 or 1]:
        place = dict(request=0, requests=[0, count], places=[0, 40], place=0, step=int(step))
        shown = [numbers(tip) for tip in tips(pages().html("decode", tables.name, **place))]
        standing = cp.analysis.tokens_at(tables.trace, int(step)).set_index(["request_id", "place"])
        assert len(shown) == len(standing)
        for request, place, born, *rest in shown:
            token = standing.loc[request, int(place) - 1]
            nats = [] if pd.isna(token.margin_nats) else [token.margin_nats]
            decided = [] if token.state == "draft" or token.decided_step == token.born else [token.decided_step]
            assert born == token.born and same(rest, [*decided, *nats])


def test_the_text(tables: Tables) -> None:
    for request, prompt in tables.prompts.items():
        html = pages().html("text", tables.name, request=request, measure="verdict", place=0)
        tokens, gone = outcomes(tables, request), rejected_places(tables, request)
        accepted = sum(is_accepted for *_, is_accepted in tokens)
        counts = [accepted, len(gone)] if accepted or gone else []
        assert numbers(plain(re.findall(r"<h2>(.*?)</h2>", html)[0])) == [request, len(tokens), *counts]
        told = tips(html)
        struck = [
            numbers(tip.replace(tip.split("draft ")[1].split("; ")[0], "")) for tip in told if "rejected in" in tip
        ]
        assert sorted(struck) == sorted([request, step, place] for step, place in gone)
        read = tables.committed_readings(request) if tables.has_readings else pd.DataFrame()
        for place, (tip, (step, *_)) in enumerate(zip([t for t in told if "generated" in t], tokens, strict=True)):
            line = read.loc[prompt + place - 1] if prompt + place - 1 in read.index else None
            measures = [] if line is None else [line.depth, line.logprob, line.entropy]
            assert same(numbers(re.sub(r"\(.*?\)", "", tip)), [request, place + 1, prompt + place, step, *measures])


def test_a_range_of_the_text(tables: Tables) -> None:
    for request, prompt in tables.prompts.items():
        tokens = outcomes(tables, request)
        first, last = len(tokens) // 3, min(len(tokens) // 3 + 5, len(tokens) - 1)
        said = pages().html("range", tables.name, request=request, position=prompt + last - 1, until=prompt + first - 1)
        said = plain(re.sub(r"<b>.*?</b>", "", said))
        gone = [place for _, place in rejected_places(tables, request) if first <= place - prompt <= last]
        expected = [first + 1, last + 1, last - first + 1, sum(a for *_, a in tokens[first : last + 1]), len(gone)]
        if tables.has_readings:
            read = tables.committed_readings(request)
            read = read[read.index.isin(range(prompt + first - 1, prompt + last))].astype(float)
            expected += [read.logprob.mean(), read.entropy.mean(), read.depth.median()] if len(read) else []
        assert same(numbers(said), expected), (said, expected)


def test_the_lens_grid(tables: Tables) -> None:
    if not tables.has_readings:
        pytest.skip("nothing was read of this run")
    for request, prompt in tables.prompts.items():
        lens = dict(site="S", lens="recorded", colour="logprob", rows="all", width=4000)
        html = pages().html("grid", tables.name, request=request, position=prompt, **lens)
        read = tables.committed_readings(request)
        firsts = read.depth.where(read.agrees.astype(bool), float("inf")).astype(float).median()
        end = prompt + len(tables.trace.committed(request)) - 2
        title, note = (plain(one) for one in re.findall(r"<h2>(.*?)</h2><p class='note'>(.*?)</p>", html)[0])
        assert numbers(title) == ([request, firsts] if firsts != float("inf") else [request])
        assert ("half of the positions or more" in title) == (firsts == float("inf"))
        own = tables.readings[(tables.readings.request_id == request) & (tables.readings.position >= prompt - 1)]
        first, last = map(int, numbers(note)[:2])
        assert first == prompt - 1 and numbers(note)[2] == end
        own = own[own.position.between(first, last)].set_index(["row", "layer"])
        count = 0
        for column in html.split('<g class="column"')[1:]:
            row = int(re.findall(r'data-row="(\d+)"', column)[0])
            for tip in (tip for tip in tips(column) if tip.startswith("layer")):
                layer, *nats = numbers(tip)
                line, count = own.loc[row, layer], count + 1
                is_ranked = pd.notna(line["rank"]) and line.status not in DISCARDED
                known = [line["rank"], line.committed_logprob_nats] if is_ranked else []
                assert same(nats, [line.logprob_nats, *known, line.entropy_nats])
        assert count == len(own)
