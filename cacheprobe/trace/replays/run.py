"""Defines replay: a Trace of the tokens that another program generated, computed by a model loaded here."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack, cast

from cacheprobe.api import RunOptions, run
from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.records import Request
from cacheprobe.core.values import require_known_options
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.replayed import Replayed
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import require_loaded
from cacheprobe.models.prompts import Chat, PromptExample, as_list, text_of, token_ids_of
from cacheprobe.trace.replays.response import ReplayRefused, Response
from cacheprobe.trace.replays.responses import read_responses
from cacheprobe.trace.tables.engine_differences import difference_line, engine_differences
from cacheprobe.trace.trace import Trace


def requests_of(model: CachedLM, responses: Sequence[Response], prompts: object) -> list[Request]:
    """Returns a Request with forced tokens for each response.

    prompts: a text, token ids or a task example for each response, or one for all; None if the responses hold theirs.
    Raises: ReplayRefused for a response without a prompt, with other tokens than its prompt argument, or with text
    whose tokens cannot be told from the prompt's.
    """
    given: list[object] = [None] * len(responses) if prompts is None else as_list(prompts)
    if len(given) == 1:
        given *= len(responses)
    if len(given) != len(responses):
        raise ReplayRefused(f"{len(given)} prompts for {len(responses)} responses; give one for each, or one for all")
    return [
        _request(model, response, prompt, index)
        for index, (response, prompt) in enumerate(zip(responses, given, strict=True))
    ]


def _request(model: CachedLM, response: Response, prompt: object, index: int) -> Request:
    """Returns the Request of one response. prompt: what the user gave for it, or None."""
    text, example, is_chat = prompt, None, False
    if isinstance(prompt, PromptExample):
        text, example, is_chat = text_of(prompt, model, index), prompt, bool(getattr(prompt, "chat", False))
    if text is None:
        text = response.prompt
    if text is None:
        raise ReplayRefused(f"{response.where} does not hold its prompt; give prompts=")
    ids = token_ids_of(text, model, index, is_chat)
    if isinstance(response.prompt, tuple) and response.prompt != ids:
        raise ReplayRefused(
            f"{response.where}: the prompt has {len(ids)} tokens here, and the other program read "
            f"{len(response.prompt)}; they differ from token {_first_difference(response.prompt, ids)} on; leave out "
            "prompts=, or give token ids"
        )
    forced = response.token_ids
    if forced is None:
        forced = _tokens_of(model, response, text if isinstance(text, str) else ids)
    for start, draft in response.drafts.items():
        if bad := [token for token in draft if not 0 <= token < model.d_vocab]:
            raise ReplayRefused(
                f"{response.where}: the draft at token {start} holds {bad[0]}, outside the vocabulary of {model.name}, "
                f"{model.d_vocab}"
            )
    if isinstance(prompt, Chat):  # its turns are found as those of a run are
        return Request(cast("Any", prompt), forced_token_ids=forced)
    return Request(ids, forced_token_ids=forced, example=example)


def _tokens_of(model: CachedLM, response: Response, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens of a response that is text alone: those after the prompt's, of both texts joined. Tokens that
    the tokenizer adds to every text are no part of it."""
    before = prompt if isinstance(prompt, str) else model.decode(prompt)
    ids, whole = (model.encode(text, add_special_tokens=False) for text in (before, before + response.text))
    is_read_alike = isinstance(prompt, str) or prompt[len(prompt) - len(ids) :] == ids
    if not is_read_alike or whole[: len(ids)] != ids or len(whole) == len(ids):
        raise ReplayRefused(
            f"{response.where}: its text joined to the prompt has other tokens at the seam, so the generated tokens "
            "are not known; give token ids"
        )
    found = whole[len(ids) :]
    if (names := response.token_texts) is not None:
        texts = tuple(model.decode([token]) for token in found)
        if texts != names:
            raise ReplayRefused(
                f"{response.where}: its text has other tokens here from token {_first_difference(texts, names)} on, so "
                "its log-probabilities have no place; ask the server for token ids"
            )
    return found


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the first index at which two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(a), len(b)))


_FAR_NATS = 0.5
"""Average difference of log-probabilities above which the two programs hardly ran the same model."""


class ReplaySettings(RunOptions, total=False):
    """Types the keyword arguments of `replay` that it shares with `run`; `run` says what each does."""

    deterministic: "bool | float | Iterable[object]"
    capture: "str | CaptureConfig | None"
    lens: "Lens | str | None"
    interventions: "Intervention | Iterable[object]"


