"""Trains draft heads for `cacheprobe train eagle3` and `train mtp`: records the texts, trains a head for each seed, and
compares the drafts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch

import cacheprobe as cp
from cacheprobe.core.records import SamplingParams
from cacheprobe.engine.drafters import MTP, Drafter, Eagle3, EarlyExit, NGram
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.manifest import MANIFEST
from cacheprobe.training.eagle3 import sites_of, train_eagle3
from cacheprobe.training.heads import SPLIT_SEED, held_out_prompts
from cacheprobe.training.mtp import train_mtp
from cacheprobe.training.settings import Eagle3Settings, HeadSettings, MtpSettings
from cacheprobe.training.tuned_lens import task_prompts

WINDOW = 8
"""Tokens of a verify pass in the comparison: up to 7 draft tokens."""
NUM_PROMPTS, NEW_TOKENS = 24, 64
"""Held-out prompts of the comparison, and generated tokens for each, at most."""


def record_texts(
    model: CachedLM, settings: HeadSettings, layers: Sequence[int], folder: Path, progress: bool = True
) -> cp.Trace:
    """Runs a model on the tasks' prompts, in its chat template if it has one, and records its states S of these layers
    and of the last one to a folder. Continues a recording that was stopped, and returns one that is there.

    Every second text is greedy, the others are sampled at temperature 1. Takes 4 bytes for each number in float32.
    Raises: ValueError if the folder holds a run of other prompts.
    """
    prompts = task_prompts(model, settings.texts, 0, "draft heads", in_chat=True)
    if folder.exists():
        is_whole = (folder / MANIFEST).exists()
        trace = cp.load_trace(folder, model) if is_whole else cp.resume(folder, model, progress=progress)
        if [request.prompt_token_ids for request in trace.requests] != prompts:
            raise ValueError(f"{folder} holds a run of other prompts; choose another folder, or the same settings")
        return trace
    sampled = [SamplingParams(temperature=i % 2, max_new_tokens=settings.new_tokens) for i in range(len(prompts))]
    requests = [cp.Request(prompt, sampling) for prompt, sampling in zip(prompts, sampled, strict=True)]
    capture = cp.CaptureConfig(sites="S", layers=tuple(sorted({*layers, model.n_layers - 1})))
    return cp.run(model, requests, capture=capture, out=folder, progress=progress)


def compare_drafters(model: CachedLM, prompts: Sequence[Sequence[int]], drafters: Sequence[Drafter]) -> pd.DataFrame:
    """Runs the prompts greedily with each drafter, drafts always on. Returns a table with a line for each: drafter (its
    settings), drafted and accepted (tokens), acceptance_rate and tokens_per_pass."""
    lines = []
    for drafter in drafters:
        run = cp.run(
            model, [[*prompt] for prompt in prompts], drafter=drafter, draft_length=WINDOW - 1, window=WINDOW,
            max_new_tokens=NEW_TOKENS, capture=None, progress=False,
        )  # fmt: skip
        events = run.events()
        events = events[events.num_accepted.notna()]
        drafted, accepted = int(events.draft_token_ids.map(len).sum()), int(events.num_accepted.sum())
        committed = int(events.committed_token_ids.map(len).sum())
        shares = round(accepted / max(drafted, 1), 3), round(committed / max(len(events), 1), 2)
        lines.append((repr(drafter), drafted, accepted, *shares))
    return pd.DataFrame(lines, columns=["drafter", "drafted", "accepted", "acceptance_rate", "tokens_per_pass"])


def train_heads(
    run: Path | None, model: str, out: Path, seeds: int, settings: Eagle3Settings | MtpSettings, progress: bool = True
) -> str:
    """Trains a head for each seed in out/seed-N, prints a line about each, and returns a table that compares their
    drafts with early exit at three depths and prompt lookup, on held-out prompts.

    settings: of EAGLE-3 heads, or of MTP modules. The other arguments are the flags of `cacheprobe train eagle3`.
    """
    is_eagle3, folders = isinstance(settings, Eagle3Settings), []
    if run is None:
        lm = cp.load_model(model, dtype="float32", progress=progress)
        sites = sites_of(lm, settings) if isinstance(settings, Eagle3Settings) else []
        trace = record_texts(lm, settings, [layer for _, layer in sites], out / "run", progress)
    else:
        trace = cp.load_trace(run)
        lm = trace.model = cp.load_model(model, dtype=str(trace.fingerprint["dtype"]), progress=progress)
    for seed in range(settings.seed, settings.seed + seeds):
        folders.append(out / f"seed-{seed}")
        train = partial(train_eagle3 if is_eagle3 else train_mtp, trace, replace(settings, seed=seed))
        about = train(folders[-1], progress=progress)
        print(
            f"{folders[-1]}: by place in a chain, the head's likeliest token is the model's in "
            f"{about['held_out_agreement']} of the held-out positions, untrained in {about['untrained_agreement']}; "
            f"{about['cpu_seconds']} s of processor time for the steps"
        )
    held = held_out_prompts(trace, settings.held_out, torch.Generator().manual_seed(SPLIT_SEED))
    prompts = sorted(held, key=[request.prompt_token_ids for request in trace.requests].index)[:NUM_PROMPTS]
    kind = partial(Eagle3, layers_are="inputs") if is_eagle3 else MTP
    drafters: list[Drafter] = [kind(folder=one, length=length) for one in folders for length in (WINDOW - 1, 1)]
    drafters += [EarlyExit(layer) for layer in sorted({(lm.n_layers - 1) * part // 10 for part in (5, 7, 9)})]
    table = compare_drafters(lm, prompts, [*drafters, NGram(length=WINDOW - 1)])
    return f"{len(prompts)} held-out prompts, window {WINDOW}:\n{table.to_string(index=False)}"
