"""When does SmolLM2 settle on its answer, and at which layers do draft and commit disagree?

    python -m cacheprobe_analyses.prediction_depths --json analyses/results/prediction-depths.json

Coin-flip questions with worked examples, answered greedily while an early layer or the text itself drafts. Of every row
the logit lens is read at every layer: since when its first choice is the last layer's, and, where a draft was rejected,
which of the two tokens each layer holds likelier. Controls: another row's last choice, another row's rejected token.
SmolLM2 is at chance on the coin, so this is about its answers and not about the coin's state.
Source: prediction depth, Baldock et al. 2021 (arXiv 2106.09647), with layers for their k-NN probes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

import cacheprobe as cp
from cacheprobe.engine.drafters import EarlyExit, NGram
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.tasks import CoinFlip
from cacheprobe.views import disagreement_figure, final_choice_figure
from cacheprobe_analyses.command import command
from cacheprobe_analyses.records import records_of

KINDS = ("answer", "later tokens", "after a rejected token")
_RESAMPLES = 1000


@dataclass(frozen=True)
class Config:
    """What drafts for which model, and how long."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    drafters: tuple[Drafter, ...] = (EarlyExit(20), NGram(length=4))
    prompts: int = 24
    people: int = 3
    shots: int = 2
    new_tokens: int = 16
    draft_length: int = 4
    capacity: int = 256
    seed: int = 6_000_000


@dataclass(frozen=True)
class Result:
    """final: kind of row, layer, rows, share whose first choice is the last layer's, chance, settled (for good).
    disagreement: drafter, layer, rejected drafts, share that hold the rejected token likelier, control, nats (mean
    log-probability of the committed over the rejected token). Intervals are 95 %, over requests drawn again."""

    behaviour: dict[str, Any]
    final: list[dict[str, Any]]
    disagreement: list[dict[str, Any]]

    def table(self) -> str:
        b = self.behaviour
        lines = [
            f"{b['accuracy']:.3f} of {b['num_examples']} answers right, chance {b['chance']:.2f}",
            "",
            "| rows | layer | number | first choice is the last layer's | 95 % | another row's | settled for good |",
            "|---|---|---|---|---|---|---|",
        ]
        for f in self.final:
            lines.append(
                f"| {f['kind']} | {f['layer']} | {f['rows']} | {f['share']:.3f} | {f['low']:.3f} to {f['high']:.3f} | "
                f"{f['chance']:.3f} | {f['settled']:.3f} |"
            )
        lines += [
            "",
            "| drafter | layer | rejected | holds the rejected token likelier | 95 % | another row's | nats |",
            "|---|---|---|---|---|---|---|",
        ]
        for d in self.disagreement:
            lines.append(
                f"| {d['drafter']} | {d['layer']} | {d['rejected']} | {d['share']:.3f} | {d['low']:.3f} to "
                f"{d['high']:.3f} | {d['control']:.3f} | {d['nats']:+.2f} |"
            )
        return "\n".join(lines)

    def figures(self) -> tuple[Any, Any]:
        return final_choice_figure(pd.DataFrame(self.final)), disagreement_figure(pd.DataFrame(self.disagreement))


def run(config: Config, progress: bool = False) -> Result:
    """Draft, verify, and read every row that predicts a generated token at every layer."""
    model = cp.load_model(config.model, dtype=config.dtype)
    examples = CoinFlip(people=config.people, shots=config.shots).examples(config.prompts, config.seed)
    final, disagreement, behaviour = pd.DataFrame(), [], {}
    for drafter in config.drafters:
        trace = cp.run(
            model, examples, drafter=drafter, window=config.draft_length + 1, draft_length=config.draft_length, group=8,
            capacity=config.capacity, prefill_chunk=64, capture="S",
            sampling=cp.SamplingParams(max_new_tokens=config.new_tokens, stop_token_ids=()), progress=progress,
        )  # fmt: skip
        if final.empty:  # the committed text is the same whoever drafts
            behaviour, final = trace.meta["behaviour"], _final_choices(trace, config.seed)
        disagreement.append(_disagreement(trace, drafter.name, config.seed))
    joined = pd.concat(disagreement, ignore_index=True)
    return Result(behaviour, records_of(final), records_of(joined))


