"""At which layer is a prediction made, and what is early: frequent tokens, right predictions, accepted drafts?

Sources: prediction depth, Baldock et al. 2021 (arXiv 2106.09647), with a lens at each layer for their k-NN probes; the
tuned lens, Belrose et al. 2023 (arXiv 2303.08112), whose perplexity falls with depth where the logit lens's does not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.analysis.layer_choices import prediction_depth_of
from cacheprobe.core.registry import register
from cacheprobe_analyses.findings.finding import Advance, Finding, Measured, Published

SHORT = "our lens is trained on thousands of tokens, the paper's on millions"
TINY = "tiny"
"""Stands for a random model of a few thousand weights, for tests."""


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
        Published("tuned_rises", "the same, tuned", "0", because=SHORT),
        Published("wrong_deeper", "depth of wrong less right predictions", above=0),
        Published("wrong_deeper_tuned", "the same, by the tuned lens", above=0),
        Published("rejected_deeper", "mean depth of rejected less accepted draft tokens, layers"),
        Published("rare_deeper", "minus the rank correlation of depth and the token's frequency"),
        Published("rare_deeper_tuned", "the same, by the tuned lens"),
        Published("logit_rises", "layers at which the logit lens's perplexity rises"),
        Published("depth_logit", "mean prediction depth by the logit lens, layers"),
        Published("depth_tuned", "the same, by the tuned lens"),
        Published("accepted", "share of draft tokens that were accepted"),
    )
    presets = {
        "tiny": Settings(TINY, 3, 2, 16, 12, 0, 6),
        "small": Settings(lens_steps=6, lens_texts=1, length=48, held_out=8, drafted_tokens=12),
        "full": Settings(),
    }

    def steps(self, settings: Settings) -> int:
        return settings.lens_steps + 2

    def measure(self, settings: Settings, seed: int, advance: Advance) -> Measured:
        from cacheprobe.training.tuned_lens.settings import TunedLensSettings
        from cacheprobe.training.tuned_lens.text import write_texts
        from cacheprobe.training.tuned_lens.train import TunedLensTrainer

        s, model = settings, _load(settings.model)
        of = TunedLensSettings(s.lens_steps, s.lens_texts, s.length, held_out=s.held_out, seed=seed)
        trainer = TunedLensTrainer(model, of)
        texts = write_texts(model, s.lens_steps * s.lens_texts, s.length, seed, "train")
        for _ in trainer.run(texts):
            advance(1)
        held_out = write_texts(model, s.held_out, s.length, seed, "held-out").numpy()
        counts = np.bincount(np.concatenate([texts.flatten().numpy(), held_out.ravel()]), minlength=model.d_vocab)
        values, points = _of_texts(model, held_out, {"logit": cp.lenses.LogitLens(), "tuned": trainer.lens()}, counts)
        advance(1)
        values |= _of_drafts(model, held_out, s)
        advance(1)
        return Measured(values, points)

    def figure(self, points: list[dict[str, Any]]) -> Any:
        return cp.plots.perplexity_figure(pd.DataFrame(points))


def _load(name: str) -> Any:
    if name != TINY:
        return cp.load_model(name, dtype="float32", progress=False)
    from cacheprobe_analyses.small_models import Architecture, random_model

    return cp.load_model(random_model(Architecture(97, 64, 3, 16, 2, 32), 0))


def _of_texts(
    model: Any, texts: np.ndarray, lenses: dict[str, Any], counts: np.ndarray
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Reads every token of the texts at every layer with each lens: perplexity of the text, and prediction depth."""
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
        depths = prediction_depth_of(read)
        final = read.sort_values("layer").drop_duplicates("row", keep="last").set_index("row")
        chosen, wanted = final.token_id[depths.row].to_numpy(int), depths.row.map(targets).to_numpy(int)
        depth, is_wrong = depths.prediction_depth.to_numpy(float), chosen != wanted
        end = "" if name == "logit" else "_tuned"
        values[f"depth_{name}"] = float(depth.mean())
        values[f"wrong_deeper{end}"] = _difference(depth, is_wrong)
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
    depths = prediction_depth_of(judged)
    is_rejected = depths.verdict.to_numpy() == "rejected"
    return {
        "accepted": 1 - float(is_rejected.mean()),
        "rejected_deeper": _difference(depths.prediction_depth.to_numpy(float), is_rejected),
    }


def _difference(values: np.ndarray, chosen: np.ndarray) -> float:
    """Returns the mean of the chosen values less that of the others; 0 where either are none."""
    return float(values[chosen].mean() - values[~chosen].mean()) if 0 < chosen.sum() < len(chosen) else 0.0
