"""At which layer is a prediction made, and what is early: frequent tokens, right predictions, accepted drafts?

Sources: prediction depth, Baldock et al. 2021 (arXiv 2106.09647), with a lens at each layer for their k-NN probes; the
tuned lens, Belrose et al. 2023 (arXiv 2303.08112), whose perplexity falls with depth where the logit lens's does not.

A prediction counts as wrong if the model's first choice is not the text's next token. Where the model is unsure, that
happens more often whatever the text says, and unsure predictions may be deeper. So a control draws the next tokens from
the model's own distribution: what it gives for depth is due to confidence alone. Only tokens of the prompts count,
since the rest of each text was drawn from the model in this very way.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.analysis.measures import prediction_depth
from cacheprobe.core.registry import register
from cacheprobe_analyses.findings.finding import Advance, Finding, Measured, Published

TINY = "tiny"
"""Stands for a random model of a few thousand weights, for tests."""
DRAWS = 100
"""Times that the control's next tokens are drawn."""


@dataclass(frozen=True)
class Settings:
    """A seed draws other texts and trains another lens; the model is the same."""

    model: str = "smollm2-135m"
    lens_steps: int = 24
    lens_texts: int = 2
    length: int = 64
    held_out: int = 16
    exit_layer: int = 20
    drafted_tokens: int = 16