def _final_choices(trace: cp.Trace, seed: int) -> pd.DataFrame:
    rows = trace.row_table[(trace.row_table.phase != "decode") & (trace.row_table.num_layers == trace.model.n_layers)]
    last_of_prompt = rows.request_id.map({r.request_id: r.num_prompt_tokens - 1 for r in trace.requests})
    rows = rows.assign(is_answer=rows.position == last_of_prompt)[rows.position >= last_of_prompt]
    read = cp.analysis.read_states(trace, cp.lenses.LogitLens(), rows=rows).sort_values(["row", "layer"])
    choices = read.pivot(index="row", columns="layer", values="token_id")
    about = rows.set_index("row").loc[choices.index]
    is_answer, is_lost = about.is_answer.to_numpy(), (about.status == "rolled_back").to_numpy()
    lines = []
    for kind, chosen in zip(KINDS, (is_answer, ~is_answer & ~is_lost, is_lost), strict=True):
        if not chosen.any():
            continue
        mine = choices.to_numpy()[chosen]
        ends, holds = mine[:, -1:], mine == mine[:, -1:]
        others = np.random.default_rng(seed).permutation(ends)
        low, high = _interval(holds, about.request_id.to_numpy()[chosen], seed)
        settled = np.logical_and.accumulate(holds[:, ::-1], axis=1)[:, ::-1]
        lines.append(
            pd.DataFrame(dict(kind=kind, layer=choices.columns, rows=len(mine), share=holds.mean(0), low=low, high=high,
                              chance=(mine == others).mean(0), settled=settled.mean(0)))
        )  # fmt: skip
    return pd.concat(lines, ignore_index=True)


def _disagreement(trace: cp.Trace, name: str, seed: int) -> pd.DataFrame:
    """Of the verifier's rows after which a draft was rejected: the rejected token against the committed one."""
    rejected = cp.analysis.rejected_tokens(trace, cp.lenses.LogitLens()).sort_values(["row", "layer"])
    known = rejected[rejected.committed_token_id.notna()]
    one = known[known.layer == 0]
    tokens, groups = one.rejected_token_id.to_numpy(dtype=int), one.request_id.to_numpy()
    others = np.random.default_rng(seed).permutation(tokens)
    layers = sorted(set(known.layer))
    nats = {column: known.pivot(index="row", columns="layer", values=column).to_numpy()
            for column in ("rejected_logprob_nats", "committed_logprob_nats")}  # fmt: skip
    ahead = nats["rejected_logprob_nats"] > nats["committed_logprob_nats"]
    low, high = _interval(ahead, groups, seed)
    committed = nats["committed_logprob_nats"]
    control = [
        float(np.mean(_logprobs(trace, one.row.tolist(), layer, others) > committed[:, i]))
        for i, layer in enumerate(layers)
    ]
    return pd.DataFrame(
        dict(drafter=name, layer=layers, rejected=len(one), share=ahead.mean(0), low=low, high=high, control=control,
             nats=(committed - nats["rejected_logprob_nats"]).mean(0))
    )  # fmt: skip


def _logprobs(trace: cp.Trace, rows: list[int], layer: int, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        logits = trace.model.read_out(trace.vectors("S", layer, rows))
    return logits.float().log_softmax(-1)[torch.arange(len(rows)), torch.from_numpy(tokens)].numpy()


def _interval(holds: np.ndarray, groups: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentiles, by column, of the share over requests drawn again."""
    names = np.unique(groups)
    sums = np.stack([holds[groups == name].sum(0) for name in names])
    sizes = np.array([(groups == name).sum() for name in names])
    drawn = np.random.default_rng(seed).integers(0, len(names), (_RESAMPLES, len(names)))
    shares = sums[drawn].sum(1) / sizes[drawn].sum(1)[:, None]
    return tuple(np.percentile(shares, [2.5, 97.5], axis=0))


def main() -> None:
    command(__doc__, Config, run, prompts="questions, answered once for each drafter")


if __name__ == "__main__":
    main()
