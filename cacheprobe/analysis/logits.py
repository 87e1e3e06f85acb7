"""Splits a logit into a sum over writes to the residual stream (direct logit attribution), and scores whole answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex, cast

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, SITES
from cacheprobe.core.records import DISCARDED_DRAFT, Request
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import listed
from cacheprobe.edits.patching.arguments import Answer, as_answer, one_token, require_room
from cacheprobe.models.base import CachedLM, HeadWriter, ModelError, OutputParts, block_sum
from cacheprobe.models.feeding import feed
from cacheprobe.models.hf.frozen_norm import FrozenNorm
from cacheprobe.models.prompts import Prompt, as_list, as_token_ids, require_unpadded
from cacheprobe.models.settings import hold_model
from cacheprobe.ops.sampling import lowest_argmax
from cacheprobe.ops.state_codec import INT8
from cacheprobe.trace.recording.stored_states import committed_after, require_model
from cacheprobe.trace.tables.schema import typed

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_Part = tuple[str, int | None, int | None, Tensor]
"""Site, layer, head, and the vector [m] that was written."""


@torch.inference_mode()
def attribution(
    trace: "Trace",
    request_id: SupportsIndex,
    position: SupportsIndex | None = None,
    *,
    row: SupportsIndex | None = None,
    token: "Answer | Sequence[str] | None" = None,
    heads: bool | None = None,
    model: CachedLM | None = None,
) -> pd.DataFrame:
    """Splits the logit of a token at one row into a sum: a DataFrame with one line for each layer, site and head.

    position: finds the request's row of status "committed" at this position.  row: any row's number, such as a
    rolled-back one's; give one of the two.
    token: a token as id or as text that follows the row's token, or several, whose tables are concatenated. Default:
    the token committed at the next position; the row's own first choice if no token was committed at the next position,
    or if the row was rolled back.
    heads: splits T by head, from z; by default if z was captured.
    Columns: request_id, row, position, status, token_id, token, layer, site, head, logit. Sites: embed; T and C by
    layer; "T bias", the bias of the heads' output projection if T is split by head; "norm bias" and "unembed bias"; and
    "rest", the part of the stream that comes from none of these: 16-bit rounding of its sums, an intervention, or a
    state that a Thinking States model added. The final norm's scale is frozen at the row's own and its weight is
    included; the same holds for a norm after attention. If blocks scale the stream, as Gemma 4's do, each part is what
    arrives at the end. A softcap or scale that the architecture applies to logits is
    not included.
    Raises: ValueError unless S, T and C of all layers were captured, and for an unknown row or token; ModelError if the
    model's logits, or T by head, are not such a sum.
    Source: Elhage et al. 2021, "A mathematical framework for transformer circuits"; the logit lens (nostalgebraist
    2020); by head, Wang et al. 2022 (arXiv 2211.00593), section 3.
    Twin: tests.twins.attribution_slowly.attribution_slowly, close(1e-4) in float32.
    """
    model = require_model(trace, model)
    if not hasattr(model, "output_parts"):
        raise ModelError(f"{model.name} has no `output_parts`, so its logits cannot be divided; see CachedLM")
    row_info = _find_row(trace, request_id, position, row)
    by_head = HEADS in trace.store.heads if heads is None else heads
    parts, last = _parts(trace, model, row_info, by_head)
    output = model.output_parts()
    norm = FrozenNorm(output.norm, last)
    logits = _logits(model, output, norm, last)
    token_ids = _token_ids(trace, model, row_info, token, logits)
    directions = output.weight[token_ids].double().cpu()
    written = norm(torch.stack([vector for *_, vector in parts])) @ directions.T
    lines = [(site, layer, head, written[i]) for i, (site, layer, head, _) in enumerate(parts)]
    if bool(norm.bias.any()):
        lines.append(("norm bias", None, None, directions @ norm.bias))
    if output.bias is not None and bool(output.bias.any()):
        lines.append(("unembed bias", None, None, output.bias[token_ids].double().cpu()))
    names = ("request_id", "row", "position", "status")
    texts = [visible(text) for text in model.token_texts(token_ids)]
    table = [
        {
            **{name: row_info[name] for name in names},
            "token_id": token_id,
            "token": text,
            "layer": layer,
            "site": site,
            "head": head,
            "logit": float(values[i]),
        }
        for i, (token_id, text) in enumerate(zip(token_ids, texts, strict=True))
        for site, layer, head, values in lines
    ]
    return typed(table, "attribution")


def _find_row(
    trace: "Trace", request_id: SupportsIndex, position: SupportsIndex | None, row: SupportsIndex | None
) -> pd.Series:
    """Returns one line of a request's rows table: the row with this number, or the committed row at this position.
    Raises: ValueError if there is none."""
    if (position is None) == (row is None):
        raise ValueError("say which row: position= for the canonical one, or row= for any, such as a rolled-back one's")
    rows = trace.rows(request_id)
    is_wanted = rows.row == row if row is not None else (rows.position == position) & (rows.status == "committed")
    found = rows[is_wanted]
    if found.empty:
        what = f"row {row}" if row is not None else f"canonical row at position {position}"
        raise ValueError(f"request {request_id} has no {what}; see trace.rows({request_id})")
    return found.iloc[0]


def _parts(trace: "Trace", model: CachedLM, row_info: pd.Series, by_head: bool) -> tuple[list[_Part], Tensor]:
    """Returns (a list of (site, layer, head, vector [m]), one for each write to the residual stream at one row; the
    stream [m] after the last layer)."""
    if lacking := sorted(set(range(model.n_layers)) - set(trace.store.layers)) or set(SITES) - set(trace.store.sites):
        raise ValueError(
            f"a logit falls into S, T and C of all layers; this run kept {', '.join(trace.store.sites) or 'no states'} "
            f"of layers {list(trace.store.layers)}, and not {min(lacking)}; run it with capture='STC' and all layers"
        )
    if trace.meta["capture"]["dtype"] == INT8:
        raise ValueError(
            "a logit falls into parts of exact states, and this run rounded them to int8; run it with another dtype in "
            "CaptureConfig"
        )

    def state(site: str, layer: int) -> Tensor:
        """Returns the captured state of the row at a site and layer, in float64."""
        return trace.vectors(site, layer, [int(row_info.row)])[0].double()

    last = state("S", model.n_layers - 1)
    parts: list[_Part] = [("embed", None, None, _embedding(model, row_info))]
    for layer in range(model.n_layers):
        attention, scale = state("T", layer), block_sum(model, layer).scale
        parts = [(site, at, head, scale * vector) for site, at, head, vector in parts]
        if by_head:
            parts += _by_head(trace, model.head_writer(layer), layer, state(HEADS, layer), attention)
        else:
            parts.append(("T", layer, None, attention))
        parts.append(("C", layer, None, state("C", layer)))
    rest = last - torch.stack([vector for *_, vector in parts]).sum(0)
    return [*parts, ("rest", None, None, rest)], last


def _embedding(model: CachedLM, row_info: pd.Series) -> Tensor:
    """Returns the input of the first layer [m] for a row: a function of its token and position."""
    position = int(row_info.position)
    token = torch.tensor([[int(row_info.token_id)]])
    return feed(model, token, start=position, num_layers=0).out[0, 0].double().cpu()


def _by_head(trace: "Trace", writer: HeadWriter, layer: int, z: Tensor, attention: Tensor) -> list[_Part]:
    """Splits the attention output T [m] of one layer; returns a list of (site, layer, head, vector [m]), one for each
    head, and one for the bias if there is one."""
    written = torch.einsum("hd,hdm->hm", z, writer.weight.double().cpu())
    bias = torch.zeros_like(attention) if writer.bias is None else writer.bias.double().cpu()
    through_norm = 0 * bias
    if writer.norm is not None:
        norm = FrozenNorm(writer.norm, written.sum(0) + bias)
        written, bias, through_norm = norm(written), norm(bias[None])[0], norm.bias
    bias = bias + through_norm
    dtype = getattr(torch, trace.meta["capture"]["dtype"] or trace.fingerprint["dtype"])
    allowed = max(1e-4, 16 * torch.finfo(dtype).eps) * float(attention.abs().max())
    error = float((written.sum(0) + bias - attention).abs().max())
    if not error <= allowed and not trace.meta.get("interventions"):
        raise ModelError(
            f"layer {layer}: the heads' z through the output projection is not T (off by {error:.2g}); this "
            "architecture does more between them, so pass heads=False"
        )
    parts: list[_Part] = [("T", layer, head, vector) for head, vector in enumerate(written)]
    return [*parts, ("T bias", layer, None, bias)] if bool(bias.any()) else parts


def _logits(model: CachedLM, output: OutputParts, norm: FrozenNorm, last: Tensor) -> Tensor:
    """Returns the logits [v] of one row, before a softcap or a scale: its last residual stream `last` [m] after the
    final norm, times the unembedding. Raises: ModelError if the model's own logits differ by more than rounding."""
    logits = (norm(last[None])[0] + norm.bias) @ output.weight.double().cpu().T
    logits = logits if output.bias is None else logits + output.bias.double().cpu()
    model_logits = model.read_out(last.to(model.device, model.dtype)[None])[0].double().cpu()
    error = float(
        (output.finish(logits[None])[0] - model_logits).abs().max() / model_logits.abs().max().clamp(min=1e-30)
    )
    if not error <= max(1e-4, 16 * torch.finfo(model.dtype).eps):
        raise ModelError(
            f"{model.name}: its logits are not its final norm and unembedding (off by {error:.2g} of the largest), so "
            "they do not fall into parts here"
        )
    return logits


