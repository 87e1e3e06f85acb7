"""Cards, lists, reports and the terminal have the numbers of the API's tables, on runs of every kind."""

import json
import re
from functools import cache
from html import unescape
from math import isclose, nan
from typing import Any

import numpy as np
import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.summary import summary
from cacheprobe.cli.look import show
from cacheprobe.views.report.figures import report_figures
from tests.reported.page.runs import (
    DISCARDED,
    NAMES,
    Tables,
    depth,
    folder,
    numbers,
    pages,
    plain,
    same,
    tables_of,
    tips,
)


@pytest.fixture(params=NAMES)
def tables(request: pytest.FixtureRequest) -> Tables:
    return tables_of(request.param)


@cache
def report_of(name: str, request: int) -> str:
    """The body of a report."""
    path = cp.plots.write_report(tables_of(name).trace, folder() / f"{name}-{request}.html", request)
    return path.read_text().split("<main>")[1]


def rejected_cells(line: dict[str, Any]) -> list[object]:
    """Layer and margin of a rejected draft as they are shown."""
    if line["at_least"] is None:
        return ["—", "—"]
    more = "> " if line["margin"] is None else ""
    return ["never" if line["flip"] is None else str(line["flip"]), f"{more}{line['at_least']:.2f}"]


def test_the_list_of_rejected_drafts(tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    """The same on the page, in the report and in the terminal."""
    expected = tables.rejected() if tables.drafts()[2] else []
    steps = ("request", "step", "position")
    found: list[list[str]] = []
    for page in range(len(expected) // 50 + 1):
        html = pages().html("rejected", tables.name, page=page)
        lines = re.findall(r"<tr data-intent='draft'.*?</tr>", html)
        found += [[unescape(cell) for cell in re.findall(r"class='number'[^>]*>([^<]*)<", line)] for line in lines]
    columns = [[*(str(line[name]) for name in steps), *rejected_cells(line)] for line in expected]
    assert [[*cells[:3], *cells[4:]] for cells in found] == columns
    title = numbers(plain(re.findall(r"<h2>(.*?)</h2>", html)[0].replace(tables.name, "")))
    assert title == ([len(expected), len({line["request"] for line in expected})] if expected else [])
    report = report_of(tables.name, 0).split("Every rejected draft</h2>")[1].split("<h2")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", report)][1:]
    assert [[*row[:3], *map(unescape, row[9:])] for row in rows] == columns
    assert [int(row[6]) for row in rows] == [line["lost"] for line in expected]
    show(folder() / tables.name, rejected=True)
    said = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[2:] if line.strip()]
    assert [[*row[:3], *row[-2:]] for row in said if expected] == columns


def test_the_card_of_a_token(tables: Tables) -> None:
    if not tables.has_readings:
        pytest.skip("nothing was read of this run")
    for row, own in list(tables.readings.groupby("row"))[::23]:
        first = own.iloc[0]
        if first.position < tables.prompts[first.request_id] - 1:
            continue
        place = dict(request=int(first.request_id), position=int(first.position))
        html = pages().html("card", tables.name, **place, row=int(row), site="S", lens="recorded")
        flips = int((own.token_id != own.token_id.shift()).sum()) - 1
        facts = {name: plain(text) for name, text in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)}
        assert numbers(facts["read"]) == [first.position, first.request_id]
        assert numbers(facts["predicts"]) == [first.position + 1] and numbers(facts["row"]) == [first.step]
        assert numbers(facts["prediction depth"]) == [depth(own), *([flips] if flips else [])]
        shown = [numbers(re.sub(r"\n[^\n]*: (?=[\d.]+%)", "\n", tip)) for tip in tips(html)]
        expected = [
            [first.request_id, first.step, first.position, first.position + 1, line.layer, 100 * np.exp(nats), nats]
            for line in own.iloc[::-1].itertuples()
            for nats in line.top_logprob_nats
        ]
        assert len(shown) == len(expected)
        for a, b in zip(shown, expected, strict=True):
            assert same([*a[:5], a[6]], [*b[:5], b[6]]) and isclose(a[5], b[5], abs_tol=0.051)


