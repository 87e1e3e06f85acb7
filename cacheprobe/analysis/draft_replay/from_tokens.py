"""Lets a drafter that needs only tokens draft again over a committed text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from cacheprobe.analysis.draft_replay.passes import CommittedText, Draft
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.ops.acceptance import clip_draft, num_accepted
from cacheprobe.ops.sampling import choose_token


class NoModel:
    """Stands for the verified model in a replay, which has none."""

    def __init__(self, drafter_name: str, d_vocab: int | None) -> None:
        """d_vocab: size of its vocabulary; None if the run does not say."""
        self.d_vocab = d_vocab
        self.refusal = ValueError(
            f"drafter {drafter_name} runs the verified model, which a replay does not; EarlyExit is read from the "
            "lens readings, other drafters must need only tokens; try this one with cp.run(model, prompts, drafter=...)"
        )

    def __getattr__(self, name: str) -> object:
        raise self.refusal


class TokenContext:
    """Is the DraftContext of a replay: it chooses tokens, and refuses to run the verified model."""

    def __init__(self, drafter_name: str, d_vocab: int | None) -> None:
        self.model = NoModel(drafter_name, d_vocab)

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Raises: ValueError, because a replay does not run the model."""
        raise self.model.refusal

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """Returns the token id that the request would choose from logits [v], with its own settings and noise."""
        text = [*state.token_ids, *state.draft, *drafted]
        return choose_token(logits, state.sampling, text, len(text))


class TokenDrafts:
    """Gives the drafts of a drafter for one request. Call `close` at the end."""

    def __init__(
        self, text: CommittedText, drafter: Drafter, draft_length: "int | str | None", d_vocab: int | None = None
    ) -> None:
        """Begins with the prompt and the first generated token committed. d_vocab: of the verified model, if known."""
        self._text, self._drafter = text, drafter
        self._has_cap = draft_length is not None
        self._context = cast("DraftContext", TokenContext(drafter.name, d_vocab))
        # stop texts need a tokenizer; they end the committed text, so that a right draft ends there too
        stops = text.sampling.stop_token_ids or ()  # none are known of an import
        self._state = SequenceState(text.request, True, replace(text.sampling, stop=(), stop_token_ids=stops))

    def draft(self, position: int, limit: int) -> Draft:
        """Returns the draft of at most `limit` tokens after the committed token at `position`, from as many calls of
        `extend` as the engine makes."""
        state, text = self._state, self._text
        if missing := text.token_ids[len(state.token_ids) : position + 1]:
            state.commit(missing)
        state.drop_draft()
        state.draft_cap = limit if self._has_cap else None
        rest = list(text.token_ids[position + 1 :])
        while len(state.draft) < limit and not state.draft_ends() and not (text.is_stopped and state.draft == rest):
            (proposed,) = self._drafter.extend(self._context, [state])
            listed = [whole_number("a proposed token", token) for token in proposed]
            kept = clip_draft([*state.generated, *state.draft], listed, state.stop_rule, limit - len(state.draft))
            if not kept:
                break
            state.draft.extend(kept)
            if text.is_stopped and state.draft[: len(rest)] == rest:
                del state.draft[len(rest) :]
        accepted = num_accepted(state.draft, rest)
        return Draft((1.0,) * len(state.draft), tuple(float(place < accepted) for place in range(len(state.draft))))

    def close(self) -> None:
        """Lets the drafter delete what it stored for the request."""
        self._drafter.release(self._state)