@register("findings", "depth")
class Depth(Finding):
    """Prediction depth and perplexity by layer, with logit lens and tuned lens."""

    question = "Are easy predictions made in early layers, and which lens shows it?"
    paper = "Baldock et al. 2021, arXiv 2106.09647; Belrose et al. 2023, arXiv 2303.08112"
    published = (
        Published("tuned_better", "layers where tuned is better, share less half", above=0),
        Published("tuned_smoother", "rises of perplexity, logit less tuned", above=0),
        Published("wrong_excess", "depth of wrong less right predictions, less that of drawn next tokens", above=0),
        Published("wrong_excess_tuned", "the same, by the tuned lens", above=0),
        Published("wrong_deeper", "depth of wrong less right predictions, layers"),
        Published("wrong_drawn", "control: the same, next tokens drawn from the model"),
        Published("wrong_deeper_tuned", "depth of wrong less right predictions, tuned lens, layers"),
        Published("wrong_drawn_tuned", "control: the same, next tokens drawn from the model"),
        Published("wrong", "share of wrong predictions"),
        Published("rejected_deeper", "mean depth of rejected less accepted draft tokens, layers"),
        Published("rare_deeper", "minus the rank correlation of depth and the token's frequency"),
        Published("rare_deeper_tuned", "the same, by the tuned lens"),
        Published("logit_rises", "layers at which the logit lens's perplexity rises"),
        Published("tuned_rises", "the same, tuned lens"),
        Published("depth_logit", "mean prediction depth by the logit lens, layers"),
        Published("depth_tuned", "the same, by the tuned lens"),
        Published("accepted", "share of draft tokens that were accepted"),
    )
    presets = {
        "tiny": Settings(TINY, 3, 2, 16, 12, 0, 6),
        "small": Settings(lens_steps=3, lens_texts=1, length=32, held_out=4, drafted_tokens=6),
        "full": Settings(),
    }

    def steps(self, settings: Settings) -> int:
        return settings.lens_steps + 2

    def measure(self, settings: Settings, seed: int, advance: Advance) -> Measured:
        from cacheprobe.training.settings import TunedLensSettings
        from cacheprobe.training.tuned_lens import TunedLensTrainer, task_prompts, write_texts

        s, model = settings, _load(settings.model)
        of = TunedLensSettings(s.lens_steps, s.lens_texts, s.length, held_out=s.held_out, seed=seed)
        trainer = TunedLensTrainer(model, of)
        texts = write_texts(model, s.lens_steps * s.lens_texts, s.length, seed, "train")
        for _ in trainer.run(texts):
            advance(1)
        held_out = write_texts(model, s.held_out, s.length, seed, "held-out").numpy()
        counts = np.bincount(np.concatenate([texts.flatten().numpy(), held_out.ravel()]), minlength=model.d_vocab)
        lenses = {"logit": cp.lenses.LogitLens(), "tuned": trainer.lens()}
        given = [min(len(one), s.length // 2) for one in task_prompts(model, s.held_out, seed, "held-out")]
        values, points = _of_texts(model, held_out, given, lenses, counts, seed)
        advance(1)
        values |= _of_drafts(model, held_out, s)
        advance(1)
        return Measured(values, points)

    def figure(self, points: list[dict[str, Any]]) -> Any:
        return cp.plots.perplexity_figure(pd.DataFrame(points))


@cache
def _load(name: str) -> Any:
    """Returns the model, one for all seeds: it is not changed, and its check before drafts is not repeated."""
    if name != TINY:
        return cp.load_model(name, dtype="float32", progress=False)
    from cacheprobe_analyses.small_models import Architecture, random_model

    return cp.load_model(random_model(Architecture(97, 64, 3, 16, 2, 32), 0))


def _of_texts(
    model: Any, texts: np.ndarray, given: list[int], lenses: dict[str, Any], counts: np.ndarray, seed: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Reads every token of the texts at every layer with each lens: perplexity of the text, and prediction depth.

    given: of how many tokens each text's prompt is.
    """
    trace = cp.run(
        model, [row.tolist() for row in texts], max_new_tokens=1, capture="S", prefill_chunk=texts.shape[1],
        progress=False,
    )  # fmt: skip
    table = trace.row_table[(trace.row_table.role == "prompt") & (trace.row_table.position < texts.shape[1] - 1)]
    targets = {
        int(line.row): int(texts[line.request_id, line.position + 1]) for line in table.itertuples()
    }  # the text's own next token
    values, points, rises = {}, [], {}
    for name, lens in lenses.items():
        read = cp.analysis.read_states(trace, lens, rows=table, targets=targets)
        nats = -read.groupby("layer").committed_logprob_nats.mean().sort_index()
        points += [dict(lens=name, layer=int(k), perplexity=round(float(np.exp(v)), 2)) for k, v in nats.items()]
        rises[name] = nats
        values[f"{name}_rises"] = float((np.diff(nats) > 0).sum())
        depths = prediction_depth(read)
        final = read.sort_values("layer").drop_duplicates("row", keep="last").set_index("row")
        chosen, wanted = final.token_id[depths.row].to_numpy(int), depths.row.map(targets).to_numpy(int)
        depth, is_wrong = depths.prediction_depth.to_numpy(float), chosen != wanted
        end = "" if name == "logit" else "_tuned"
        values[f"depth_{name}"] = float(depth.mean())
        own = np.array([at < given[text] - 1 for text, at in zip(depths.request_id, depths.position, strict=True)])
        drawn = _drawn(model, trace, depths.row[own].tolist(), seed)
        values["wrong"] = float(is_wrong[own].mean())
        values[f"wrong_deeper{end}"] = _difference(depth[own], is_wrong[own])
        values[f"wrong_drawn{end}"] = _mean_difference(depth[own], drawn != chosen[own][:, None])
        values[f"wrong_excess{end}"] = values[f"wrong_deeper{end}"] - values[f"wrong_drawn{end}"]
        values[f"rare_deeper{end}"] = -float(pd.Series(depth).rank().corr(pd.Series(counts[chosen]).rank()))
    inner = (rises["tuned"] < rises["logit"])[:-1]  # at the last layer they are the same
    values["tuned_better"] = float(inner.mean()) - 0.5
    values["tuned_smoother"] = values["logit_rises"] - values["tuned_rises"]
    return values, points


def _of_drafts(model: Any, texts: np.ndarray, s: Settings) -> dict[str, float]:
    """Continues the first half of each text with drafts of an early layer, one token each; compares the prediction
    depth at the tokens whose draft was rejected with that at accepted ones."""
    prompts = [row[: len(row) // 2].tolist() for row in texts]
    trace = cp.run(
        model, prompts, drafter=cp.drafters.EarlyExit(s.exit_layer), window=2, draft_length=1, capture="S",
        sampling=cp.SamplingParams(max_new_tokens=s.drafted_tokens, stop_token_ids=()), progress=False,
    )  # fmt: skip
    read = cp.analysis.read_states(trace, cp.lenses.LogitLens())
    judged = read[(read.status == "committed") & read.verdict.isin(["accepted", "rejected"])]
    depths = prediction_depth(judged)
    is_rejected = depths.verdict.to_numpy() == "rejected"
    return {
        "accepted": 1 - float(is_rejected.mean()),
        "rejected_deeper": _difference(depths.prediction_depth.to_numpy(float), is_rejected),
    }


def _drawn(model: Any, trace: Any, rows: list[int], seed: int) -> np.ndarray:
    """Returns next tokens [n, DRAWS] for these rows, drawn from the model's own distribution at temperature 1, without
    end tokens: as the texts are written."""
    import torch

    scores = model.read_out(trace.vectors("S", model.n_layers - 1, rows)).float().clone()
    scores[:, list(model.stop_token_ids)] = -torch.inf
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(scores.softmax(-1), DRAWS, replacement=True, generator=generator).numpy()


def _mean_difference(values: np.ndarray, chosen: np.ndarray) -> float:
    """Returns the mean of `_difference` over the columns of chosen [n, k] where it is defined; NaN if nowhere."""
    defined = [one for one in (_difference(values, column) for column in chosen.T) if np.isfinite(one)]
    return float(np.mean(defined)) if defined else np.nan


def _difference(values: np.ndarray, chosen: np.ndarray) -> float:
    """Returns the mean of the chosen values less that of the others; NaN where either are none."""
    return float(values[chosen].mean() - values[~chosen].mean()) if 0 < chosen.sum() < len(chosen) else np.nan
