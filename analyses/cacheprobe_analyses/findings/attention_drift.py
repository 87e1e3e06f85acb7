"""Does a draft head's attention drift, and does the drift, or the verified model's state, explain rejected drafts?

Source: Eldenk et al. 2026 (arXiv 2605.09992): along a chain, EAGLE-3 and MTP heads move attention from the prompt's
first tokens to their own, and their un-normed state grows; feeding the state after the norm limits the growth.
Two questions of our own. At one step of the chain, does drift tell accepted from rejected drafts, beyond the head's
margin, and beyond the divergence from the verified model? And where a draft was rejected, does a linear future lens
(arXiv 2311.04897) read the committed token from the states that the head was given?
"""

import numpy as np
import pandas as pd

import cacheprobe as cp
from cacheprobe.core.registry import register
from cacheprobe.core.values import JsonDict
from cacheprobe.lenses.probes.ridge import group_folds
from cacheprobe.lenses.probes.rollback_prediction import auroc, resampled_auroc
from cacheprobe_analyses.findings.draft_heads import TINY, Settings, drafted_traces
from cacheprobe_analyses.findings.draft_records import JUDGED, SHARES, draft_rows
from cacheprobe_analyses.findings.finding import Advance, Finding, Measured, Published
from cacheprobe_analyses.findings.future_lens import LENSES, lens_ranks

STEPS = 4
"""Tokens of a draft."""
FOLDS, RESAMPLES, SHUFFLES, LEAST = 5, 500, 5, 15
"""LEAST: with fewer accepted or rejected drafts, no AUROC is defined."""
KNOWN, DRIFT = ["margin", "entropy", "logprob"], ["sink", "own", "norm"]


def _step_lines() -> tuple[Published, ...]:
    """Returns the lines on accepted and rejected drafts, by chain step."""
    said = {
        "known": "AUROC of accepted drafts, by margin, entropy and log-probability",
        "drift": "the same, by drift alone: sink, own rows, norm",
        "both": "the same, with drift added",
        "gain": "gain by drift, over drift that is shuffled among the drafts of this step",
        "gain_low": "the same, lower end of its 95 % interval over requests",
        "gain_high": "the same, upper end",
        "kl": "AUROC with the KL divergence from the model added",
        "gain_kl": "gain by drift added to these four",
        "gain_heads": "gain by sink and own rows of each attention head, added to the first three",
    }
    return tuple(
        Published(f"{key}_{k}", f"step {k}: {text}") for k in range(1, STEPS + 1) for key, text in said.items()
    )


def _lens_lines() -> tuple[Published, ...]:
    """Returns the lines on what the future lens reads."""
    by = {
        "given": "future lens on all that the head is given", "state": "on its highest state alone",
        "token": "control: on the newest token's embedding alone",
        "shuffled": "control: fitted to states of other places", "frequency": "control: the most frequent tokens",
        "head": "the head itself",
    }  # fmt: skip
    return (
        *(Published(f"{end}_rejected_{key}", f"rejected drafts: committed token {place}, {text}")
          for end, place in (("top1", "first"), ("top5", "among five")) for key, text in by.items()),
        *(Published(f"top1_{of}_{key}", f"{of} drafts: committed token first, {text}")
          for of in ("accepted", "judged") for key, text in by.items()),
        *(Published(f"top1_step_{k}", f"rejected at step {k}: committed token first, {by['given']}")
          for k in range(1, STEPS + 1)),
        Published("unknown", "rejected drafts: committed token outside the head's vocabulary"),
    )  # fmt: skip