def _token_ids(
    trace: "Trace", model: CachedLM, row_info: pd.Series, token: "Answer | Sequence[str] | None", logits: Tensor
) -> list[int]:
    """Returns the token ids to attribute, as a list: the given ones; by default the token committed next, or else the
    row's own first choice."""
    if token is None:
        following = committed_after(trace, trace.row_table[trace.row_table.row == row_info.row])[row_info.row]
        is_followed = row_info.status not in DISCARDED_DRAFT and following >= 0
        return [following if is_followed else lowest_argmax(logits.float())]
    request_id = int(row_info.request_id)
    text = [*trace.requests[request_id].prompt_token_ids, *trace.committed(request_id)]
    before = [*text[: int(row_info.position)], int(row_info.token_id)]
    return [one_token(model, one, before) for one in listed(token)]


@torch.inference_mode()
def answer_logprobs(model: CachedLM, prompts: object, answers: "Sequence[Answer] | None" = None) -> pd.DataFrame:
    """Returns a DataFrame with one line for each prompt and answer: the log-probability of the whole answer, the sum
    over its tokens.

    prompts: one prompt or several, as for `cp.run`.  answers: of every prompt, each as text that follows the prompt
    directly, a token id, or the ids of several tokens; by default the possible answers of each task example.
    Columns: prompt (its index), answer (text), token_ids, logprob_nats, share (the answer's probability among the given
    ones), is_right (whether it is the example's right answer; null without an example).
    Raises: ValueError for an answer that the tokenizer joins to the prompt or does not know all of, for a prompt
    without answers, and for text beyond the model's context.
    """
    lines, listed = [], as_list(prompts)
    given_prompts = [item.prompt if isinstance(item, Request) else item for item in listed]
    read = [as_token_ids(model, cast("Prompt", prompt), f"number {n}") for n, prompt in enumerate(given_prompts)]
    require_unpadded(listed, model.tokenizer)
    with hold_model(model):
        for number, (item, ids) in enumerate(zip(listed, read, strict=True)):
            example = item.example if isinstance(item, Request) else item
            given = getattr(example, "answers", ()) if answers is None else answers
            if isinstance(given, str) or not len(given):
                raise ValueError(f"prompt {number}: give answers, a list of texts or token ids, got {given!r}")
            found = [as_answer(model, answer, ids) for answer in given]
            require_room(model, ids, found)
            nats = [_logprob(model, ids, tokens) for tokens in found]
            right = getattr(example, "answer", None)
            lines += [
                {
                    "prompt": number,
                    "answer": answer if isinstance(answer, str) else model.decode(tokens),
                    "token_ids": list(tokens),
                    "logprob_nats": logprob,
                    "share": share,
                    "is_right": None if right is None else answer == right,
                }
                for answer, tokens, logprob, share in zip(
                    given, found, nats, torch.tensor(nats).double().softmax(0).tolist(), strict=True
                )
            ]
    return typed(pd.DataFrame(lines), "answer_logprobs")


def _logprob(model: CachedLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the log-probability in nats of the tokens of an answer, after a prompt."""
    fed = [*prompt, *answer[:-1]]
    slots = list(range(len(prompt) - 1, len(fed)))
    logits = feed(model, torch.tensor([fed]), logit_slots=slots).out[0].double()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(answer, device=logits.device)[:, None]).sum())
