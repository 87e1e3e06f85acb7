"""Measures the columns of the table of families: each is a function of a tiny model that returns why it fails, "" if it
does not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from cacheprobe.api import reference, run
from cacheprobe.core.live import LiveModule
from cacheprobe.edits.patching.pairs import activation
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit
from cacheprobe.engine.drafters.ngram import NGram
from cacheprobe.engine.drafters.scripted import Scripted
from cacheprobe.engine.shapes import ShapeRefused
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.models.plain.structure import PlainBlock
from cacheprobe.trace.trace import Trace
from tests.field.original import changing, generated, logits_of, states_of

PROMPTS = [[(3 + 7 * i) % 89 for i in range(11)], [5, 80, 33]]
NEW_TOKENS = 8
_CAPACITY, _WINDOW, _GROUP = 64, 4, 2
_CLOSE = 1e-4
"""Largest accepted difference in float32, relative to the largest value: sums are reordered by about 1e-6, and a wrong
row, mask or site differs by more than .1."""


@dataclass(frozen=True, eq=False)
class TinySubject:
    """Holds a tiny model behind our loader, and the untouched transformers model with the same weights."""

    original: LiveModule
    blocks: list[PlainBlock]
    model: CachedLM

    @cached_property
    def oracle(self) -> Trace:
        """Trace of `cp.reference`, one request and one token at a time."""
        return reference(
            self.model, PROMPTS, capacity=_CAPACITY, window=_WINDOW, group=_GROUP, max_new_tokens=NEW_TOKENS,
            progress=False,
        )  # fmt: skip

    @cached_property
    def drafter(self) -> Drafter:
        """A drafter that proposes two right tokens and a wrong one, so that every family accepts and rejects."""
        texts = [[*prompt, *new] for prompt, new in zip(PROMPTS, self.generated, strict=True)]

        def script(state: SequenceState) -> list[int]:
            """Returns the draft for one request."""
            n = len(state.token_ids)
            rest = next((text[n:] for text in texts if text[:n] == list(state.token_ids)), [])
            return [*rest[:2], (rest[2] + 1) % 89 if len(rest) > 2 else 17]

        return Scripted(script)

    @cached_property
    def deterministic(self) -> Trace:
        """Trace of a deterministic run with drafts that are partly rejected."""
        return _deterministic(self, PROMPTS)

    @cached_property
    def drafted(self) -> Trace:
        """The deterministic trace; where products depend on the batch, which such a run refuses, one without that."""
        try:
            return self.deterministic
        except ShapeRefused:
            return _free(self, self.drafter)

    @cached_property
    def undrafted(self) -> Trace:
        """The oracle's trace; where products depend on the batch, that of a run without drafts."""
        try:
            return self.oracle
        except ShapeRefused:
            return _free(self, None)

    @cached_property
    def generated(self) -> list[list[int]]:
        """Tokens that `generate` of transformers adds to each prompt."""
        return [generated(self.original, prompt, NEW_TOKENS, self.model.stop_token_ids) for prompt in PROMPTS]


def _deterministic(subject: TinySubject, prompts: list[list[int]]) -> Trace:
    """Returns the trace of a deterministic run with drafts."""
    return run(
        subject.model, prompts, drafter=subject.drafter, deterministic=True, max_new_tokens=NEW_TOKENS,
        capacity=_CAPACITY, window=_WINDOW, group=_GROUP, progress=False,
    )  # fmt: skip


def _free(subject: TinySubject, drafter: Drafter | None) -> Trace:
    """Returns the trace of a run that may take a pass shape in which results depend on the batch."""
    return run(subject.model, PROMPTS, drafter=drafter, max_new_tokens=NEW_TOKENS, capacity=_CAPACITY, progress=False)


def generates(subject: TinySubject) -> str:
    """Compares the committed tokens of a run without drafts with those of transformers' `generate`."""
    return _other_tokens(subject, subject.undrafted)


