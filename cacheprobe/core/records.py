"""The facts that everything else passes around: frozen, self-checking, free of torch.

Knows nothing about models, tensors or files. `Observer` is the one way out of the engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

from cacheprobe.core.values import flag, number, require_encodable, whole_number

PHASES = ("prefill", "decode", "verify")
ROLES = ("prompt", "committed", "accepted", "recovered", "bonus", "rolled_back", "given_up")
STATUSES = ("committed", "candidate", "rolled_back", "given_up")
FED_A_DRAFT_IN_VAIN = ("rolled_back", "given_up")
"""Statuses of rows that were fed a draft token which was never committed: rejected, behind a rejected one, or given up
without a verdict."""
VERDICTS = ("accepted", "rejected", "never_judged")
"""Of a drafted token. accepted: the verifier chose it.  rejected: the verifier chose another.  never_judged: it stood
behind a rejected one, or its draft was given up (its request lost its cache, was cancelled, or a pass failed)."""
PROVENANCES = ("free", "prefill", "decoded", "provisional", "verified", "edited")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request chooses its tokens. Fields left at None take the run's value, then the default.

    Order, as in Hugging Face: repetition penalty, temperature, top_k, top_p, min_p. Every one of them is a function of
    the committed tokens alone, so that a rollback has nothing to restore. Equal logits rank by the lower token id.
    """

    temperature: float | None = None
    """0 is greedy; otherwise logits are divided by it before keyed Gumbel noise is added. Default 0."""
    seed: int | None = None
    """Seed of the noise. Default: derived from the run's seed and the request's index."""
    max_new_tokens: int | None = None
    """Tokens to commit at most. Default 32."""
    stop_token_ids: "Iterable[int] | int | None" = None
    """Committing one of these ends the request; the token is kept. Default: the model's own; () stops at none."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens. Default 0: from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together hold this much probability, at least one. Default 1: from all."""
    min_p: float | None = None
    """Draw from the tokens with at least this share of the likeliest one's probability. Default 0: from all."""
    repetition_penalty: float | None = None
    """Divide positive and multiply negative logits of tokens that the prompt or the output holds. Default 1: not."""
    stop: "Iterable[str] | None" = None
    """Texts that end the request; the token that completes one is the last. Default (): none."""
    n: int | None = None
    """Samples of the prompt, each a request of its own with its own seed; they share one prefill. Default 1."""

    def __new__(cls, *args: Any, **settings: Any) -> "SamplingParams":
        for name in settings.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(
                f"{name} is no sampling setting here: what changes logits must be a function of the committed tokens "
                f"alone, so that it can be rolled back; there are {', '.join(cls.__dataclass_fields__)}"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if getattr(self, name) is not None:  # numpy's numbers are welcome, and become Python's
                object.__setattr__(self, name, kind(name, getattr(self, name)))
        for name, (is_allowed, wanted) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not is_allowed(value):
                raise ValueError(f"{name} must be {wanted}, got {value}")
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.stop is not None:
            object.__setattr__(self, "stop", _stop_texts(self.stop))

    def over(self, fallback: "SamplingParams") -> "SamplingParams":
        """These settings, with `fallback`'s where a field is None."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(fallback, **{name: value for name, value in mine.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        return not self.temperature

    @property
    def is_plain(self) -> bool:
        """Whether logits are used as they are, apart from the temperature."""
        return not self.top_k and self.top_p in (None, 1) and not self.min_p and self.repetition_penalty in (None, 1)


_KINDS = {
    "temperature": number, "seed": whole_number, "max_new_tokens": whole_number, "top_k": whole_number,
    "top_p": number, "min_p": number, "repetition_penalty": number, "n": whole_number,
}  # fmt: skip
_LIMITS = {
    "temperature": (lambda x: 0 <= x < float("inf"), "a finite number >= 0"),
    "seed": (lambda x: x >= 0, "a non-negative integer"),
    "max_new_tokens": (lambda x: x >= 1, "at least 1"),
    "top_k": (lambda x: x >= 0, "at least 0 (0 draws from all tokens)"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda x: 0 < x < float("inf"), "a finite number above 0"),
    "n": (lambda x: x >= 1, "at least 1"),
}


def _stop_token_ids(given: Any) -> tuple[int, ...]:
    """One token id or several as a tuple. Whether the vocabulary has them is the run's to check."""
    listed = given if isinstance(given, Iterable) and getattr(given, "ndim", 1) else (given,)
    ids = tuple(whole_number("stop_token_ids: a token id", token_id) for token_id in listed)
    if min(ids, default=0) < 0:
        raise ValueError(f"stop_token_ids must hold token ids from 0 on, got {min(ids)}; () stops at none")
    return ids


def _stop_texts(given: Any) -> tuple[str, ...]:
    """One stop text or several as a tuple."""
    listed = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(text, str) and text for text in listed):
        raise ValueError(f"stop must hold texts of at least one character, got {given!r:.60}")
    for text in listed:
        require_encodable("stop", text)
    return listed


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, as its author wrote it. `cacheprobe.run` fills in what is left open."""

    prompt: "str | Sequence[int]"
    """Text, or token ids."""
    sampling: SamplingParams | None = None
    is_deterministic: bool = False
    """Promise D1 and D2 for this request: its tokens and states are independent of the traffic around it."""
    request_id: "int | Any" = None
    """Given by the run: its place in the order of requests; None until then, which no reader of a run meets."""
    prompt_token_ids: tuple[int, ...] = ()
    example: Any = None
    """The task example that the prompt was made from, if any."""
    arrival_step: int = 0
    """The request joins at the first round that begins at this step or later; at once where nothing else runs."""
    sample_of: int | None = None
    """Given by the run: the first of the samples (SamplingParams.n) that share this prompt."""
    cached: Any = field(default=None, repr=False)
    """KVSnapshot of the prompt's first tokens, from which the request goes on; those tokens are not read again."""
    own_fingerprint: bool = False
    """Must be said of a deterministic request with `cached`: it is comparable only with others that begin there."""
    keep_rows: bool = False
    """Copy its cache rows when it ends, for `cp.analysis.cache_rows` and `fork`: they stay in memory with the trace."""

    def __post_init__(self) -> None:
        for name in ("is_deterministic", "own_fingerprint", "keep_rows"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        object.__setattr__(self, "arrival_step", whole_number("arrival_step", self.arrival_step))
        if self.arrival_step < 0:
            raise ValueError(f"arrival_step must be at least 0, the first step of a run, got {self.arrival_step}")
        if self.sampling is not None and not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling must be a cp.SamplingParams, got a {type(self.sampling).__name__}")
        if isinstance(self.prompt, bytes | bytearray | memoryview):
            raise ValueError(f"a prompt must be text or a list of token ids, got {self.prompt!r:.60}; decode it first")
        if isinstance(self.prompt, str):
            require_encodable("a prompt", self.prompt)

    @property
    def num_cached(self) -> int:
        return 0 if self.cached is None else len(self.cached)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier decided about one draft.

    Source: decode-verify-rollback of LLM-42 (arXiv 2601.17768, section 4.2), the variant with a bonus token.
    """

    request_id: int
    step: int
    start: int
    """Absolute position of the first draft token."""
    draft_token_ids: tuple[int, ...]
    target_token_ids: tuple[int, ...]
    """What the verifier chose at each draft position, and one beyond; none beyond a drafted stop token, which is
    compared but never fed."""
    num_accepted: int
    """Length of the longest prefix of the draft that the verifier would have chosen itself."""
    num_committed: int
    """Tokens that this pass committed: num_accepted + 1, or fewer where the request ended."""
    finish: str | None = None
    """"stop" or "length" where this pass ended the request."""

    def __post_init__(self) -> None:
        n, drafted, targets = self.num_accepted, len(self.draft_token_ids), len(self.target_token_ids)
        if not (0 <= n <= drafted <= targets <= drafted + 1 and 1 <= self.num_committed <= min(n + 1, targets)):
            raise ValueError(
                f"request {self.request_id} step {self.step}: accepted {n} of {drafted} drafted tokens, "
                f"committed {self.num_committed}, {targets} target tokens"
            )

    @property
    def committed(self) -> tuple[int, ...]:
        """Accepted tokens, then one recovered (or, if all were accepted, bonus) token."""
        n = self.num_accepted
        return (self.draft_token_ids[:n] + self.target_token_ids[n : n + 1])[: self.num_committed]

    @property
    def recovered(self) -> int | None:
        """The verifier's own token at the first mismatch, if there was one."""
        return self.committed[-1] if self.is_rollback and self.num_committed > self.num_accepted else None

    @property
    def bonus(self) -> int | None:
        """The verifier's own next token after a full match."""
        return self.committed[-1] if not self.is_rollback and self.num_committed > self.num_accepted else None

    @property
    def is_rollback(self) -> bool:
        return self.num_accepted < len(self.draft_token_ids)

    @property
    def rolled_back(self) -> tuple[int, ...]:
        return self.draft_token_ids[self.num_accepted :]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass of the engine and what followed from it."""

    step: int
    phase: str
    batch_shape: tuple[int, int]
    """Rows and token slots of the pass, dummies and pads included."""
    request_ids: tuple[int, ...]
    """The real requests in it."""
    seconds: float
    committed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(request_id, tokens) committed without a verdict: by the prefill, or by a decode that is never verified."""
    proposed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(request_id, tokens) added to drafts."""
    verdicts: tuple[Verdict, ...] = ()
    logprobs: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(request_id, log-probability in nats of each token that this step committed), under the model's own logits."""
    margins: tuple[tuple[int, float], ...] = ()
    """(request_id, nats between the two best tokens) where this step chose a token: how settled the choice was."""


@dataclass(frozen=True, slots=True)
class RowSlot:
    """Where one real row of a pass stands, and whose it is."""

    request_id: int
    batch_index: int
    """Row b of the pass."""
    slot: int
    """Token slot t of the pass."""
    position: int
    """Absolute position of the row's input token."""
    token_id: int
    is_canonical: bool
    """True where these states become the request's own: prefill rows, verify rows, never-verified decode rows."""
    is_draft: bool = False
    """The input token is a candidate whose verdict is open."""


@dataclass(frozen=True, slots=True)
class ForwardRecord:
    """What one pass computed, as an observer needs it. Tensors are the pass's own: copy what is kept."""

    step: int
    phase: str
    rows: tuple[RowSlot, ...]
    logits: Any = None
    """[b, t, v], or None where the pass stopped at an early layer or kept no logits."""
    num_layers: int | None = None
    """Layers that ran; None for all."""
    rewritten: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Layer -> numbers of `rows` where an intervention put another residual stream in the place of the block's own."""


@dataclass(frozen=True, slots=True)
class Thought:
    """What a Thinking States model thought of one chunk.

    It is as lasting as the chunk's last token: thoughts of candidates are provisional.
    Source: Thinking States (arXiv 2602.08332), Eq. 4 and 5.
    """

    request_id: int
    step: int
    phase: str
    chunk: int
    """Number of the chunk that it was made from; it acts on the next one."""
    end: int
    """Absolute position of that chunk's last token."""
    token_ids: tuple[int, ...]
    has_ended: bool
    """False where it was cut at the model's limit."""
    logprobs: tuple[float, ...]
    """Of each token, in nats."""
    first_logits: Any = field(repr=False, default=None)
    """[v] from which its first token was chosen."""
    state: Any = field(repr=False, default=None)
    """[c, m]: what is added to the next chunk."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's end: by a stop, by length, cancelled, or by an error."""

    request_id: int
    step: int
    reason: str
    committed: tuple[int, ...] = field(repr=False, default=())


_LATER_FIELDS = {
    "pad_prefill": True,
    "float32_matmul_precision": "highest",
    "deterministic_algorithms": "off",
    "flush_denormal": False,
    "attention_kernels": "all",
    "mkl_enable_instructions": "",
    "onednn_max_cpu_isa": "",
    "onednn_default_fpmath_mode": "",
}
"""Fields of a fingerprint that earlier runs do not have, and what they are taken to have been: the defaults."""


def fingerprint_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields in which two schedule fingerprints differ, with both values; None where one has no such field.

    A field that was not recorded yet is taken at its default, and says so. A model is its weights, wherever it was
    loaded from, so its name is no difference.
    """
    keys = sorted({*a, *b} - {"model", "adapter"})
    differing = [key for key in keys if _field(a, key) != _field(b, key)]
    return [(key, _told(a, key), _told(b, key)) for key in differing]


def _field(fingerprint: Mapping[str, Any], key: str) -> Any:
    return fingerprint.get(key, _LATER_FIELDS.get(key))


def _told(fingerprint: Mapping[str, Any], key: str) -> Any:
    is_assumed = key not in fingerprint and key in _LATER_FIELDS and key != "pad_prefill"  # which says it by absence
    return f"not recorded, so taken as {_LATER_FIELDS[key]!r}" if is_assumed else _field(fingerprint, key)


@runtime_checkable
class Observer(Protocol):
    """Looks, and does not touch. The engine calls these in order; nothing that they return is used."""

    def before_forward(self, step: int, phase: str, rows: Sequence[RowSlot], shape: tuple[int, int]) -> None: ...

    def after_forward(self, record: ForwardRecord) -> None: ...

    def on_thought(self, thought: Thought) -> None:
        """The pass just heard of by after_forward thought this."""
        ...

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Any) -> None:
        """A token was chosen for `position` from logits [v]; whether it stays is not yet known."""
        ...

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Tokens `token_ids` now stand at positions start.. for good; `roles` says how each came about."""
        ...

    def on_rollback(self, request_id: int, step: int, start: int, end: int) -> None:
        """Draft tokens at positions start..end-1 were rejected."""
        ...

    def on_give_up(self, request_id: int, step: int, start: int, end: int) -> None:
        """Draft tokens at positions start..end-1 were dropped without a verdict."""
        ...

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """The request took its prompt's rows over from `source_id`, which has the same prompt."""
        ...

    def on_preempt(self, request_id: int, step: int) -> None:
        """The request lost its cache row; its rows will be written again, unseen."""
        ...

    def on_compared(self, step: int, difference: str | None) -> None:
        """The pass computed one request's tokens twice; `difference` says where the bits differ, None for nowhere."""
        ...

    def on_failure(self, step: int) -> None:
        """The step failed: nothing that was seen of its passes, since the last on_step, counts."""
        ...

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """Cache rows start..end-1 of the request now have this provenance."""
        ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_finish(self, finished: Finished) -> None: ...
