"""Lists the token sequences whose states a gradient is taken of, and defines ready metrics: functions of a text's
logits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.records import Request
from cacheprobe.edits.patching.arguments import one_token
from cacheprobe.models.base import CachedLM
from cacheprobe.models.prompts import PromptExample, as_list, require_unpadded, text_of, token_ids_of

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

PROMPT, COMMITTED, REJECTED = "prompt", "committed", "rolled_back"


@dataclass(frozen=True)
class GradientText:
    """Describes one sequence that is fed to the model for gradients. A metric gets it beside the logits."""

    request_id: int
    """Number of the request in the trace, or of the prompt."""
    status: str
    """"committed": all tokens of a request but the newest. "rolled_back": a rejected draft and the text before it.
    "prompt": a prompt that was given as it is."""
    step: int | None
    """The verify step that rejected the draft; None for another text."""
    token_ids: tuple[int, ...]
    """The n tokens that are fed. Row p of the logits predicts the token at position p + 1."""
    next_token_id: int | None
    """The token after the last one: the newest committed token; None if there is none."""
    first: int
    """First position whose gradient is kept: of the first rejected token, or 0."""
    num_prompt_tokens: int
    example: object = field(repr=False)
    """The task example of the prompt; None without one."""
    model: CachedLM = field(repr=False)

    def __str__(self) -> str:
        rejected = f" step {self.step}" if self.step is not None else ""
        return f"request {self.request_id}{rejected}"

    def token_id(self, token: "str | int", position: int = -1) -> int:
        """Returns the id of a token given as text or id. Text is taken as it follows the tokens up to `position`.
        Raises: ValueError for text that is not one token there."""
        return one_token(self.model, token, self.token_ids[: self.position(position) + 1])

    def position(self, position: int) -> int:
        """Returns a position counted from 0; a negative one counts from the end of `token_ids`. Raises: ValueError for
        a position outside the text."""
        n = len(self.token_ids)
        if not -n <= position < n:
            raise ValueError(f"{self}: position {position} lies outside its text, which has positions 0 to {n - 1}")
        return position % n

    @property
    def following(self) -> dict[int, int]:
        """Dict from each position to the token that follows it, for the tokens that were generated or drafted: those
        after the prompt. Of a prompt, the tokens after its first."""
        whole = [*self.token_ids, *([] if self.next_token_id is None else [self.next_token_id])]
        begins = {PROMPT: 1, COMMITTED: self.num_prompt_tokens, REJECTED: self.first}[self.status]
        return {at - 1: whole[at] for at in range(begins, len(whole)) if at}


def texts_of_prompts(model: CachedLM, prompts: object) -> list[GradientText]:
    """Returns the GradientText of each prompt: text, token ids, a task example or a Request. Raises: ValueError for an
    invalid prompt, one that is longer than the model's context, and a Request with cached keys and values."""
    found, listed = [], as_list(prompts)
    for index, item in enumerate(listed):
        prompt, example = (item.prompt, item.example) if isinstance(item, Request) else (item, None)
        if isinstance(item, Request) and item.cached is not None:
            raise ValueError(f"request {index} begins with cached keys and values; give its whole prompt without them")
        if isinstance(prompt, PromptExample):
            example, prompt = prompt, text_of(prompt, model, index)
        ids = token_ids_of(prompt, model, index, is_chat=bool(getattr(example, "chat", False)))
        if len(ids) > model.n_ctx:
            raise ValueError(
                f"request {index}: {len(ids)} tokens exceed the model's context of {model.n_ctx}; shorten the prompt"
            )
        found.append(GradientText(index, PROMPT, None, ids, None, 0, len(ids), example, model))
    require_unpadded(listed, model.tokenizer)
    return found