def drafts_lossless(subject: TinySubject) -> str:
    """Compares the committed tokens of a run with drafts with those of transformers' `generate`."""
    drafted, rejected = subject.drafted.num_drafted, subject.drafted.num_rolled_back
    if not 0 < rejected < drafted:
        return f"{rejected} of {drafted} draft tokens were rejected, so nothing was tried"
    for drafter in (EarlyExit(layer=0), NGram(min_ngram=1)):
        if reason := _other_tokens(subject, _free(subject, drafter)):
            return f"with {drafter.name}, {reason}"
    return _other_tokens(subject, subject.drafted)


def _other_tokens(subject: TinySubject, trace: Trace) -> str:
    for request, theirs in enumerate(subject.generated):
        if trace.committed(request) != theirs:
            return f"request {request} commits {trace.committed(request)}, generate gives {theirs}"
    return ""


def rollback_exact(subject: TinySubject) -> str:
    """Compares, bit for bit, logits, keys, values and recurrent states with and without rejected tokens before them."""
    found = []
    for has_drafts in (False, True):
        cache = subject.model.new_cache(1, 64)
        cache.allocate()
        ids = torch.tensor([PROMPTS[0]])
        subject.model.forward(ids[:, :6], cache, [0], [0])
        cache.extend(0, 0, 6, "prefill")
        if has_drafts:
            subject.model.forward(torch.tensor([[70, 71, 72, 73]]), cache, [0], [6])
            cache.extend(0, 6, 10, "provisional")
            cache.truncate(0, 6)
        logits = subject.model.forward(ids[:, 6:10], cache, [0], [6])
        kept = [tensor[:, :, :10].clone() for tensor in (*cache.keys, *cache.values)]
        if (memory := memory_of(cache)) is not None:
            kept += [value for *_, value in memory.states(0)]
        found.append((logits.clone(), kept))
    (clean, clean_cache), (rolled, rolled_cache) = found
    if not torch.equal(clean, rolled):
        return f"logits after a rollback differ by up to {float((clean - rolled).abs().max()):.1g}"
    same = all(torch.equal(a, b) for a, b in zip(clean_cache, rolled_cache, strict=True))
    return "" if same else "keys, values or recurrent states after a rollback differ"


def states_right(subject: TinySubject) -> str:
    """Compares S, T and C of a run with drafts with hooks on the original; and S with the sum of what is added."""
    for request, prompt in enumerate(PROMPTS):
        text = [*prompt, *subject.drafted.committed(request)][:-1]
        theirs = states_of(subject.original, subject.blocks, text)
        for (site, layer), value in theirs.items():
            ours = subject.drafted.states(site, layer, request)
            if ours.shape != value.shape:
                return f"{site} of layer {layer} has {list(ours.shape)}, the original {list(value.shape)}"
            if (distance := _distance(ours, value)) > _CLOSE:
                return f"{site} of layer {layer} is {distance:.1g} of the largest value away from the original's"
        for layer in range(1, len(subject.blocks)):
            below = subject.blocks[layer].input_factor * theirs["S", layer - 1]
            parts = below + theirs["T", layer] + theirs["C", layer]
            if _distance(theirs["S", layer], parts) > _CLOSE:
                return f"S of layer {layer} is not S of the layer below plus T plus C"
    return ""


def readings_right(subject: TinySubject) -> str:
    """Compares the reading Z of the last layer with the original's logits: the whole row, and the stored best token."""
    last = subject.model.n_layers - 1
    for request, prompt in enumerate(PROMPTS):
        text = [*prompt, *subject.drafted.committed(request)][:-1]
        theirs = logits_of(subject.original, text)
        ours = subject.model.read_out(subject.drafted.states("S", last, request))
        if (distance := _distance(ours, theirs)) > _CLOSE:
            return f"the last layer reads {distance:.1g} of the largest logit away from the original's logits"
        table = subject.drafted.hypotheses()
        wanted = (table["request_id"] == request) & (table["layer"] == last) & (table["site"] == "S")
        stored = table[wanted & (table["status"] == "committed")]
        best = theirs.argmax(-1)[stored["position"].tolist()].tolist()
        if not len(stored) or stored["token_id"].tolist() != best:
            return f"the stored readings of request {request} are not the original's best tokens"
    return ""


