"""The picture of thoughts: what it shows and says, against tables made by hand and against a run that thinks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from playwright.sync_api import Browser

import cacheprobe as cp
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.tasks import Variables
from cacheprobe.trace.tables.thoughts import says_state
from cacheprobe.views.diagrams.cards import chunk_parts
from cacheprobe.views.report.report import report_html
from cacheprobe.views.thoughts.columns import changes_of_mind, chosen, finding, story_of
from cacheprobe.views.thoughts.picture import MOST_PLACES, THOUGHT_COLUMNS, thought_lines
from tests.plots.test_views import HOSTILE
from tests.thinking.test_thinking import tiny
from tests.tiny import PROMPTS, SMALL, loaded

END = "<eos>"
WORDS = [END, "heads", "tails", "<pad>", "flips", "<script>"]
Tables = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]


def tables(
    said: Sequence[str], truth: str = "", answer: str = "heads", read: Sequence[str] = (), size: int = 2
) -> Tables:
    """Thoughts, rows, events and ledger of request 0: a chunk for every item of `said`, and one for the answer.

    truth: true states, one letter a chunk; "-" for none.  read: tokens of the prompt.
    """
    states = {"h": "heads", "t": "tails", "-": None}
    count = len(said) * size
    prompt = [*read, *["flips"] * (count - len(read))]
    generated = [*answer.split(), END]
    thoughts = [
        dict(
            thought=i, request_id=0, step=0, phase="prefill", role="prompt", status="committed", row=i, chunk=i,
            start=i * size, end=i * size + size - 1, token_ids=[WORDS.index(w) for w in [*words.split(), END]],
            tokens=[*words.split(), END], said=words, has_ended=True, logprobs_nats=[-0.5] * (len(words.split()) + 1),
            true_state=(state := states[truth[i]] if truth else None),
            agrees=None if not words or state is None else words.split()[-1] == state, state_norm=1.5,
        )
        for i, words in enumerate(said)
    ]  # fmt: skip
    rows = [
        dict(row=i, request_id=0, step=0 if i < count else 1, role="prompt" if i < count else "committed",
             status="committed", position=i, token_id=WORDS.index(word), token=word)
        for i, word in enumerate([*prompt, *generated[:-1]])
    ]  # fmt: skip
    events = [dict(request_id=0, step=i, committed_token_ids=[WORDS.index(word)]) for i, word in enumerate(generated)]
    written = ["prefill"] * count + ["verified"] * (len(generated) - 1)
    ledger = pd.DataFrame(dict(position=range(len(written)), provenance=written, step=0))
    table = pd.DataFrame(thoughts).astype({"true_state": "string", "agrees": "boolean"})
    return table, pd.DataFrame(rows), pd.DataFrame(events), ledger


def rolled_back(made: Tables, chunk: int, said: str, token: str = "tails") -> Tables:
    """The same with a thought of the chunk whose last token was rolled back."""
    thoughts, rows, events, ledger = made
    kept, words = thoughts[thoughts.chunk == chunk].iloc[[0]], [*said.split(), END]
    lost = kept.assign(
        thought=len(thoughts), step=1, phase="decode", role="rolled_back", status="rolled_back",
        tokens=[words], token_ids=[[WORDS.index(word) for word in words]], said=said, true_state=pd.NA, agrees=pd.NA,
    )  # fmt: skip
    row = dict(row=99, request_id=0, step=1, role="rolled_back", status="rolled_back", position=int(kept.end.iloc[0]),
               token_id=WORDS.index(token), token=token)  # fmt: skip
    return pd.concat([thoughts, lost]), pd.concat([rows, pd.DataFrame([row])]), events, ledger


def drawn(made: Tables, **settings: bool) -> str:
    """The picture without title and legend."""
    return cp.plots.thoughts_picture(*made, request_id=0, thinking=settings).body


MIND = "The thought changes its mind {} while the prompt is read: "
SAME = "The thought says {} and never changes its mind while the prompt is read; it ends on "


@pytest.mark.parametrize(
    ("said", "truth", "answer", "sentence"),
    [
        (["heads", "tails", "", "heads", "tails", "heads"], "htttth", "heads",
         MIND.format("4 times") + "heads → tails → heads → tails → heads; it ends on the answer, heads. "
         "1 of 5 thoughts disagrees with the true state"),
        (["heads", "tails"], "ht", "tails", MIND.format("once") + "heads → tails; it ends on the answer, tails"),
        (["heads", "tails", "heads"], "hth", "tails",
         MIND.format("twice") + "heads → tails → heads; it ends on heads, and the answer is tails, which is wrong: the "
         "true state is heads"),
        (["", "heads", "heads"], "-tt", "heads",
         SAME.format("heads") + "the answer, heads, which is wrong: the true state is tails. 2 of 2 thoughts disagree "
         "with the true state"),
        (["", ""], "", "heads", "Every thought is empty while the prompt is read; the answer is heads"),
        (["heads tails"], "", "tails", SAME.format("heads tails") + "the answer, tails"),
        (["tails"], "", "tails flips heads flips tails flips",
         SAME.format("tails") + "the answer, tails flips heads flips…"),
        (["heads", "tails"] * 5, "", "tails",
         MIND.format("9 times") + "heads → tails → heads → … → tails → heads → tails; it ends on the answer, tails"),
    ],
)  # fmt: skip
def test_the_finding_is_computed(said, truth, answer, sentence) -> None:
    made = tables(said, truth, answer)
    assert finding(story_of(*made[:3], 0)) == sentence
    assert f"<h3>{sentence}</h3>" in cp.plots.thoughts_picture(*made)


def test_rolled_back_thoughts_change_no_mind_and_are_hatched() -> None:
    plain = tables(["heads", "heads", "heads"])
    made = rolled_back(plain, 1, "tails")
    story = story_of(*made[:3], 0)
    assert [(c.chunk, c.is_rolled_back) for c in story.columns] == [(0, 0), (1, 1), (1, 0), (2, 0), (3, 0)]
    assert [token.text for token in story.columns[1].tokens] == ["flips", "tails"]
    assert [token.kind for token in story.columns[1].tokens] == ["prompt", "rolled_back"]
    assert finding(story) == finding(story_of(*plain[:3], 0))
    html, before = drawn(made), drawn(plain)
    # T, C, the frame and the rolled-back token are hatched; the words stand on the frame
    assert (html.count("url(#cp-undone)"), before.count("url(#cp-undone)")) == (4, 0)
    assert html.count('class="box red"') == 6 and "box red" not in before
    assert "Z₃ ✗" in html and "✗" not in before and "rolled back" in cp.plots.thoughts_picture(*made)
    # its state goes nowhere; that of the first chunk goes to it, and to what was committed in its place
    assert html.count('class="path"') == before.count('class="path"') + 1


def test_the_state_of_a_chunk_is_made_of_the_thought_before() -> None:
    story = story_of(*tables(["heads", "", "tails"])[:3], 0)
    assert [c.source.said if c.source else None for c in story.columns] == [None, "heads", "", "tails"]
    assert [c.thought.said if c.thought else None for c in story.columns] == ["heads", "", "tails", None]
    assert [[t.kind for t in c.tokens] for c in story.columns[2:]] == [["prompt"] * 2, ["answer", "pending"]]
    assert [t.position for c in story.columns for t in c.tokens] == list(range(8)) and story.answer == ("heads",)


def test_names_signs_and_values_are_drawn() -> None:
    html = drawn(tables(["heads", "", "tails"], "h-h"), l_in=1, l_out=3)
    assert re.findall(r">([ZS][₀-₉]+)<", html) == ["S₁", "Z₂", "S₂", "Z₃", "S₃", "Z₄", "S₄"]
    assert (html.count(">T<"), html.count(">C<"), html.count("&lt;EOS&gt;"), html.count(">zero<")) == (3, 3, 3, 1)
    assert html.count("blocks 1–2</text>") == 4 and "block 2</text>" in html and "block 1</text>" in html
    assert html.count("green-stroke") == html.count("red-stroke") == 1  # one agrees, one does not, one says nothing
    for value in (
        "&#x27;tails&#x27;: -0.5 nats", "state &#x27;heads&#x27;: agrees", "state &#x27;heads&#x27;: disagrees",
        "has ended", "norm of its state 1.5", "made of heads &lt;eos&gt;", "6 cache slots: prefill, positions 0 to 5",
    ):  # fmt: skip
        assert value in html
    assert 'class="box group changed"' in html and html.count("changed") == 1
    assert html.count("url(#cp-waiting)") == 1 and "6 prefill" in html and "1 verified" in html


def test_what_the_model_does_with_states_is_said() -> None:
    made = tables(["heads", "tails"])
    assert "S₁ is zero" in cp.plots.thoughts_picture(*made)
    learned = cp.plots.thoughts_picture(*made, thinking=dict(learned_first_state=True))
    assert "S₁ is learned" in learned and ">zero<" not in learned
    apart = drawn(made, feeds_back=False)
    assert "S₁<" not in apart and 'class="path' not in apart and ">T<" in apart
    assert "adds no state to the next chunk" in cp.plots.thoughts_picture(*made, thinking=dict(feeds_back=False))


def test_a_thought_that_was_cut_says_so_and_a_long_one_is_abridged() -> None:
    made = tables(["heads tails heads tails heads tails"])
    html = drawn(made)
    assert ">+3<" in html and html.count('class="token halo on-blue" text-anchor="middle">tails<') == 1
    made[0]["has_ended"] = False
    cut = drawn(made)
    assert ">cut…<" in cut and ">+4<" in cut and "has not ended: cut" in cut and "&lt;EOS&gt;" not in cut


@pytest.mark.parametrize("turns", [(), (5, 6), (3, 17, 30), tuple(range(1, 39, 2)), tuple(range(40))])
def test_long_prompts_are_cut_where_nothing_changes(turns: tuple[int, ...]) -> None:
    said, now = [], "heads"
    for i in range(40):
        now = {"heads": "tails", "tails": "heads"}[now] if i in turns else now
        said.append(now)
    story = story_of(*tables(said)[:3], 0)
    places = chosen(story, MOST_PLACES)
    shown = [place for place in places if isinstance(place, int)]
    hidden = [i for place in places if isinstance(place, range) for i in place]
    assert len(places) <= MOST_PLACES and sorted(shown + hidden) == list(range(41))
    assert {0, 39, 40} <= set(shown)  # the first, the end of the prompt, the answer
    changes = changes_of_mind(story.columns)
    if len(changes) <= 4:
        assert set(changes) <= set(shown)
    else:
        assert {*changes[1:2], *changes[-2:]} <= set(shown)
    assert f"{len(shown)} of 41 chunks are drawn" in cp.plots.thoughts_picture(*tables(said))


def test_filler_in_front_is_one_gap() -> None:
    made = tables([""] * 3 + ["heads", "tails"], read=["<pad>"] * 7)
    story = story_of(*made[:3], 0)
    assert story.num_filler == 3 and chosen(story, MOST_PLACES) == [range(3), 3, 4, 5]
    html = cp.plots.thoughts_picture(*made)
    assert ">3 of &lt;pa…<" in html and "The first 3 chunks hold only filler" in html
    assert story_of(*tables(["heads"] * 3, read=["heads", "tails"])[:3], 0).num_filler == 0
    one_by_one = tables(["heads", "tails", "heads"], read=["heads", "tails", "flips"], size=1)
    assert story_of(*one_by_one[:3], 0).num_filler == 0


def test_a_request_that_was_stopped_before_its_answer() -> None:
    for said, told in (
        (["heads", "tails"], "heads → tails; it ends on tails, and there is no answer"),
        ([""] * 3, "Every thought is empty while the prompt is read, and there is no answer"),
    ):
        thoughts, rows, events, ledger = tables(said)
        prompt = rows[rows.role == "prompt"]
        picture = cp.plots.thoughts_picture(thoughts, prompt, events[:0], ledger, request_id=0)
        html = picture.body
        assert told in picture.finding and "cp-waiting" not in html and ", answer" not in html


def test_long_chunks_are_abridged() -> None:
    assert ">+4<" in drawn(tables(["heads"], size=12)) and ">+" not in drawn(tables(["heads"], size=9))


def test_a_request_without_thoughts_is_named() -> None:
    thoughts, rows, events, ledger = tables(["heads"])
    with pytest.raises(ValueError, match=r"request 3 wrote no thoughts; requests \[0\] did"):
        cp.plots.thoughts_picture(thoughts, rows, events, ledger, 3)
    with pytest.raises(ValueError, match="no rows of request 0"):
        cp.plots.thoughts_picture(thoughts, rows.assign(request_id=1), events, ledger, 0)


# -- a run that thinks


ASKED = [[5, 9, 3, 7, 11, 4, 8, 2, 6], [3, 4]]


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    """Untrained, and thinking while it decodes; the drafter is often wrong."""
    lm = ThinkingLM(tiny(think_while_decoding=True))
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=9)
    drafter = cp.drafters.EarlyExit(layer=0)
    return cp.run(lm, ASKED, drafter=drafter, window=4, capacity=32, sampling=sampling, progress=False)


def test_the_thoughts_table_tells_words_and_norms(trace: cp.Trace, tmp_path: Path) -> None:
    thoughts = trace.thoughts()
    assert trace.thought_states is not None
    norms = trace.thought_states.double().flatten(1).norm(dim=1)
    assert torch.equal(torch.tensor(thoughts.state_norm.tolist(), dtype=torch.float64), norms) and norms.min() > 0
    for thought in thoughts.itertuples():
        assert thought.tokens == [f"<{i}>" for i in thought.token_ids]
        words = thought.tokens[:-1] if thought.has_ended else thought.tokens
        assert thought.said == " ".join(words)
    assert thoughts.agrees.isna().all() and not thoughts.has_ended.all()
    again = cp.load_trace(trace.save(tmp_path / "run"))
    assert again.meta["thinking"] == trace.meta["thinking"]
    assert trace.meta["thinking"] == dict(l_in=1, l_out=2, feeds_back=True, learned_first_state=False)
    spoken = again.hypotheses(include_rolled_back=True).query("site == 'thought'")
    assert spoken.token.tolist() == [f"<{i}>" for i in spoken.token_id] and len(spoken) == len(thoughts)
    html = cp.plots.thoughts_picture(again.thoughts(), again.row_table, again.events(), again.ledger(0), 0)
    assert html == cp.plots.thoughts_picture(thoughts, trace.row_table, trace.events(), trace.ledger(0), 0)


def test_a_real_run_is_drawn_whole(trace: cp.Trace) -> None:
    lost = trace.thoughts().query("status == 'rolled_back'")
    assert len(lost), "nothing was rolled back; choose another prompt"
    for request_id in range(len(ASKED)):
        story = story_of(trace.thoughts(), trace.row_table, trace.events(), request_id)
        read = [token for column in story.columns if not column.is_rolled_back for token in column.tokens]
        ids = [*trace.requests[request_id].prompt_token_ids, *trace.committed(request_id)]
        assert [token.text for token in read] == [f"<{i}>" for i in ids]
        assert [token.position for token in read] == list(range(len(ids)))
        assert [token.kind == "pending" for token in read] == [False] * (len(ids) - 1) + [True]
        own = trace.thoughts().query("request_id == @request_id and status != 'superseded'")
        assert len(thought_lines(story)) == len(own) and len(thought_lines(story)[0]) == len(THOUGHT_COLUMNS)
        for column in story.columns:  # every thought stands over the tokens that it was made from
            if column.thought is not None:
                assert (column.thought.start, column.thought.end) == (
                    column.tokens[0].position,
                    column.tokens[-1].position,
                )
                assert column.is_rolled_back == (column.thought.status == "rolled_back")


def test_every_thought_can_be_chosen_and_the_committed_one_is_shown_first(trace: cp.Trace) -> None:
    """A rolled-back thought ends at the position of the one that took its place."""
    thoughts = trace.thoughts()
    request_id = int(thoughts.query("status == 'rolled_back'").request_id.iloc[0])
    story = story_of(thoughts, trace.row_table, trace.events(), request_id)
    for place, column in enumerate(c for c in story.columns if c.thought is not None):
        position, step = column.tokens[-1].position, int(column.thought.step)
        for asked in (step, None) if not column.is_rolled_back else (step,):
            _, card = chunk_parts(story, position, trace.meta["thinking"], asked)
            buttons = re.findall(r'<button class="([^"]*)" data-position="(\d+)" data-step="(\d+)"', card)
            assert [i for i, (classes, _, _) in enumerate(buttons) if "chosen" in classes] == [place]
            assert buttons[place][1:] == (str(position), str(step))


def test_the_report_shows_thoughts_after_the_windows(trace: cp.Trace) -> None:
    html = report_html(trace, 0)
    assert html.index("Request 0 went through") < html.index("The prompt in chunks, from its tokens upwards")
    assert html.count('<figure id="request-0-thoughts">') == 1 and "The thoughts of request 0 in numbers" in html
    title = re.search(r'<figure id="request-0-thoughts"><h3>(.*?)</h3>', html)
    assert title is not None and f"One thing to see:</strong> {title[1]}" in html
    silent = replace(trace, thought_table=trace.thoughts().query("request_id != 0"))
    unthought = report_html(silent, 0)
    assert "Request 0 wrote no thoughts." in unthought
    assert "One thing to see:</strong> request 0, step" in unthought
    other = report_html(cp.run(loaded(), PROMPTS[:1], **SMALL), 0)
    assert "The prompt in chunks" not in other and 'class="box sand' not in other


def test_agreement_is_with_the_state_or_with_what_is_to_be_said_of_it() -> None:
    example = Variables().examples(1, seed=1)[0]
    state, thought = example.states[-1], example.question.thoughts[-1]
    assert state != thought, "choose a task that says a part of its state"
    for said in (state, thought, f"{example.question.thoughts[0]} {thought}"):
        assert says_state(said, state, example) is True
    assert says_state("heads", state, example) is False and says_state(f"1{thought}", state, example) is False
    assert says_state("", state, example) is None and says_state(thought, None, example) is None


# -- in a browser


@pytest.fixture(scope="module")
def attacked(trace: cp.Trace) -> cp.Trace:
    """The same run by a model whose every token is an attack."""
    thoughts, rows = trace.thoughts(), trace.row_table.copy()
    thoughts["tokens"] = thoughts.tokens.map(lambda tokens: [HOSTILE] * len(tokens))
    thoughts[["said", "text"]] = rows["token"] = HOSTILE
    return replace(trace, thought_table=thoughts, row_table=rows)


def test_fits_and_runs_nothing(browser: Browser, attacked: cp.Trace) -> None:
    page, t = browser.new_page(), attacked
    picture = cp.plots.thoughts_picture(t.thoughts(), t.row_table, t.events(), t.ledger(0), 0)
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.set_content(f'<!doctype html><meta name="viewport" content="width=device-width">{picture}')
        page.wait_for_selector(".thoughts svg")
        assert page.evaluate("window.hacked") is None and page.query_selector(".thoughts script") is None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        sizes = page.evaluate("[...document.querySelectorAll('.thoughts')].map(b => [b.scrollWidth, b.clientWidth])[0]")
        assert sizes[0] > 1.5 * sizes[1] if width == 390 else sizes[0] == sizes[1]
        fill = page.evaluate("getComputedStyle(document.querySelector('.thoughts .sand')).fill")
        assert fill == ("rgb(239, 224, 207)" if scheme == "light" else "rgb(70, 51, 31)")
    page.close()
