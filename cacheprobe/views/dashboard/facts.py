"""Returns what the page needs to know about a run or a request before the page asks for pictures."""

from collections.abc import Mapping

from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.draft_verdicts import draft_line
from cacheprobe.views.dashboard.questions import PageQuestion
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.report.insight import drafts_sentence
from cacheprobe.views.text import counted, plain, text_of, token_texts

MOST_LETTERS = 44
"""Number of letters of a prompt's end in the menu of requests."""


def run_facts(run_list: RunList, question: PageQuestion) -> JsonDict:
    """Returns a dict on a run, from which the page fills its controls. Keys: name, says (sentences on the run),
    requests (their labels), by_losses (their ids, those with most rolled-back tokens first), first and last (steps),
    opening (request and step to show first), layers, sites, lenses (options of the menu), why_not (the reason why
    states cannot be read, or ""), has_readings; of a run that was recorded to disk while the dashboard ran also
    version, of the tables that all this is of; absent, as `absent_tabs`."""
    tables = run_list.tables(question["run"])
    run = tables.run
    texts = token_texts(run.rows)
    return {
        "name": tables.name,
        "says": run_summary(tables),
        "requests": [_request_label(r, texts) for r in run.requests],
        "by_losses": tables.by_losses,
        "first": tables.steps.start,
        "last": max(tables.steps.stop - 1, tables.steps.start),
        "opening": tables.opening,
        "layers": list(run.layers) or run.meta["capture"]["layers"],
        "sites": [site for site in "STC" if site in run.sites or site == "S"],
        "lenses": run_list.reader.menu(tables),
        "why_not": run_list.reader.why_not(tables),
        "has_readings": run.has_readings,
        "is_empty": not len(tables.steps),
        "absent": absent_tabs(run_list, tables),
        **({"version": run.version} if run_list.follower(question["run"]) is not None else {}),
    }


def absent_tabs(run_list: RunList, tables: RunTables) -> dict[str, str]:
    """Returns a dict from the key of each tab that has nothing to show for a run to a sentence that says why."""
    absent = {}
    if not (tables.run.events.num_rolled_back.fillna(0) > 0).any():
        absent["rejected"] = f"no draft of {tables.name} was rejected: {why_none_rejected(tables)}"
    if tables.run.thoughts is None:
        absent["thoughts"] = f"{tables.name} wrote no thoughts: only a Thinking States model does"
    if sum(entry.tables is not None for entry in run_list.entries) < 2:
        absent["compare"] = "one run is open; name two or more to compare them: cacheprobe dash RUN OTHER"
    return absent


def why_none_rejected(tables: RunTables) -> str:
    """Returns why a run has no rejected draft, as plain text."""
    if "growing" in tables.run.meta:
        return "the run is not finished, and a rejected draft is listed as soon as it is recorded"
    count = int(tables.run.events.draft_token_ids.map(len).sum())
    if count:
        return f"the verifier accepted all {count:,} draft tokens that it judged"
    if drafter := tables.run.meta["drafter"]:
        return f"{drafter} drafted no token that was verified; --draft-length 15 lets it draft, whatever that costs"
    return "no draft token was verified; name a drafter (cacheprobe run --drafter) to record some"


def growth(run_list: RunList, question: PageQuestion) -> JsonDict:
    """Reads on in the run that the page shows. Returns a dict: now, what the page says of that run (`Follower.says`;
    None for a run that was finished when it was opened); labels, a list of [run number, label] for the menu of runs;
    goes_on, whether the page should ask again."""
    shown, lines = run_list.follower(question["run"]), []
    if shown is not None:
        shown.look()
    followed = [(i, entry) for i, entry in enumerate(run_list.entries) if entry.follower is not None]
    for number, entry in followed:
        assert entry.follower is not None
        entry.follower.peek()
        lines.append([number, entry.label])
    goes_on = any(entry.follower is not None and not entry.follower.is_finished for _, entry in followed)
    return {"now": None if shown is None else shown.says(), "labels": lines, "goes_on": goes_on}


def request_story(run_list: RunList, question: PageQuestion) -> JsonDict:
    """Returns a dict on one request for the page. Keys: request, steps (as from `RunTables.steps_in_words`), prompt and
    tokens (the counts of prompt tokens and of committed tokens). A question whose request is None is about the request
    to show first."""
    if question["request"] is None:
        question = {**question, "request": run_list.tables(question["run"]).opening["request"]}
    tables, request_id = run_list.tables_and_request(question)
    request = tables.run.request(request_id)
    return {
        "request": request_id,
        "steps": tables.steps_in_words(request_id),
        "prompt": len(request["prompt_token_ids"]),
        "tokens": len(request["committed_token_ids"]),
    }


def run_summary(tables: RunTables) -> str:
    """Returns one or two sentences as plain text on a run: model, numbers of requests and steps, and how many draft
    tokens were verified, accepted and rolled back."""
    run, events = tables.run, tables.run.events
    fingerprint = run.fingerprint
    steps = events.step.nunique()
    num_requests = f"{len(run.requests)} request{'s' * (len(run.requests) != 1)}"
    text = f"{fingerprint['model']} in {fingerprint['dtype']}, {num_requests} in {counted(steps, 'step')}. "
    deterministic = [request["request_id"] for request in run.requests if request["is_deterministic"]]
    # the length of the sentences must not change while the run grows
    line = "" if "growing" in run.meta else draft_line(run.meta, events, run.rows, deterministic)
    return f"{text}{drafts_sentence(run.meta['drafter'] or '', events)}{line and f' In short, {line}.'}"


def _request_label(request: JsonDict, texts: Mapping[int, str]) -> str:
    """Returns the name of a request in the menu. texts: of the run's token ids, for a prompt that was given as ids."""
    prompt = request["prompt"]
    if not isinstance(prompt, str):
        prompt = "".join(plain(text_of(texts, token)) for token in prompt)
    end = " ".join(prompt.split())
    end = end if len(end) <= MOST_LETTERS else "…" + end[-MOST_LETTERS:]
    kind = " · deterministic" if request["is_deterministic"] else ""
    return f"request {request['request_id']}{kind} · {end}"
