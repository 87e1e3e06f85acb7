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
# # A published finding, found again: does a model hold the beliefs of Bayes' rule?
#
# Shai et al. 2024 (arXiv 2405.15943) trained a transformer on the tokens of a hidden process. A linear regression read
# the exact belief about the hidden state from the residual stream. Drawn, the beliefs are a fractal. This notebook
# trains such a model, reads and draws its beliefs beside controls, and then changes a belief to see whether the
# prediction follows.

# %%
import numpy as np
import pandas as pd
import plotly.express as px
import torch

import cacheprobe as cp
from cacheprobe_analyses.findings.belief_geometry import prefix_groups
from cacheprobe_analyses.findings.processes import mess3
from cacheprobe_analyses.findings.run import stored
from cacheprobe_analyses.small_models import Architecture, random_model

# %% [markdown]
# ## The process, and what Bayes' rule believes
#
# The process, Mess3, has three hidden states. At each step it mostly stays in its state; at times it moves.
# Then it emits a token, mostly the one of that state. The *belief* is the probability of each hidden state, given the
# tokens so far. Bayes' rule computes it from the process, and so the best possible prediction of the next token.

# %%
LENGTH = 10
process = mess3()
tokens = process.sample(1000, LENGTH, np.random.default_rng(1))
beliefs = process.beliefs(tokens)[:, 1:]  # [text, position, state], after the token there
best = process.next_token(beliefs)
pd.DataFrame(beliefs[0], columns=["state 0", "state 1", "state 2"]).assign(token=tokens[0]).round(3).head(6)

# %% [markdown]
# ## A model learns to predict the tokens
#
# A GPT-2 of four layers gets new texts at each step. It is never told about hidden states.

