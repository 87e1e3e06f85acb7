"""Compares cacheprobe's greedy tokens with those of transformers' `generate`, family by family."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

import cacheprobe as cp
from cacheprobe.engine.model_runner import EngineError
from cacheprobe.models.base import CachedLM, ModelError
from tests.field.family_models import NotTried, class_name, tiny_family

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3, 9, 27, 81, 5, 15, 45] * 3, [11, 12]]
NEW_TOKENS = 10
SEEDS = 4
RUN = dict(
    capacity=96,
    max_new_tokens=NEW_TOKENS,
    sampling=cp.SamplingParams(stop_token_ids=()),
    capture=None,
    progress=False,
)
EQUAL, DIFFERENT = "equal", "DIFFERENT"
COLUMNS = ("undrafted", "drafted", "ragged")


@dataclass(frozen=True)
class FamilyRow:
    """How one family did. `reason` says why it was refused or not tried, or which tokens differ."""

    model_type: str
    undrafted: str = ""
    drafted: str = ""
    ragged: str = ""
    padded: str = ""
    """Whether transformers' own batch, padded on the left, gives the tokens of its single prompts."""
    num_rolled_back: int = 0
    outcome: str = "compared"
    """"compared", "refused" (by cacheprobe), or "not tried" (transformers cannot run it here)."""
    reason: str = ""

    @property
    def is_failure(self) -> bool:
        return self.outcome == "compared" and any(getattr(self, name) != EQUAL for name in COLUMNS)


def check_family(model_type: str, load: Callable[[PreTrainedModel], CachedLM] = cp.load_model) -> FamilyRow:
    """Returns the family's row. An error other than a ModelError from `load` is not caught: it is a failure."""
    try:
        plain, expected, complaint = _subject(model_type)
        model = load(copy.deepcopy(plain))
    except NotTried as reason:
        return FamilyRow(model_type, outcome="not tried", reason=str(reason))
    except ModelError as refusal:
        return FamilyRow(model_type, outcome="refused", reason=str(refusal))
    if complaint:
        return FamilyRow(model_type, outcome="not tried", reason=complaint)
    settings: dict[str, Any] = RUN
    alone = cp.run(model, PROMPTS, **settings, max_batch=1)
    drafters = [cp.drafters.EarlyExit(layer=0), cp.drafters.NGram(min_ngram=1), None]
    drafted = [
        cp.run(model, PROMPTS, **settings, drafter=one) if one else _deterministic(model, PROMPTS) for one in drafters
    ]
    ragged = [cp.run(model, PROMPTS, **settings), _deterministic(model, PROMPTS[::-1])]
    said = [tokens_of(alone), *map(tokens_of, drafted), tokens_of(ragged[0]), tokens_of(ragged[1])[::-1]]
    verdicts = [EQUAL if tokens == expected else DIFFERENT for tokens in said]
    of_drafts = EQUAL if set(verdicts[1:4]) == {EQUAL} else DIFFERENT
    of_ragged = EQUAL if set(verdicts[4:]) == {EQUAL} else DIFFERENT
    reason = "" if set(verdicts) == {EQUAL} else f"generate gives {expected}, cacheprobe {said}"
    rolled_back = sum(trace.num_rolled_back for trace in drafted)
    padded = EQUAL if _generate(plain, PROMPTS) == expected else "differs"
    return FamilyRow(model_type, verdicts[0], of_drafts, of_ragged, padded, rolled_back, reason=reason)


def _deterministic(model: CachedLM, prompts: list[list[int]]) -> cp.Trace:
    """Returns a run of deterministic requests; of plain ones for a model whose bits depend on the batch index.

    Mixtures of experts compute an expert's tokens together, so their rows depend on each other. cacheprobe refuses
    deterministic requests there, before or while they run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            trace = cp.run(model, prompts, **RUN, deterministic=True)
            errors = list(trace.meta["errors"].values())
        except (ValueError, EngineError) as error:
            trace, errors = None, [str(error)]
    if trace is not None and not errors:
        return trace
    assert all("same bits" in error for error in errors), errors
    return cp.run(model, prompts, **RUN)


def tokens_of(trace: cp.Trace) -> list[list[int]]:
    return [trace.committed(i) for i in range(len(trace.requests))]


def _subject(model_type: str) -> tuple[PreTrainedModel, list[list[int]], str]:
    """Returns a tiny model, transformers' own greedy tokens for each prompt alone, and why they cannot be used.

    Draws other weights if the model says nearly the same for every prompt.
    """
    plain, tokens, complaint = None, [], ""
    for seed in range(SEEDS):
        plain = tiny_family(model_type, seed)
        try:
            tokens = [_generate(plain, [prompt])[0] for prompt in PROMPTS]
        except Exception as error:
            return plain, [], f"transformers does not generate with it: {type(error).__name__}: {error!s:.200}"
        if len({tuple(one) for one in tokens}) == len(PROMPTS) and len({t for one in tokens for t in one}) >= 5:
            return plain, tokens, ""
        complaint = f"its random weights say nearly the same for every prompt: {tokens}"
    assert plain is not None
    return plain, tokens, complaint


def _generate(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made: Any = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return made[:, width:].tolist()


def table(rows: list[FamilyRow]) -> str:
    """Returns a Markdown table of families: undrafted, drafted, ragged, or the reason why not."""
    heads = ["family", "class", *COLUMNS, "drafts rolled back", "generate's own padded batch", "reason"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        reason = " ".join(row.reason.split()).replace("|", "\\|")
        if row.outcome != "compared":
            reason = f"{row.outcome}: {reason}"
        cells = [row.model_type, class_name(row.model_type), *(getattr(row, name) for name in COLUMNS)]
        lines.append("| " + " | ".join([*cells, str(row.num_rolled_back or ""), row.padded, reason]) + " |")
    return "\n".join(lines)