def replay(
    model: CachedLM,
    responses: object,
    *,
    prompts: object = None,
    attention_mask: object = None,
    stop_token_ids: "int | Iterable[int] | None" = None,
    drafter: Drafter | None = None,
    progress: bool = True,
    **settings: Unpack[ReplaySettings],
) -> Trace:
    """Returns the Trace of tokens that another program generated: `run` with these tokens in place of the model's
    choices.

    responses: one or several of: a file (Path) of JSON or JSONL; a response of vLLM or SGLang as a dict, in OpenAI's
        layout or SGLang's own; a dict with token_ids, and perhaps prompt_token_ids, logprobs and drafts; an output of
        vLLM's `LLM.generate`; what Hugging Face's `generate` returned; a text; a list of token ids.
    prompts: a text, token ids or a task example for each response, or one for all, where the responses do not hold
        their prompt's tokens. Of a chat, the text after the chat template.
    attention_mask: [b, prompt], as Hugging Face's `generate` was given it; it says where the prompts end.
    stop_token_ids: token ids (or one) that end a sequence of `generate`, () for none; by default the model's.
    drafter: drafts as in `run`; its tokens are accepted where they equal the given ones. By default the drafts that the
        responses hold are verified again, so that the states of rejected ones are recorded too; of a draft, the tokens
        beyond the last given token but one are not. Without drafts, each pass computes a window of the given tokens.
    settings: as in `run`, apart from sampling, seed and max_new_tokens.
    Where log-probabilities are given, `cp.analysis.engine_differences(trace)` compares them token by token.
    Warns: if they differ by more than half a nat on average, and of drafts that were not verified: a draft must begin
    after the token with which the pass before ended. Raises: ReplayRefused, a ValueError, for responses without known
    tokens or prompt; as `run` for the rest.
    Twin: tests.twins.equivalence.replayed_slowly, close(1e-4): one forward of Hugging Face's model without a cache.
    """
    require_known_options(settings, ReplaySettings.__annotations__)
    require_loaded(model, "a replay")
    stops = model.stop_token_ids if stop_token_ids is None else stop_token_ids
    read = read_responses(responses, attention_mask, stops)
    requests = requests_of(model, read, prompts)
    drafts = {
        index: _cut(response, request) for index, (response, request) in enumerate(zip(read, requests, strict=True))
    }
    is_drafted = drafter is None and any(drafts.values())
    if is_drafted and "window" not in settings:
        settings["window"] = 1 + max(len(draft) for of in drafts.values() for draft in of.values())
    own = Replayed(drafts if is_drafted else None)
    nats = {str(i): list(response.logprob_nats) for i, response in enumerate(read) if response.logprob_nats is not None}
    settings["replay"] = {
        "logprob_nats": nats,
        "is_replayed": drafter is None,
        "drafts": own.record(),
        "drafted_requests": [index for index, of in drafts.items() if of and is_drafted],
    }
    trace = run(model, requests, drafter=drafter or own, progress=progress, **settings)
    if nats:
        _say(trace, progress)
    if is_drafted:
        _warn_of_unverified(trace, drafts)
    return trace


def _cut(response: Response, request: Request) -> dict[int, tuple[int, ...]]:
    """Returns the drafts of a response, without what a verify pass could not commit: the tokens beyond the last given
    token but one."""
    last = len(request.forced_token_ids) - 1
    return {start: ids[: last - start] for start, ids in response.drafts.items() if ids[: max(last - start, 0)]}


def _warn_of_unverified(trace: Trace, drafts: Mapping[int, Mapping[int, tuple[int, ...]]]) -> None:
    """Warns of the first draft that no verify pass fed whole."""
    lengths = {one.request_id: one.num_prompt_tokens for one in trace.requests}
    verified = trace.event_table.dropna(subset=["draft_start"])
    lines = verified[["request_id", "draft_start", "draft_token_ids"]].itertuples(index=False)
    fed = {(r, int(start) - lengths[r]): tuple(map(int, ids)) for r, start, ids in lines}
    given = [(request_id, start) for request_id, of in drafts.items() for start in of]
    lost = [(r, start) for r, start in given if fed.get((r, start)) != tuple(drafts[r][start])]
    if lost:
        warnings.warn(
            f"{len(lost)} of {len(given)} drafts were not verified as given, first that of request {lost[0][0]} at "
            f"token {lost[0][1]}: no pass begins there, or window or draft_length is smaller than the draft",
            stacklevel=3,
        )


def _say(trace: Trace, progress: bool) -> None:
    """Prints how far the two programs are apart, and warns if that is far."""
    line = difference_line(trace)
    if progress and line:
        print(line)
    if engine_differences(trace).difference_nats.abs().mean() > _FAR_NATS:
        warnings.warn(f"{line}; check that model, weights and tokenizer are the same", stacklevel=3)
