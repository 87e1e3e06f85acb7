"""Defines DraftModel, a drafter that runs a second, smaller model with a KV cache of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.core.tokens import visible
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.own_cache import OwnCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import choose_path
from cacheprobe.models.settings import live_model
from cacheprobe.models.vocabularies import Vocabulary, VocabularyMap

_LEAST_SHARED = 0.1
"""Least number of shared tokens, divided by that of the smaller tokenizer. Two tokenizers without a common word share
their single bytes, 256 of 32,000 or more; drafts of single bytes cost more passes than they save."""

_FEED_WIDTH = 64
"""Maximum number of tokens of one text in a pass of the draft model. Longer texts take several passes."""


@register("drafters", "draft_model")
@dataclass(frozen=True)
class DraftModel(Drafter):
    """Drafts with a second, usually smaller model, token by token, for all requests in one batch.

    Draft tokens are sampled with the verifier's own noise (unless acceptance="rejection"), so that similar models often
    sample the same token. The second model's passes are neither captured nor counted as steps.
    Its vocabulary may be padded to another size, and its tokenizer may be another: only tokens that both have are
    drafted, see `VocabularyMap`. With one tokenizer, nothing is drafted after an id that the draft model lacks.
    Source: speculative decoding, Leviathan et al. 2023 (arXiv 2211.17192).
    Twin: tests.by_hand.generated, == in float32, whatever was accepted and rolled back before.
    """

    model: CachedLM
    length: int = 4
    """Maximum number of tokens in a draft; the engine's window and draft_length may set a lower limit."""
    name: ClassVar[str] = "draft_model"
    always_drafts: ClassVar[bool] = False
    drafted_layers: ClassVar[int] = 0
    _reader: "_Reader" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not hasattr(self.model, "new_cache"):
            kind = type(self.model).__name__
            raise ValueError(f"DraftModel needs a model from cp.load_model(...), got a {kind}")
        if self.length < 1:
            raise ValueError(f"DraftModel(length={self.length}) would draft nothing; give at least 1")
        object.__setattr__(self, "_reader", _Reader(self.model))

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError if the draft model is the verified model, or if the two tokenizers share too few tokens.
        If one of the models has no tokenizer, the vocabularies must have one size.

        Also chooses, by `models.paths.choose_path`, whether the draft model runs plain or on its bridge.
        """
        ours = self.model
        if live_model(ours) is live_model(model):
            raise ValueError(
                f"DraftModel holds {model.name} itself, the very weights that it would draft for, and its passes would "
                "be taken for the verifier's; use FastPath, or load a second model"
            )
        has_texts = ours.tokenizer is not None and model.tokenizer is not None
        if not has_texts and ours.d_vocab != model.d_vocab:
            raise ValueError(
                f"DraftModel: {ours.name} has a vocabulary of {ours.d_vocab}, {model.name} one of {model.d_vocab}; use "
                "a draft model with the same tokenizer, and load both with it"
            )
        vocabulary = self._reader.vocabulary(model)
        shared, smaller = vocabulary.num_shared, vocabulary.num_smaller
        if shared < _LEAST_SHARED * smaller:
            raise ValueError(
                f"DraftModel: the tokenizers of {ours.name} and {model.name} share {shared:,} "
                f"token{'s' * (shared != 1)}, less than {_LEAST_SHARED:.0%} of the {smaller:,} of the smaller one, so "
                "drafts would seldom be accepted; use a draft model whose tokenizer shares more, best the same one"
            )
        self._reader.model, _ = choose_path(ours)  # of the hooks that it has now

    def check_texts(self, name: str, texts: Mapping[int, str]) -> None:
        """Raises: ValueError if the draft model's tokenizer gives a token another text than a stored run of the model
        `name`, whose tokens have these texts by id. What `check` compares if the verified model is at hand."""
        # "<17>" is a token without a tokenizer, and other versions wrote parts of characters otherwise
        ids = [i for i, text in texts.items() if i < self.model.d_vocab and text.isascii() and text[0] != "<"]
        own = dict(zip(ids, map(visible, self.model.token_texts(ids)), strict=True))
        if self.model.tokenizer is not None and (bad := [i for i in ids if own[i] != texts[i]]):
            raise ValueError(
                f"DraftModel: token {bad[0]} is {own[bad[0]]!r} for {self.model.name} and {texts[bad[0]]!r} for "
                f"{name}; use a draft model with the same tokenizer, or give the run its model"
            )

    def release(self, state: SequenceState) -> None:
        """Frees the request's row in the draft model's cache."""
        self._reader.forget(state)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of new draft tokens for each request, until its draft has `length` tokens (or fewer, see
        `_room`) or a draft token would end the request."""
        proposals: dict[SequenceState, list[int]] = {state: [] for state in states}
        vocabulary = self._reader.vocabulary(context.model)
        before = {state: vocabulary.to_draft([*state.token_ids, *state.draft]) for state in states}
        room = {state: self._room(state, len(before[state])) for state in states}
        drafting = [state for state in states if before[state] and room[state] > 0]
        while drafting:
            own = {state: [vocabulary.draft_ids[token_id] for token_id in proposals[state]] for state in drafting}
            logits = self._reader.next_logits({state: [*before[state], *own[state]] for state in drafting})
            drafted = [proposals[state] for state in drafting]
            chosen = context.choose(drafting, vocabulary.to_target(logits), drafted)
            for state, token_id in zip(drafting, chosen, strict=True):
                proposals[state].append(token_id)
            drafting = [
                state
                for state in drafting
                if len(proposals[state]) < room[state]
                and not state.stop_rule.ends([*state.generated, *state.draft, *proposals[state]])
            ]
        return list(proposals.values())

    def _room(self, state: SequenceState, num_fed: int) -> int:
        """Returns how many tokens may still be added to a request's draft; none if 0 or less. num_fed: tokens of its
        text and draft, in the draft model's vocabulary."""
        limit = min(self.length, state.num_left - 1)
        if state.draft_cap is not None:
            limit = min(limit, state.draft_cap)
        # the last draft token is chosen from the logits of the token before it, and is never fed to the draft model
        return min(limit - len(state.draft), self.model.n_ctx - num_fed + 1)


