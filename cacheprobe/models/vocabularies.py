"""Maps the tokens of a verified model to those of a draft model whose tokenizer or padding differs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.tokens import BYTES, special_token_ids
from cacheprobe.models.base import CachedLM

_SPANS = 4096
"""Number of stretches of text whose tokens are kept."""


@runtime_checkable
class Vocabulary(Protocol):
    """Describes what is read of the verified model: its tokenizer, or None, and the number of its logits."""

    d_vocab: int
    tokenizer: LiveTokenizer


class VocabularyMap:
    """Maps token ids of a verified model (target) to those of a draft model, and the draft model's logits back.

    Two tokens are equal if they stand for the same bytes, however their vocabularies write these: "Ġthe" and "▁the", or
    "Ċ" and "<0x0A>". Special tokens are equal if their names are: a role such as "end" is not enough, because one model
    may end a turn where the other ends a text. If the names of all ids are equal, or a tokenizer is absent, equal ids
    are equal tokens.
    Ids that a tokenizer has no token for, or that one of the models has no logit for, are never drafted.
    Source: token-level intersection, Timor et al. 2025 (arXiv 2502.05202).
    """

    def __init__(self, target: Vocabulary, draft: CachedLM) -> None:
        self._draft = draft
        self._size = target.d_vocab or draft.d_vocab  # unknown in a replay of an older run without its model
        names, of_draft = _names(target), _names(draft)
        self.has_same_ids = names is None or of_draft is None or names == of_draft
        if self.has_same_ids:
            known = sorted((names or of_draft or {}).values()) or range(draft.d_vocab)
            self._meanings = self._of_draft = {i: str(i) for i in known}
        else:
            self._meanings, self._of_draft = _meanings(target), _meanings(draft)
        self._draft_ids: dict[bytes | str, list[int]] = {}
        for i, meaning in self._of_draft.items():
            if i < draft.d_vocab:
                self._draft_ids.setdefault(meaning, []).append(i)
        self.draft_ids: dict[int, int] = {}
        """The draft model's id of each shared token, by the target's id."""
        target_ids: dict[int, int] = {}
        num_seen: Counter[bytes | str] = Counter()
        for i, meaning in self._meanings.items():
            if i < self._size and (ids := self._draft_ids.get(meaning)):
                own = ids[min(num_seen[meaning], len(ids) - 1)]  # the second of equal tokens is the other's second
                num_seen[meaning] += 1
                self.draft_ids[i] = own
                target_ids.setdefault(own, i)
        self._columns = torch.tensor([[*target_ids.values()], [*target_ids]], dtype=torch.long)
        self._parts = {i for i, meaning in self._meanings.items() if _is_part(meaning)}
        self._longest = max((len(one) for one in self._draft_ids if isinstance(one, bytes)), default=0)
        self._start = [] if self.has_same_ids else _start_token(draft)
        self._tokens = lru_cache(_SPANS)(self._encoded)

    @property
    def num_shared(self) -> int:
        """Number of tokens that may be drafted."""
        return self._columns.shape[1]

    @property
    def num_smaller(self) -> int:
        """Number of tokens of the smaller tokenizer."""
        return min(len(self._meanings), len(self._of_draft))

    def to_draft(self, token_ids: Sequence[int]) -> list[int]:
        """Returns a text of the target in the draft model's tokens; [] if it cannot be written in them.

        The bytes of tokens that are not shared, and of the parts of characters beside them, are encoded by the draft
        model's tokenizer. Special tokens that are not shared are left out.
        If ids differ, the draft model's start token comes first, if its tokenizer puts one before every text.
        """
        if self.has_same_ids:
            return list(token_ids) if max(token_ids) < self._draft.d_vocab else []
        out: list[int] = []
        for _, group in groupby(token_ids, key=lambda i: i in self.draft_ids and i not in self._parts):
            ids = list(group)
            is_shared = all(i in self.draft_ids for i in ids)
            out += [self.draft_ids[i] for i in ids] if is_shared else self._tokens(_joined(self._meanings, ids))
        return out if out[: len(self._start)] == self._start else [*self._start, *out]

    def to_target(self, logits: Float[Tensor, "b w"]) -> Float[Tensor, "b v"]:
        """Returns the draft model's logits [b, w] at the target's ids [b, v]; -inf for tokens that are not shared."""
        target_ids, draft_ids = self._columns = self._columns.to(logits.device)
        out = logits.new_full((len(logits), self._size), -torch.inf)
        out[:, target_ids] = logits[:, draft_ids]
        return out

    def _encoded(self, span: bytes) -> list[int]:
        """Returns the draft model's tokens of a stretch of text. If its tokenizer changes the text (many put a space
        before it), or the text ends inside a character: the longest token that fits, again and again."""
        try:
            ids = list(self._draft.encode(span.decode(), add_special_tokens=False))
        except ValueError:  # part of a character, or a word that a word tokenizer lacks
            ids = []
        if _joined(self._of_draft, ids) == span:
            return ids
        ids, start = [], 0
        while start < len(span):
            ends = range(min(start + self._longest, len(span)), start, -1)
            end = next((end for end in ends if span[start:end] in self._draft_ids), start)
            ids += self._draft_ids[span[start:end]][:1] if end > start else []
            start = max(end, start + 1)
        return ids


def _names(model: Vocabulary) -> dict[str, int] | None:
    """Returns the id of each token's name; None without a tokenizer."""
    return None if model.tokenizer is None else model.tokenizer.get_vocab()


def _meanings(model: Vocabulary) -> dict[int, bytes | str]:
    """Returns what each token id stands for: its bytes, or the name of a special token. In the order of ids, but tokens
    such as <0x0A> come last, so that another token of this byte is taken first."""
    vocabulary = sorted((i, name) for name, i in (_names(model) or {}).items())
    special = frozenset(special_token_ids(model))
    first = Counter(name[:1] for _, name in vocabulary)
    is_byte_level = first["Ġ"] > first["▁"]  # SentencePiece vocabularies may have a letter Ġ, too
    found: dict[int, bytes | str] = {}
    single: dict[int, bytes | str] = {}
    for i, name in vocabulary:
        if i in special:
            found[i] = name
        elif is_byte_level and BYTES.keys() >= set(name):
            found[i] = bytes(map(BYTES.__getitem__, name))
        elif not is_byte_level and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            single[i] = bytes.fromhex(name[3:5])
        else:
            found[i] = name.replace("▁", " ").encode()
    return found | single


def _is_part(meaning: bytes | str) -> bool:
    """Returns whether bytes begin or end inside a character of UTF-8."""
    return isinstance(meaning, bytes) and meaning.decode(errors="ignore").encode() != meaning


def _joined(meanings: Mapping[int, bytes | str], token_ids: Sequence[int]) -> bytes:
    """Returns the bytes of a text. Special tokens have none."""
    found = (meanings.get(i, b"") for i in token_ids)
    return b"".join(one for one in found if isinstance(one, bytes))


def _start_token(model: CachedLM) -> list[int]:
    """Returns a list with the token that a model's tokenizer puts before every text; [] if it puts none there."""
    start = list(model.encode(""))
    return start if model.tokenizer is not None and start == [model.tokenizer.bos_token_id] else []