def test_the_sentence_about_a_token(tables: Tables) -> None:
    """Layers of the committed row: whose first choice the committed token is, up to the last one."""
    for request, prompt in tables.prompts.items():
        read = tables.committed_readings(request) if tables.has_readings else pd.DataFrame()
        for position in range(prompt - 1, prompt + len(tables.trace.committed(request)) - 1):
            asked = dict(lens="recorded", site="S", request=request, position=position, row=None)
            said = plain(pages().html("insight", tables.name, **asked))
            assert numbers(said)[:2] == [position, position + 1]
            if position not in read.index:
                continue
            line, last = read.loc[position], tables.layers[-1]
            if line.agrees and line.depth == last:
                assert f"layer {last}, the last read, alone had “" in said
            elif line.agrees:
                assert f"” is first from layer {line.depth} on" in said
            else:
                assert "the last read, had “" in said


def test_the_windows(tables: Tables) -> None:
    """A window after a preemption is of the prompt that was read again."""
    for request, prompt in tables.prompts.items():
        own = tables.of(request)
        kinds = (own.phase == "prefill").tolist()
        for i, event in enumerate(own.itertuples()):
            if pd.isna(event.num_accepted):
                continue
            start = next(k for k in range(i, -1, -1) if kinds[k])
            again = [k for k in range(start, -1, -1) if all(kinds[k : start + 1])]
            html = pages().html("window", tables.name, request=request, step=event.step)
            said = plain(re.findall(r"<h2>(.*?)</h2>", html)[0])
            if tables.trace.ledger(request, event.step).empty:
                assert numbers(said) == [request, event.step] and "was preempted" in said
                continue
            accepted, drafted = int(event.num_accepted), len(event.draft_token_ids)
            title = [
                request,
                event.step,
                *([drafted - accepted, drafted] if drafted > accepted else [drafted] if drafted > 1 else []),
            ]
            assert numbers(said) == title
            prefill, decode, verify, outcome = html.split('<section class="panel')[1:]
            steps = own.step.iloc[sorted(again)].tolist()
            assert numbers(plain(prefill.split("</h4>")[0].split("<small>")[1]).replace("–", " ")) == sorted(
                {steps[0], steps[-1]}
            )
            assert f"{prompt} prompt tokens" in plain(prefill) and f"was read in {len(steps)} pass" in plain(prefill)
            for panel, at in ((prefill, steps[-1]), (decode, event.step - 1), (outcome, event.step)):
                held = tables.trace.ledger(request, int(at))
                assert f"{len(held)} slot" in plain(panel)
                for name, count in held.provenance.value_counts().items():
                    assert f"{count} {name}" in plain(panel)
            assert numbers(plain(verify.split("</h4>")[0].split("<small>")[1])) == [event.step]
            if drafted:
                assert f"{accepted} of {drafted} draft tokens equal" in plain(verify)
            assert f"{event.batch_rows} × {event.batch_slots}" in plain(verify)


def test_the_thoughts() -> None:
    tables = tables_of("thinking")
    for request in tables.prompts:
        thoughts = tables.trace.thoughts()
        own = thoughts[(thoughts.request_id == request) & (thoughts.status == "committed")].sort_values("chunk")
        report = (
            report_of(tables.name, request)
            .split(f"The thoughts of request {request} in numbers</summary>")[1]
            .split("</table>")[0]
        )
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", report)][1:]
        assert [int(row[0]) for row in rows] == own.chunk.tolist()
        assert [float(row[3]) for row in rows] == [float(f"{sum(nats):.3g}") for nats in own.logprobs_nats]
        assert [float(row[6]) for row in rows] == [float(f"{norm:.3g}") for norm in own.state_norm]
        for thought in own.itertuples():
            html = pages().html("thoughts", "thinking", request=request, position=int(thought.end), step=None)
            said = plain(html)
            assert f"Chunk {thought.chunk} in numbers" in said and f"norm {thought.state_norm:.2f}" in said
            assert f"its first word has an entropy of {thought.entropy_nats:.3f} nats" in said
            places = [numbers(tip)[:4] for tip in tips(html) if f", chunk {thought.chunk}, positions" in tip]
            assert places == [[request, thought.chunk, thought.start, thought.end]]
            assert any(
                f"the thought of chunk {thought.chunk} (positions {thought.start} to {thought.end})" in tip
                for tip in tips(html)
            )


