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
# # A probe by hand: do the states say that a parenthesis is open?
#
# A probe is a small classifier that reads one thing from a layer's states. This notebook fits one with scikit-learn, on
# the states of ordinary sentences, and compares it with four controls.

# %%
import numpy as np
import pandas as pd
import plotly.express as px
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cacheprobe as cp

# %% [markdown]
# ## Sentences in pairs
#
# Both sentences of a pair have the same words. In one of them a phrase stands in parentheses, in the other between
# dashes. The tokens of the phrase and their positions are the same, so they do not give the label away.

# %%
phrases = """tired and hungry, without a word, late as usual, now in a better mood, to our surprise, for the third time,
still half asleep, as always on a Sunday, in spite of the rain, with a smile, long after midnight, once again,
quite alone this time, happy at last, against all advice, in a new coat, with both hands full, a little out of breath,
sure of the answer, at the end of the day, cold and wet, by mistake, under a large umbrella, for no reason at all"""
phrases = [phrase.strip() for phrase in phrases.split(",")]
stories = [(who, phrase) for phrase in phrases for who in ("The teacher", "My sister")]
signs = [(" (", ") "), ("—", "—")]
sentences = [f"{who}{left}{phrase}{right}opened the door." for who, phrase in stories for left, right in signs]
print(len(sentences), *sentences[:2], sep="\n")

# %%
model = cp.load_model("smollm2-135m")
layers = [0, 2, 5, 10, 20, 29]
settings = dict(capture=cp.CaptureConfig(sites="STC", layers=layers), max_new_tokens=1, progress=False)
trace = cp.run(model, sentences, **settings)
trace

# %% [markdown]
# ## States and labels
#
# The words of the phrase are the tokens after the opening sign, up to the closing one. `trace.vectors` gives the states
# of any lines of `trace.rows()`.

# %%
rows = trace.rows().query("role == 'prompt'").sort_values(["request_id", "position"])
is_sign = rows.token.str.contains("[()—]")
words = rows[(is_sign.groupby(rows.request_id).cumsum() == 1) & ~is_sign]
is_open = (words.request_id % 2 == 0).to_numpy()
pair = (words.request_id // 2).to_numpy()
groups = pair // 2  # all sentences with the same phrase
assert words.token[is_open].tolist() == words.token[~is_open].tolist()
words.assign(is_open=is_open)[["request_id", "position", "token", "is_open"]].iloc[:8]

# %% [markdown]
# ## The probe, and four controls
#
# Accuracy is measured on phrases that the probe was not fitted on. The controls: the words alone (what enters block 0),
# the position alone, labels that are swapped in a random half of the pairs, and the same architecture with random
# weights.

# %%
probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200))
test = dict(groups=groups, cv=GroupKFold(4))
states = {layer: trace.vectors("S", layer, words).numpy() for layer in layers}
bare = cp.run(cp.probes.untrained(model), sentences, **settings)
random_states = {layer: bare.vectors("S", layer, words).numpy() for layer in layers}
embedding = (trace.vectors("S", 0, words) - trace.vectors("T", 0, words) - trace.vectors("C", 0, words)).numpy()
swapped = np.random.default_rng(0).permutation(np.arange(len(stories)) % 2 == 0)
shuffled = is_open ^ swapped[pair]

# %%
accuracy = pd.DataFrame(
    {
        "states": {i: (cross_val_predict(probe, states[i], is_open, **test) == is_open).mean() for i in layers},
        "random weights": {
            i: (cross_val_predict(probe, random_states[i], is_open, **test) == is_open).mean() for i in layers
        },
        "shuffled labels": {
            i: (cross_val_predict(probe, states[i], shuffled, **test) == shuffled).mean() for i in layers
        },
    }
)
accuracy["words alone"] = (cross_val_predict(probe, embedding, is_open, **test) == is_open).mean()
position = words[["position"]].to_numpy(dtype=float)
accuracy["position alone"] = (cross_val_predict(probe, position, is_open, **test) == is_open).mean()
accuracy.rename_axis("layer").round(3)

# %%
title = "Is a parenthesis open? Accuracy on unseen phrases"
labels = {"index": "layer", "value": "accuracy", "variable": ""}
px.line(accuracy, markers=True, range_y=[0, 1.02], title=title, labels=labels, template="plotly_white")

# %% [markdown]
# ## The same with cacheprobe's own probe
#
# `cp.probes.fit` takes any vectors and labels, and adds intervals. Its classifier is ridge regression.

# %%
ready = cp.probes.fit({("S", layer): trace.vectors("S", layer, words) for layer in (0, 10, 29)}, is_open, groups)
ready.table[["site", "layer", "groups", "accuracy", "low", "high", "majority"]].round(3)

# %% [markdown]
# ## What was found
#
# - The states say that a parenthesis is open, also at words that do not tell: in the upper layers the probe is right on
#   more than 90 % of the tokens of unseen phrases. The words and their position alone give 50 %, which is chance.
#   Swapped labels cannot be learned either.
# - The same architecture with random weights does at least as well. Attention mixes earlier tokens into every state, so
#   the open sign can be found there without any training. A probe shows that the information is there. It does not show
#   that training put it there, or that the model uses it. To test use, change the states (`cp.interventions`).

# %%
assert accuracy.states.loc[20] > 0.9 and accuracy["random weights"].max() > 0.95
assert (accuracy["words alone"] <= 0.55).all() and (accuracy["position alone"] < 0.6).all()
assert (accuracy["shuffled labels"] < 0.7).all()
assert ready.table.accuracy.max() > 0.9