def texts_of_trace(
    model: CachedLM, trace: "Trace", request_ids: "Iterable[int] | None", with_rejected: bool
) -> list[GradientText]:
    """Returns the GradientText of each request's committed text, followed by those of its rejected drafts, by step.

    Raises: KeyError for an unknown request; ValueError for a run whose text alone does not give its states, and if no
    request generated a token.
    """
    if trace.meta.get("interventions") or any(request.cached is not None for request in trace.requests):
        raise ValueError("the run began from a KVSnapshot or had interventions, so its text alone gives other states")
    chosen = [request.request_id for request in trace.requests] if request_ids is None else list(request_ids)
    found = []
    for request_id in chosen:
        generated = trace.committed(request_id)
        request = trace.requests[request_id]
        if generated:
            whole = [*request.prompt_token_ids, *generated]
            shared = (request.num_prompt_tokens, request.example, model)
            found.append(GradientText(request_id, COMMITTED, None, tuple(whole[:-1]), whole[-1], 0, *shared))
            for step, first, ids in _rejected(trace.rows(request_id), whole) if with_rejected else ():
                found.append(GradientText(request_id, REJECTED, step, ids, None, first, *shared))
    if not found:
        raise ValueError("no request generated a token, so there is no text; give other request_ids=, or the prompts")
    return found


def _rejected(rows: pd.DataFrame, whole: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns (step, position of the first rejected token, token ids) of each rejected draft of a request that was fed:
    the ids of the text before the verify pass, and of the tokens that it read. rows, whole: of that request."""
    found = []
    verify = rows[rows.phase == "verify"]
    for step, fed in verify.sort_values("position").groupby("step"):
        lost = fed.position[fed.status == REJECTED]
        if len(lost):
            ids = (*whole[: int(fed.position.min())], *map(int, fed.token_id))
            found.append((int(str(step)), int(lost.min()), ids))
    return found


Metric: TypeAlias = Callable[[Tensor, GradientText], Tensor]
"""Function of a text's logits [n, v] and its GradientText that returns a tensor of one number. Its __name__ names it in
listings."""


def logit_difference(first: "str | int", second: "str | int", position: int = -1) -> Metric:
    """Returns the metric of `cp.gradients` that is the logit of one token minus that of another, in the prediction at
    a position.

    first, second: tokens as text or ids.  position: of the row that predicts them; a negative one counts from the
    end.
    """

    def difference(logits: Tensor, text: GradientText) -> Tensor:
        """Returns the difference of the two logits."""
        at = logits[text.position(position)]
        return at[text.token_id(first, position)] - at[text.token_id(second, position)]

    difference.__name__ = f"logit_difference({first!r}, {second!r}, position={position})"
    return difference


def token_logprob(token: "str | int", position: int = -1) -> Metric:
    """Returns the metric of `cp.gradients` that is the log-probability of a token in nats, in the prediction at a
    position. Arguments: as in `logit_difference`."""

    def logprob(logits: Tensor, text: GradientText) -> Tensor:
        """Returns the log-probability of the token."""
        return _wide(logits[text.position(position)]).log_softmax(-1)[text.token_id(token, position)]

    logprob.__name__ = f"token_logprob({token!r}, position={position})"
    return logprob


def text_logprob(positions: "range | None" = None) -> Metric:
    """Returns the metric of `cp.gradients` that is the log-probability in nats of the text itself: the sum over the
    tokens that were generated (of a committed text), drafted and rejected (of a rejected draft), or follow the first
    token (of a prompt).

    positions: only the predictions of the rows at these positions; by default all.
    """

    def logprob(logits: Tensor, text: GradientText) -> Tensor:
        """Returns the sum of the log-probabilities of the tokens that follow."""
        chosen = {at: token for at, token in text.following.items() if positions is None or at in positions}
        if not chosen:
            raise ValueError(f"{text}: no token follows at the positions of text_logprob; give others")
        rows, tokens = (torch.tensor(list(side), device=logits.device) for side in (chosen, chosen.values()))
        return _wide(logits[rows]).log_softmax(-1).gather(-1, tokens[:, None]).sum()

    logprob.__name__ = "text_logprob()" if positions is None else f"text_logprob({positions})"
    return logprob


def _wide(logits: Tensor) -> Tensor:
    """Returns logits in float32 at least, so that a sum over a vocabulary in 16 bits is not rounded."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