def test_the_comparison(tables: Tables) -> None:
    other = tables_of("undrafted" if tables.name != "undrafted" else "drafted")
    html = pages().html("compare", tables.name, against=NAMES.index(other.name), request=0, theme="light")
    counts = html.split("What was drafted</h3>")[1].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", counts)][1:]
    for i, one in enumerate((tables, other)):
        passes = one.events.drop_duplicates("step").phase.value_counts()
        drafted, accepted, rejected, lost = one.drafts()
        expected = [int(one.events.committed_token_ids.map(len).sum())]
        expected += [int(passes.get(phase, 0)) for phase in ("prefill", "decode", "verify")]
        expected += [drafted, accepted, rejected, lost]
        assert [numbers(row[i + 1])[0] for row in rows] == expected
        if drafted:
            assert numbers(rows[5][i + 1])[1] == round(100 * accepted / drafted)
    places = {}
    for request in range(min(len(tables.prompts), len(other.prompts))):
        pair = [one.trace.committed(request) for one in (tables, other)]
        if tables.trace.requests[request].prompt_token_ids == other.trace.requests[request].prompt_token_ids:
            parted = [i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b]
            end = [min(map(len, pair))] if len(pair[0]) != len(pair[1]) else []
            places[request] = [(parted + end)[0] + 1] if parted + end else []
    for request, text in re.findall(r'data-request="(\d+)">(.*?)</button>', html):
        if int(request) in places and "log-prob" not in text:
            assert numbers(plain(text)) == [int(request), *places[int(request)]]


def table_in(text: str, title: str) -> list[list[str]]:
    """The lines below a title in the terminal, cut into cells."""
    lines = f"\n\n{text}".split(f"\n\n{title}\n")[1].split("\n\n")[0].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines]


def shares(tables: Tables) -> dict[tuple[int, str], float]:
    """How often a reading's first choice is the committed token, by layer and verdict."""
    read = tables.readings[tables.readings.committed_token_id.notna() & ~tables.readings.status.isin(DISCARDED)]
    is_first = read.token_id == read.committed_token_id
    verdict = read.verdict.astype(object).where(read.verdict.notna(), "not drafted").str.replace("_", " ")
    return is_first.astype(float).groupby([read.layer, verdict]).mean().to_dict()