def batch_invariant(subject: TinySubject) -> str:
    """D1: compares the bits of a deterministic request alone with those of the same request among others."""
    for request, prompt in enumerate(PROMPTS[:1]):
        alone = _deterministic(subject, [prompt])
        if alone.committed(0) != subject.deterministic.committed(request):
            return f"request {request} commits other tokens alone than among others"
        if alone.digest(0) != subject.deterministic.digest(request):
            return f"states of request {request} have other bits alone than among others"
    return ""


def equals_oracle(subject: TinySubject) -> str:
    """D2: compares the bits of a deterministic run with drafts with those of `cp.reference`."""
    for request in range(len(PROMPTS)):
        if subject.deterministic.digest(request) != subject.oracle.digest(request):
            return f"states of request {request} have other bits than the oracle's"
    return ""


def edits_right(subject: TinySubject) -> str:
    """Compares logits after adding a vector at one position of S, T or C with the same edit of the original."""
    ids = PROMPTS[0]
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(subject.model.d_model, generator=generator)

    def add(value: Tensor) -> Tensor:
        """Returns a copy of a state [b, t, m] with the vector added at position 4."""
        changed = value.clone()
        changed[:, 4] += vector
        return changed

    plain = logits_of(subject.original, ids)
    for site in "STC":
        layer = next((i for i, block in enumerate(subject.blocks) if i and _has(block, site)), None)
        if layer is None:  # no block has an MLP
            continue
        with subject.model.editing([(site, layer)], lambda at, number, value: add(value)):
            ours = feed(subject.model, torch.tensor([ids])).out[0]
        with changing(subject.original, subject.blocks[layer], site, add):
            theirs = logits_of(subject.original, ids)
        if (distance := _distance(ours, theirs)) > _CLOSE:
            return f"an edit of {site} gives logits {distance:.1g} of the largest away from the original's"
        if _distance(theirs, plain) < 1e-3:
            return f"an edit of {site} changes nothing, so nothing was tried"
    return ""


def patching_right(subject: TinySubject) -> str:
    """Compares cells of a patching grid with whole forwards of the original in which the same state is replaced."""
    clean = PROMPTS[0]
    corrupt = [*clean[:3], 88, *clean[4:]]
    answer = (1, 2)
    layers, positions = [0, 1], [3, 7]  # cells of two layers share a batch
    grid = activation(subject.model, clean, corrupt, layers=layers, positions=positions, answer=answer, progress=False)
    donors = states_of(subject.original, subject.blocks, clean)
    for layer, position in product(layers, positions):

        def put(value: Tensor, layer: int = layer, position: int = position) -> Tensor:
            """Returns the stream with the clean run's state at the position."""
            changed = value.clone()
            changed[:, position] = donors["S", layer][position]
            return changed

        with changing(subject.original, subject.blocks[layer], "S", put):
            logits = logits_of(subject.original, corrupt)[-1]
        theirs = float(logits[answer[0]] - logits[answer[1]])
        table = grid.table
        cell = table[(table["position"] == position) & (table["layer"] == layer)]
        ours = float(cell["logit_difference"].iloc[0])
        if abs(ours - theirs) > _CLOSE * float(logits.abs().max()):
            return f"layer {layer}: the cell of position {position} is {ours:.4f}, the original gives {theirs:.4f}"
    return ""


COLUMNS: Mapping[str, Callable[[TinySubject], str]] = {
    "generate": generates,
    "drafts": drafts_lossless,
    "rollback": rollback_exact,
    "S/T/C": states_right,
    "Z": readings_right,
    "D1": batch_invariant,
    "D2": equals_oracle,
    "edits": edits_right,
    "patching": patching_right,
}
"""Columns of the table, after "loads": name -> function that returns why the family fails, "" if it does not."""


def _has(block: PlainBlock, site: str) -> bool:
    """Whether a block adds something at a site."""
    return bool({"S": True, "T": block.attended, "C": block.mlp}[site])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference relative to the largest value; infinity for NaN."""
    distance = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9))
    return distance if distance == distance else float("inf")