# %%
draw, steps = np.random.default_rng(0), 600
live = random_model(Architecture(process.vocabulary, 16, layers=4, width=64, heads=1, inner=256), seed=0).train()
optimizer = torch.optim.AdamW(live.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
for _ in range(steps):
    batch = torch.tensor(process.sample(64, LENGTH + 1, draw))
    logits = live(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model = cp.load_model(live.eval())
models = {"trained": model, "untrained": cp.probes.untrained(model)}
model

# %% [markdown]
# ## States
#
# Each model reads all texts in one run. S is the residual stream after a block. The first control is the same
# architecture with random weights.

# %%
settings = dict(max_new_tokens=1, capture="S", progress=False)
last, states, excess = model.n_layers - 1, {}, {}
for name, one in models.items():
    trace = cp.run(one, tokens.tolist(), **settings)
    rows = trace.rows().query("role == 'prompt'").sort_values(["request_id", "position"])
    states[name] = {layer: trace.vectors("S", layer, rows) for layer in range(one.n_layers)}
    predicted = one.read_out(states[name][last]).softmax(-1).numpy().reshape(best.shape)
    excess[name] = float((best * np.log(best / predicted)).sum(-1).mean())
print({name: f"loss {nats:.4f} nats a token above the best possible" for name, nats in excess.items()})

# %% [markdown]
# ## Can the belief be read?
#
# `cp.probes.regress` fits a linear regression from states to beliefs. Both depend only on the tokens so far, the
# *prefix*. So the regression is tested on prefixes that it was not fitted on. R2 is 1 if each belief is read exactly,
# and 0 if the reading is no better than the mean belief.
#
# The second control is *shuffled*: each prefix gets the belief of another one. The third is *tokens*: the regression is
# given the newest tokens, and no model.

# %%
flat, prefix = beliefs.reshape(-1, 3), prefix_groups(tokens)
first = np.unique(prefix, return_index=True)[1]  # the line where each prefix occurs first
shuffled = flat[draw.permutation(first)[prefix]]
read = {name: cp.probes.regress(states[name], flat, prefix) for name in models}
read["shuffled"] = cp.probes.regress(states["trained"], shuffled, prefix)
r2 = pd.DataFrame({name: one.table.set_index("name").r2 for name, one in read.items()}).rename_axis("layer")
r2.round(3)

# %%
one_hot = np.pad(np.eye(3)[tokens], [(0, 0), (LENGTH, 0), (0, 0)])  # zeros stand before the text
before = [one_hot[:, LENGTH - back : 2 * LENGTH - back].reshape(-1, 3) for back in range(LENGTH)]
newest = {number: torch.tensor(np.hstack(before[:number])) for number in (1, 2, 4, LENGTH)}
of_tokens = cp.probes.regress(newest, flat, prefix)
tokens_r2 = of_tokens.table.set_index("name").r2
print("R2 of the newest tokens alone, by their number:", tokens_r2.round(3).to_dict())

# %% [markdown]
# ## The fractal
#
# Each point is one of 1,200 prefixes, and each corner is certainty of one hidden state. The colour is the exact belief,
# in all panels. The place is the belief as it was read: from the last layer, or from the ten newest tokens.

# %%
places = {"exact": flat, "trained": read["trained"].predictions[last]}
places |= {"untrained": read["untrained"].predictions[last], "tokens": of_tokens.predictions[LENGTH]}
drawn = first[:1200]
points = {panel: pd.DataFrame(np.hstack([flat, at])[drawn], columns=list("abcxyz")) for panel, at in places.items()}
cp.plots.simplex_figure(pd.concat(points, names=["panel"]).reset_index("panel").round(3))

# %% [markdown]
# ## Does the model use the belief?
#
# That something can be read does not show that the model uses it. So we change the belief inside the model. A
# regression from beliefs to states tells how S differs between two beliefs. It is fitted on 900 texts. Each of the last
# 100 texts gets the belief of another text that ends in the same token: the difference in S is added at the last token.
# If the model uses the belief, it now predicts what Bayes' rule predicts for the other text. The table has the distance
# from that prediction, as a KL divergence in nats.
#
# The control is noise of the same norm. Both texts end in the same token, so that token cannot explain a difference.

# %%
other = [draw.choice(np.flatnonzero(tokens[:900, -1] == token)) for token in tokens[900:, -1]]
change, fitted = beliefs[other, -1] - beliefs[900:, -1], slice(900 * LENGTH)
wanted, lines = best[other, -1], []
for name, one in models.items():
    for layer in range(one.n_layers):
        by_belief, *_ = np.linalg.lstsq(flat[fitted], states[name][layer][fitted].numpy())
        shift = change @ by_belief
        noise = draw.normal(size=shift.shape)
        noise *= np.linalg.norm(shift, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
        where = dict(site="S", layer=layer, positions=[LENGTH - 1])
        for added, vectors in {"nothing": 0 * shift, "noise": noise, "other belief": shift}.items():
            edits = [cp.interventions.add(torch.tensor(v), request_id=i, **where) for i, v in enumerate(vectors)]
            changed = cp.run(one, tokens[900:].tolist(), interventions=edits, **settings)
            rows = changed.rows().query(f"position == {LENGTH - 1}").sort_values("request_id")
            predicted = one.read_out(changed.vectors("S", last, rows)).softmax(-1).numpy()
            nats = float((wanted * np.log(wanted / predicted)).sum(-1).mean())
            lines.append(dict(model=name, layer=layer, added=added, nats=nats))
changes = pd.DataFrame(lines)
nats = changes.pivot(index="layer", columns=["model", "added"], values="nats")
nats.round(3)

# %%
title = "Distance of the prediction from that of Bayes' rule for the other text"
labels = {"nats": "KL divergence (nats)", "added": "added to S", "layer": "layer that was changed"}
style = dict(facet_col="model", markers=True, labels=labels, template="plotly_white", log_y=True, height=400)
px.line(changes, x="layer", y="nats", color="added", line_dash="added", title=title, **style).update_xaxes(dtick=1)

# %% [markdown]
# ## Beside the full result
#
# `cacheprobe findings run belief-geometry --preset full --seeds 3` trains longer, with three seeds, and on a second
# process, RRXOR. Its page is `docs/findings.md`. Here are its stored figures for Mess3: the mean over
# seeds (`ours`) with its 95 % interval, beside those of this notebook.

# %%
full = pd.DataFrame(stored("belief-geometry").lines).set_index("key")
trained, untrained = r2.loc[last, ["trained", "untrained"]]
here = pd.Series({"mess3_last": trained, "mess3_last_untrained": untrained, "mess3_gain": trained - untrained})
full.loc[here.index, ["text", "published", "low", "ours", "high", "verdict"]].assign(here=here).round(3)

# %% [markdown]
# ## What was found
#
# - From the trained model's states the belief can be read almost exactly, after the first block already. Drawn, it has
#   the pattern of the exact beliefs, with some blur.
# - An R2 of .9 shows little here: random weights reach it, and so do the two newest tokens alone, because the belief
#   depends mostly on them. What training adds is the rest. The trained model leaves less than a quarter of the squared
#   error that a linear function of the tokens leaves. That function draws another pattern.
# - Shuffled beliefs cannot be read: their R2 is below 0.
# - The trained model uses the belief. With another text's belief in any one layer, it predicts almost what Bayes' rule
#   predicts for that text. Noise does not do this. The untrained model's prediction does not follow, although much of
#   the belief can be read from its states.
# - One model and one seed show how a finding is made. The full result has three seeds, and a process whose beliefs are
#   read less well on new prefixes.

# %%
assert excess["trained"] < 0.01 < excess["untrained"]
assert (r2.trained > 0.98).all() and (r2.untrained < 0.95).all() and (r2.shuffled < 0).all()
assert tokens_r2[2] > 0.9 and untrained > 0.9
assert 1 - trained < (1 - tokens_r2.max()) / 4
assert (nats["trained", "other belief"] < 0.2 * nats["trained", "nothing"]).all()
assert (nats["trained", "noise"] > 0.5 * nats["trained", "nothing"]).all()
assert (nats["untrained"] > 0.3).all(axis=None)
assert full.verdict["mess3_gain"] == "reproduced" and here.mess3_gain > 0
assert abs(trained - full.ours["mess3_last"]) < 0.01