def test_the_terminal(tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    show(folder() / tables.name)
    said = capsys.readouterr().out
    drafted, accepted, rejected, lost = tables.drafts()
    judged = tables.events.dropna(subset="num_accepted")
    whole = int(((judged.draft_token_ids.map(len) == judged.num_accepted) & (judged.num_accepted > 0)).sum())
    own = [int(judged[name].notna().sum()) for name in ("recovered_token_id", "bonus_token_id")]
    if drafted:
        counts = [int(row[1]) for row in table_in(said, "verdicts")]
        assert counts == [len(judged), whole, rejected, drafted, accepted, lost, *own]
    requests = table_in(said, "requests")[1:]
    for request, row in enumerate(requests):
        assert row[0] == str(request)
        mine = tables.drafts(tables.of(request))
        expected = [mine[0], mine[1], mine[3]] if tables.of(request).num_accepted.notna().any() else []
        found = [float(one) for one in row[-5:-1] if one.isdigit()]
        assert found == [len(tables.trace.committed(request)), *expected]
    if tables.has_readings:
        head, *rows = table_in(said, "first choice = committed token, by layer")
        for row in rows:
            for verdict, cell in zip(head[1:], row[1:], strict=True):
                share = shares(tables).get((int(row[0]), verdict), nan)
                assert cell == ("-" if pd.isna(share) else f"{share:.2f}")
        assert [int(row[0]) for row in rows] == tables.layers
    kept = said.split("rows  ")[1].split("\n")[0]
    statuses = tables.trace.rows().status.value_counts()
    assert sorted(numbers(kept)) == sorted(statuses.tolist())


def test_the_terminal_about_one_request(tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    for request in tables.prompts:
        show(folder() / tables.name, request=request)
        said = capsys.readouterr().out
        assert f"{tables.prompts[request]} of the prompt, {len(tables.trace.committed(request))} committed" in said
        judged = tables.of(request).dropna(subset="num_accepted")
        for row, event in zip(table_in(said, "windows")[1:], judged.itertuples(), strict=True):
            expected = [event.step, event.draft_start - 1]
            assert numbers(" ".join(row[:2])) == expected
            assert f"{event.num_accepted} of {len(event.draft_token_ids)}" in row
        held = tables.trace.ledger(request).provenance.value_counts().to_dict()
        assert {row[0]: int(row[1]) for row in table_in(said, "cache at its end")} == held


def test_the_prediction_depths_of_terminal_and_report(tables: Tables) -> None:
    """One name has one number."""
    if not tables.has_readings:
        pytest.skip("nothing was read of this run")
    medians = tables.depth_medians()
    said = summary(tables.trace).split("kind of pass:\n")[1].splitlines()[2:]
    rows = [re.split(r"  +", line.strip()) for line in said]
    assert {row[0]: float(row[2]) for row in rows} == pytest.approx(medians, abs=0.051)
    title = re.findall(r"<h3>Median prediction depth, by layer: (.*?)</h3>", report_of(tables.name, 0))[0]
    names = {"draft accepted": "draft accepted, verify pass", "draft rejected": "draft rejected, verify pass",
             "nothing drafted": "nothing drafted"}  # fmt: skip
    found = {names[words]: float(layer) for words, layer in re.findall(r"([a-z]+ [a-z]+) ([\d.]+)", title)}
    assert found == {name: medians[name] for name in names.values() if name in medians}


def drawn(tables: Tables, name: str) -> list[dict[str, Any]]:
    """The traces of one plotly figure of `write_figures`, as plotly draws them."""
    return json.loads(report_figures(tables.trace)[name].to_json(engine="json"))["data"]


def test_the_report(tables: Tables) -> None:
    drafted, accepted, rejected, lost = tables.drafts()
    passes = tables.events.drop_duplicates("step").phase.value_counts()
    counts = [drafted, accepted, lost, *([rejected, lost - rejected] if lost > rejected else [])] if drafted else []
    for request in list(tables.prompts)[:2]:
        report = report_of(tables.name, request)
        lead = re.findall(r"<p class='lead'>(.*?)</p>", report)[0]
        note = tables.trace.meta["weights_note"]
        lead = plain(re.sub(r"<code>.*?</code>", "", lead).replace(note or "\0", "")).replace(
            tables.trace.fingerprint["dtype"], ""
        )
        steps = [int(passes.get(phase, 0)) for phase in ("prefill", "decode", "verify")]
        short = numbers(tables.trace.draft_line)
        assert numbers(lead) == [len(tables.prompts), sum(steps), *steps, *counts, *short]
        judged = tables.of(request).dropna(subset="num_accepted")
        if len(judged):
            mine = tables.drafts(tables.of(request))
            said = re.findall(r"<p class='note'>(Request \d+ went through .*?)</p>", report)[0]
            assert numbers(plain(said)) == [request, len(judged), mine[1], mine[0]]
    if tables.has_readings:
        verdicts = {
            "draft accepted": "accepted",
            "draft rejected: the committed token": "rejected",
            "nothing drafted": "not drafted",
        }
        for line in drawn(tables, "drafts"):
            name = line["name"].split(" (")[0]
            if name in verdicts:
                known = {layer: share for (layer, of), share in shares(tables).items() if of == verdicts[name]}
                assert dict(zip(line["x"], line["y"], strict=True)) == pytest.approx(known)
        known = {
            re.sub(r"<br>\(.*|(?<=,)<br>", lambda m: "" if "(" in m[0] else " ", box["name"]): box["x"]
            for box in drawn(tables, "prediction_depth")
        }
        assert {name: float(np.median(depths)) for name, depths in known.items()} == tables.depth_medians()
        checks = [[str(c["num_rows"]), f"{float(c['worst']):.3g}"] for c in tables.trace.meta["checks"]]
        table = report.split("Controls</h2>")[1].split("</table>")[0]
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)][1:]
        assert [[row[3].replace(",", ""), row[4]] for row in rows] == checks
