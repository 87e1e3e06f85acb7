"""Interventions under the cache: before every pass, the slots where their positions are about to be computed.

In a decode pass slot 0 is the newest token, so a hook by index would hit another position in every pass. Here each
pass says which request and which absolute position every slot holds.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cacheprobe.interventions.base import Intervention
from cacheprobe.interventions.checks import Drafting, check_model, check_request, require_hooks
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


class Slot(NamedTuple):
    """One real token of a pass."""

    request_id: int
    batch_index: int
    slot: int
    position: int
    phase: str
    """Of the token and not of the pass: prefill for a prompt's, decode for whatever is not final or never verified."""


class _Hit(NamedTuple):
    number: int
    """Of the intervention."""
    b: Tensor
    t: Tensor
    positions: list[int]


def token_phase(state: SequenceState, position: int, pass_phase: str) -> str:
    """Which phase a token belongs to: what rides along, or is rebuilt, keeps the one that it would have had."""
    if position < state.request.num_prompt_tokens:
        return "prefill"
    return pass_phase if state.is_verified else "decode"


class Editor:
    """The interventions of one run. `aim` before a forward, `edit` inside it, `rest` after it."""

    def __init__(
        self,
        interventions: Sequence[Intervention],
        model: CachedLM,
        states: Sequence[SequenceState],
        drafting: Drafting | None = None,
    ) -> None:
        """drafting: of the run; None for the oracle's.

        Raises: ValueError for an intervention that could not act as said; ModelError for a model without hooks.
        """
        require_hooks(model)
        self.interventions = tuple(interventions)
        by_id = {state.request_id: state for state in states}
        for one in self.interventions:
            if one.request_id not in by_id:
                raise ValueError(f"{one}: no request {one.request_id}; the run has 0 to {len(by_id) - 1}")
            check_model(one, model)
            check_request(one, by_id[one.request_id], drafting)
        for state in states:
            state.is_edited |= any(one.request_id == state.request_id for one in self.interventions)
        self.applied: list[set[tuple[int, int]]] = [set() for _ in self.interventions]
        """(step, position) wherever each one acted."""
        self.rewritten: dict[int, frozenset[int]] = {}
        """Layer -> slots of this pass, by number, where the residual stream is not what the blocks made of it."""
        self._written: list[set[int]] = [set() for _ in self.interventions]
        """Positions whose last visible write was changed, for a rebuild after an eviction."""
        self._aimed: dict[tuple[str, int], list[_Hit]] = {}
        self._step = -1

    @property
    def sites(self) -> list[tuple[str, int]]:
        """Hooks needed."""
        return sorted({one.place for one in self.interventions})

    def aim(self, step: int, slots: Sequence[Slot], is_hidden: bool) -> None:
        """The pass to come holds these tokens. is_hidden: it rewrites what an eviction took away."""
        self._step, self._aimed = step, {}
        rewritten: dict[int, set[int]] = {}
        for number, one in enumerate(self.interventions):
            chosen = [i for i, slot in enumerate(slots) if self._acts(number, one, slot, is_hidden)]
            if not is_hidden:
                mine = {slot.position for slot in slots if slot.request_id == one.request_id}
                self._written[number] = (self._written[number] - mine) | {slots[i].position for i in chosen}
            if not chosen:
                continue
            b, t = (torch.tensor([slots[i][k] for i in chosen]) for k in (1, 2))
            self._aimed.setdefault(one.place, []).append(_Hit(number, b, t, [slots[i].position for i in chosen]))
            if one.site == "S" or (one.site == "pre" and one.layer > 0):
                rewritten.setdefault(one.layer, set()).update(chosen)
        self.rewritten = {layer: frozenset(numbers) for layer, numbers in rewritten.items()}

    def _acts(self, number: int, one: Intervention, slot: Slot, is_hidden: bool) -> bool:
        if slot.request_id != one.request_id or (one.positions is not None and slot.position not in one.positions):
            return False
        if one.phases is not None and slot.phase not in one.phases:
            return False
        if one.steps is None:
            return True
        return slot.position in self._written[number] if is_hidden else self._step in one.steps

    def rest(self) -> None:
        """No pass of the engine is under way: forwards of others are left alone."""
        self._aimed = {}

    def edit(self, site: str, layer: int, value: Tensor) -> Tensor | None:
        """See StateEdit. Slots that no intervention names keep their bits.

        Raises: ValueError where a result is not finite in the model's dtype.
        """
        hits = self._aimed.get((site, layer))
        if not hits:
            return None
        value = value.clone()
        for hit in hits:
            one = self.interventions[hit.number]
            where = (hit.b, hit.t) if one.head is None else (hit.b, hit.t, one.head)
            new = one.vectors_at(hit.positions).to(value.device, value.dtype)
            value[where] = new.expand_as(value[where]) if one.action == "replace" else value[where] + new
            if not bool(torch.isfinite(value[where]).all()):
                raise ValueError(f"{one} makes a state of positions {hit.positions} NaN or infinite in {value.dtype}")
            self.applied[hit.number].update((self._step, position) for position in hit.positions)
        return value

    # -- what is told of it

    def unused(self) -> list[Intervention]:
        """Those that never acted, such as at positions that were not reached."""
        return [one for one, applied in zip(self.interventions, self.applied, strict=True) if not applied]

    def record(self) -> list[dict[str, Any]]:
        """For a manifest: each intervention, and the distinct positions and passes that it acted on."""
        return [
            {
                **one.record(),
                "num_positions": len({position for _, position in applied}),
                "num_writes": len(applied),
            }
            for one, applied in zip(self.interventions, self.applied, strict=True)
        ]


def digests(interventions: Iterable[Intervention]) -> dict[int, str]:
    """SHA-256 of every changed request's interventions, in their order: its own part of the fingerprint."""
    texts: dict[int, list[Any]] = {}
    for one in interventions:
        texts.setdefault(one.request_id, []).append({**one.record(), "request_id": None})
    return {r: hashlib.sha256(json.dumps(texts[r]).encode()).hexdigest() for r in sorted(texts)}


def changes_fingerprint(interventions: Sequence[Intervention], model_facts: Mapping[str, Any]) -> dict[str, str]:
    """What interventions add to the schedule fingerprint: which requests they change, and whose hooks act."""
    if not interventions:
        return {}
    named = "; ".join(f"request {r}: {digest}" for r, digest in digests(interventions).items())
    return {"interventions": named, "interventions_act_through": f"hooks of the {model_facts.get('path', 'model')}"}
