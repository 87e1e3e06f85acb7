"""Shows a request as text, coloured by a measure; a range of its tokens in numbers; and its thoughts."""

from collections.abc import Sequence
from functools import cached_property
from typing import get_args

import pandas as pd

from cacheprobe.trace.tables.token_history import tokens_with_texts
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, one_of
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.view import View, opened
from cacheprobe.views.diagrams.cards import chunk_parts
from cacheprobe.views.report.request_text import (
    MOST_TOKENS,
    TextMeasure,
    text_piece,
    with_differences,
    with_feature,
)
from cacheprobe.views.text import counted, markup, plain, text_of
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import picture_of


class RequestText(View):
    """The prompt of a request and its generated tokens, the 2,000 of the page of the question's place."""

    @cached_property
    def measure(self) -> TextMeasure:
        """What colours the text."""
        return one_of(self.question["measure"], "measure", get_args(TextMeasure))

    @property
    def feature(self) -> int:
        """Number of the feature that colours the text."""
        return number(self.question["feature"], "feature")

    def draw(self) -> str:
        """Returns HTML of the text. Raises: ValueError for a measure of readings if the run has none."""
        tables, request, measure = self.tables, self.request, self.measure
        first = MOST_TOKENS * (max(number(self.question["place"], "place"), 0) // MOST_TOKENS)
        parts = tables.text_parts(request)
        if measure == "difference" and "replay" in tables.run.meta:
            parts = with_differences(parts, self.table())
        if measure == "feature":
            parts = with_feature(parts, self.table(), self.feature)
        places = range(first, first + MOST_TOKENS)
        return text_piece(parts, tables.run.token_texts, measure, places, says="data-says").html

    def table(self) -> pd.DataFrame:
        """Returns the generated tokens with their measures; or the features or differences of the request. Raises:
        CannotShow if no feature was chosen, or if the run is no replay."""
        if self.measure == "feature":
            lines = self.tables.features_of(self.request)
            if self.question.get("feature") is None:
                raise CannotShow("no feature is chosen; click one on the card of a token")
            return lines
        if self.measure == "difference":
            if "replay" not in self.tables.run.meta:
                raise CannotShow("this run is no replay, so there is no other program to compare with")
            return self.tables.differences_of(self.request)
        return tokens_with_texts(self.tables.text_parts(self.request).tokens, self.tables.run.token_texts)

    def code(self) -> list[str]:
        """Returns the code of the text."""
        run, request, measure = self.tables.run, self.request, self.measure
        table, more, chosen = f"cp.analysis.generated_tokens(trace, {request})", "", f"request_id == {request}"
        measured = repr(measure)
        if measure in ("feature", "difference"):
            self.table()
        if measure == "feature":
            table = f"trace.features(top={run.meta['capture']['top_features']}).query({chosen!r})"
            measured, more = repr(self.feature), ", values=table"
        elif measure == "difference":
            columns = ["request_id", "position", "token_id", "logprob_nats", "other_logprob_nats", "difference_nats"]
            table = f"cp.analysis.engine_differences(trace).query({chosen!r})[{columns}]"
            more = ", values=table"
        elif measure != "verdict" and not run.has_readings:
            raise CannotShow(f"this run has no readings to take the {measure} from; choose the verdict")
        readings = "trace.hypotheses()" if run.has_readings else "None"
        thoughts = ", trace.thoughts()" if run.thoughts is not None else ""
        return [
            *opened(self.tables),
            f"table = {table}",
            f"cp.plots.request_text(trace.rows(), trace.events(), {request}, {readings}{thoughts}, "
            f"measure={measured}, texts=trace.token_texts{more})",
        ]


def range_view(run_list: RunList, question: PageQuestion) -> str:
    """Returns HTML: what was drafted, accepted and rejected in a range of generated tokens, and means or medians of
    their measures. The question's positions are those of the rows that predict the first and the last token. Raises:
    CannotShow if there are none."""
    tables, request = run_list.tables_and_request(question)
    first, last = sorted((number(question["position"], "position"), number(question["until"], "until")))
    parts = tables.text_parts(request)
    tokens = parts.tokens[parts.tokens.position.between(first, last)]
    if tokens.empty:
        raise CannotShow(f"request {request} generated no token in this range; choose two of its tokens")
    count, accepted = len(tokens), int((tokens.outcome == "accepted").sum())
    rejected = sum(len(parts.rejected.get(place, ())) for place in tokens.place.tolist())
    text = plain("".join(text_of(tables.run.token_texts, int(t)) for t in tokens.token_id))
    says = f"Tokens {tokens.place.iloc[0] + 1} to {tokens.place.iloc[-1] + 1}, <b>{markup(text)}</b>: "
    says += f"{counted(count, 'token')}, {accepted} of them accepted drafts; "
    says += f"{counted(rejected, 'draft')} rejected"
    means = [
        f"mean {words} {value:.2f} nats"
        for name, words in (("logprob", "log-probability"), ("entropy", "entropy"))
        if not pd.isna(value := tokens[name].astype("Float64").mean())
    ]
    if not pd.isna(depth := tokens.depth.astype("Float64").median()):
        means.append(f"median prediction depth layer {depth:g}")
    end = f"; through the {markup(parts.lens)} lens: {', '.join(means)}." if means else "."
    return f"<p class='note'>{says}{end}</p>"


class Thoughts(View):
    """A Thinking States model's thoughts about each chunk of a request."""

    notebook = (
        "thoughts = trace.thoughts()",
        "table = thoughts[thoughts.request_id == {self.request}]",
        "cp.plots.thoughts_picture(thoughts, trace.rows(), trace.events(), trace.ledger({self.request}), "
        '{self.request}, thinking=trace.meta["thinking"], token_texts=trace.token_texts)',
    )

    def draw(self) -> str:
        """Returns HTML: the picture of the thoughts, and the chosen chunk in numbers; a note if the run or the request
        has no thoughts."""
        tables, request, thoughts = self.tables, self.request, self.tables.run.thoughts
        if thoughts is None:
            remedy = (
                "Only a Thinking States model thinks while it reads; <code>cacheprobe demo</code> leaves a run of one."
            )
            return f"<h2>{markup(tables.name)} wrote no thoughts</h2><p class='note'>{remedy}</p>"
        if request not in set(thoughts.request_id):
            return f"<h2>Request {request} wrote no thoughts</h2><p class='note'>It has no whole chunk.</p>"
        events, thinking = tables.events_of(request), tables.run.meta["thinking"]
        story = story_of(thoughts, tables.rows_of(request), events, request, tables.run.token_texts)
        picture = picture_of(story, tables.ledger(request, int(events.step.max())), thinking).html
        step = None if self.question.get("step") is None else self.step
        title, card = chunk_parts(story, self.position, thinking or {}, step)
        return f"{picture}<h3>{markup(title)}</h3>{card}"

    def table(self) -> pd.DataFrame:
        """Returns the thoughts of the request. Raises: CannotShow if it has none."""
        found = self.tables.run.thoughts
        if found is None or self.request not in set(found.request_id):
            raise CannotShow(f"request {self.request} of {self.tables.name} wrote no thoughts")
        return found[found.request_id == self.request]

    def code(self) -> Sequence[str]:
        """Returns the code of the picture. Raises: CannotShow if the request has no thoughts."""
        self.table()
        return super().code()