class _Reader:
    """Runs the draft model over its own KV cache, which has a row for each drafting request and grows if needed."""

    def __init__(self, model: CachedLM) -> None:
        self.model = model
        self.own = OwnCache()
        self.fed: WeakKeyDictionary[SequenceState, list[int]] = WeakKeyDictionary()
        """Tokens that the request's cache row holds."""
        self._vocabulary: tuple[tuple[object, ...], VocabularyMap] | None = None

    def vocabulary(self, target: Vocabulary) -> VocabularyMap:
        """Returns the map between the vocabularies of the verified model and of the draft model. Keeps the newest one
        until a tokenizer gets another token."""
        tokenizers = target.tokenizer, self.model.tokenizer
        state = (*tokenizers, target.d_vocab, *(len(one) for one in tokenizers if one is not None))
        if self._vocabulary is None or self._vocabulary[0] != state:
            self._vocabulary = state, VocabularyMap(target, self.model)
        return self._vocabulary[1]

    def forget(self, state: SequenceState) -> None:
        """Frees a request's row in the draft model's cache."""
        self.fed.pop(state, None)
        self.own.forget(state)

    def next_logits(self, texts: Mapping[SequenceState, Sequence[int]]) -> Float[Tensor, "b v"]:
        """Returns the draft model's logits after the last token of each text. Feeds the tokens that the request's cache
        row does not hold yet."""
        self.own.make_room(self.model, texts, max(map(len, texts.values())) + _FEED_WIDTH)
        for state, text in texts.items():
            fed = self.fed.setdefault(state, [])
            del fed[min(_num_shared(fed, text), len(text) - 1) :]
        # sorted by cache row, so that a full batch is one contiguous view of the cache
        unfinished = sorted(texts, key=self.own.row_of)
        logits: dict[SequenceState, Tensor] = {}
        while unfinished:
            logits |= self._feed({state: texts[state] for state in unfinished})
            unfinished = [state for state in unfinished if state not in logits]
        return torch.stack([logits[state] for state in texts])

    def _feed(self, texts: Mapping[SequenceState, Sequence[int]]) -> dict[SequenceState, Tensor]:
        """Runs one pass over the next tokens of each text, and returns a dict: request -> logits [v], for texts now fed
        to their end. Raises: ValueError for NaN or infinite logits."""
        fed, rows = [self.fed[state] for state in texts], [self.own.row_of(state) for state in texts]
        starts = [len(one) for one in fed]
        most = min(_FEED_WIDTH, self.model.n_ctx - max(starts))  # pads stay inside the context, too
        parts = [text[start : start + most] for start, text in zip(starts, texts.values(), strict=True)]
        width = max(len(part) for part in parts)
        token_ids = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts])
        slots = sorted({len(part) - 1 for part in parts})
        out = self.model.forward(token_ids, self.own.cache, rows, starts, logit_slots=slots)
        if not bool(out.max(-1).values.isfinite().all()):
            raise ValueError(f"the draft model {self.model.name} gives NaN or infinite logits; load it in float32")
        for one, part in zip(fed, parts, strict=True):
            one.extend(part)
        return {
            state: out[b, slots.index(len(parts[b]) - 1)]
            for b, (state, text) in enumerate(texts.items())
            if len(fed[b]) == len(text)
        }


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the longest common prefix of two token lists."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next((i for i in range(n) if a[i] != b[i]), n)