@register("findings", "attention-drift")
class AttentionDrift(Finding):
    """Attention and norm along the chains of EAGLE-3 heads, and what tells rejected from accepted drafts."""

    question = "Does a draft head's attention drift, and does that explain rejected drafts?"
    paper = "Eldenk et al. 2026, arXiv 2605.09992; Pal et al. 2023, arXiv 2311.04897"
    published = (
        Published("sink_falls", f"weight on the sink, step 1 less step {STEPS}", above=0),
        Published("own_grows", "weight on the chain's own rows, last step less step 2", above=0),
        Published("norm_grows", "norm of the state, last step over step 1, less 1", above=0),
        Published("norm_limited", "the same from step 2 on, less that of a head with norm_output", above=0),
        Published("own_excess", "control: weight on own rows, last step, less that on as many newest rows at step 1"),
        Published("sink_falls_norm", "norm_output: weight on the sink, step 1 less the last"),
        Published("own_grows_norm", "norm_output: weight on own rows, last step less step 2"),
        Published("own_excess_norm", "norm_output: weight on own rows, less that on as many newest rows at step 1"),
        Published("norm_grows_on", "norm of the state, last step over step 2, less 1"),
        Published("norm_grows_on_norm", "norm_output: the same"),
        *(Published(f"{name}_{k}{end}", f"{'norm_output: ' if end else ''}{name}, step {k}")
          for end in ("", "_norm") for name in ("sink", "own", "norm") for k in (1, 2, STEPS)),
        Published("accepted", "share of judged draft tokens that were accepted"),
        Published("accepted_norm", "norm_output: the same"),
        *_step_lines(),
        *(Published(f"gain_norm_{k}", f"norm_output, step {k}: gain by drift") for k in range(1, STEPS + 1)),
        *_lens_lines(),
    )  # fmt: skip
    presets = {
        "tiny": Settings(TINY, "", 12, 6, 24, 12, 16, 2),
        "small": Settings(heads="", prompts=16, new_tokens=24, texts=24, text_tokens=24, steps=8),
        "full": Settings(),
    }

    def steps(self, settings: Settings) -> int:
        return 2

    def measure(self, settings: Settings, seed: int, advance: Advance) -> Measured:
        values, points = {}, []
        heads = (("as EAGLE-3", ""), ("norm_output", "_norm"))
        for (name, end), trace in zip(heads, drafted_traces(settings, seed, STEPS), strict=True):
            drafts = draft_rows(trace)
            found, lines = drift(drafts)
            told = told_apart(drafts, seed)
            values |= {f"{key}{end}": value for key, value in found.items()}
            if end:
                values |= {f"gain_norm_{k}": told[f"gain_{k}"] for k in range(1, STEPS + 1)}
            else:
                values |= told | _read_by_lenses(trace, drafts, seed)
            points += [dict(head=name, **line, known=told[f"known_{k}"], both=told[f"both_{k}"])
                       for k, line in enumerate(lines, start=1)]  # fmt: skip
            advance(1)
        values["norm_limited"] = values["norm_grows_on"] - values["norm_grows_on_norm"]
        rounded = pd.DataFrame(points).round(5).astype(object)
        return Measured(values, rounded.where(rounded.notna(), None).to_dict("records"))

    def figure(self, points: list[JsonDict]) -> object:
        return cp.plots.drift_figure(pd.DataFrame(points))


def drift(drafts: pd.DataFrame) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Returns the values on drift, and a line for each chain step with the mean shares and norm. All drafts of full
    length count, judged or not: so the steps are of the same chains."""
    whole = drafts.assign(start=drafts.position - drafts.chain_step)
    whole = whole[whole.groupby(["request_id", "start"]).chain_step.transform("max") == STEPS]
    means = whole.groupby("chain_step")[[*SHARES, "norm"]].mean()
    first, last = means.loc[1], means.loc[STEPS]
    newest = float(whole[f"newest_{STEPS - 1}"].mean())
    judged = drafts[drafts.verdict.isin(JUDGED)]
    values = {"sink_falls": first.sink - last.sink, "own_grows": last.own - means.own[2],
              "own_excess": last.own - newest,
              "norm_grows": last.norm / first.norm - 1, "norm_grows_on": last.norm / means.norm[2] - 1,
              "accepted": (judged.verdict == "accepted").mean()}  # fmt: skip
    values |= {f"{name}_{k}": means.loc[k, name] for name in ("sink", "own", "norm") for k in (1, 2, STEPS)}
    return {key: float(one) for key, one in values.items()}, means.reset_index().to_dict("records")


def told_apart(drafts: pd.DataFrame, seed: int) -> dict[str, float]:
    """Returns, for each chain step, the values of `_step_lines` on held-out prompts, and the numbers of drafts. NaN if
    a step has too few accepted or rejected drafts. Unverified drafts are left out.

    A gain is the AUROC with drift less the mean AUROC with drift of other drafts of the step, drawn SHUFFLES times: so
    what any further columns cost a regression is in both.
    """
    keys = [line.key for line in _step_lines()]
    values = dict.fromkeys(keys, float("nan"))
    draw = np.random.default_rng(seed)
    for k in range(1, STEPS + 1):
        own = drafts[(drafts.chain_step == k) & drafts.verdict.isin(JUDGED)]
        labels = (own.verdict == "accepted").to_numpy(int)
        values |= {f"accepted_{k}": float(labels.sum()), f"rejected_{k}": float(len(labels) - labels.sum())}
        if min(labels.sum(), len(labels) - labels.sum()) < LEAST or own.group.nunique() < FOLDS:
            continue
        folds = group_folds(own.group, FOLDS, seed)
        known, by_drift = with_products(own[KNOWN].to_numpy(float)), own[DRIFT].to_numpy(float)
        kl = np.hstack([known, np.log(own[["kl"]].to_numpy(float).clip(1e-6))])
        heads = own.filter(regex=r"^(sink|own)_\d+$").to_numpy(float)
        inputs = {"known": known, "drift": by_drift, "kl": kl}
        scores = {name: held_out_logits(one, labels, folds) for name, one in inputs.items()}
        values |= {f"{name}_{k}": auroc(one, labels) for name, one in scores.items()}
        groups, orders = own.group.to_numpy(), [draw.permutation(len(own)) for _ in range(SHUFFLES)]
        for name, base, more in (("gain", known, by_drift), ("gain_kl", kl, by_drift), ("gain_heads", known, heads)):
            pairs = [more, *(more[order] for order in orders)]
            both = [held_out_logits(np.hstack([base, one]), labels, folds) for one in pairs]
            at = [auroc(one, labels) for one in both]
            values[f"{name}_{k}"] = at[0] - float(np.mean(at[1:]))
            if name == "gain":
                drawn = resampled_auroc(both, labels, groups, RESAMPLES, seed)
                ends = np.nanpercentile(drawn[:, 0] - drawn[:, 1:].mean(1), [2.5, 97.5])
                values |= {f"gain_low_{k}": float(ends[0]), f"gain_high_{k}": float(ends[1]), f"both_{k}": at[0]}
    return values


def with_products(features: np.ndarray) -> np.ndarray:
    """Returns features [n, f] with the products of each two of them, and squares: drift then gains nothing by standing
    for a bend of the margin."""
    left, right = np.triu_indices(features.shape[1])
    centred = features - features.mean(0)
    return np.hstack([features, centred[:, left] * centred[:, right]])


def held_out_logits(features: np.ndarray, labels: np.ndarray, folds: np.ndarray, penalty: float = 1.0) -> np.ndarray:
    """Returns the logits [n] of logistic regressions, each fitted outside the fold that it scores, on features [n, f]
    scaled to mean 0 and deviation 1. penalty: of half the squared weights, by Newton's method.

    Twin: tests.analyses.test_attention_drift: scikit-learn's LogisticRegression, close(1e-4).
    """
    out = np.empty(len(labels))
    for fold in np.unique(folds):
        own = folds == fold
        mean, scale = features[~own].mean(0), features[~own].std(0)
        scaled = np.hstack([(features - mean) / np.where(scale > 1e-9, scale, 1), np.ones((len(features), 1))])
        train, wanted, weights = scaled[~own], labels[~own], np.zeros(scaled.shape[1])
        shrink = np.diag([penalty] * features.shape[1] + [1e-9])
        for _ in range(30):
            chance = 1 / (1 + np.exp(-np.clip(train @ weights, -30, 30)))
            hessian = (train * (chance * (1 - chance))[:, None]).T @ train + shrink
            weights = weights - np.linalg.solve(hessian, train.T @ (chance - wanted) + shrink @ weights)
        out[own] = scaled[own] @ weights
    return out


def _read_by_lenses(trace: cp.Trace, drafts: pd.DataFrame, seed: int) -> dict[str, float]:
    """Returns the values of `_lens_lines`; NaN where no draft is of the kind."""
    judged = drafts[drafts.verdict.isin(JUDGED)]
    ranks = lens_ranks(trace, judged, STEPS, FOLDS, seed).assign(head=judged["rank"])
    is_rejected = judged.verdict == "rejected"
    values = {"unknown": float((~judged.is_known[is_rejected].astype(bool)).mean())}
    for key in (*LENSES, "frequency", "head"):
        of_kind = {"rejected": ranks[key][is_rejected], "accepted": ranks[key][~is_rejected], "judged": ranks[key]}
        values |= {f"top1_{of}_{key}": float((own == 0).mean()) for of, own in of_kind.items()}
        values[f"top5_rejected_{key}"] = float((of_kind["rejected"] < 5).mean())
    for k in range(1, STEPS + 1):
        values[f"top1_step_{k}"] = float((ranks.given[is_rejected & (judged.chain_step == k)] == 0).mean())
    return values
