"""Applies interventions during a run: finds, before every pass, the token slots that hold their positions.

A hook sees slots, not positions: in a decode pass, slot 0 holds another position each time. So the engine gives the
request and the absolute position of every slot before each pass.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.hook_names import RECURRENT, is_module
from cacheprobe.core.tokens import is_special, special_token_ids
from cacheprobe.core.values import text_digest
from cacheprobe.edits.interventions.base import Intervention, StateContext
from cacheprobe.edits.interventions.checks import Drafting, check_model, check_request, require_hooks
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import row_shapes


class TokenSlot(NamedTuple):
    """Holds the request, absolute position, phase and id of the token at one batch index and token slot of a pass.

    Pads have no TokenSlot.
    """

    request_id: int
    batch_index: int
    slot: int
    position: int
    phase: str
    """Phase of the token, not of the pass: prefill for a prompt token, else see `token_phase`."""
    token_id: int
    is_again: bool = False
    """The row was recorded before, and is computed again for its keys and values alone, as after a preemption."""


class _Hit(NamedTuple):
    """Holds where one intervention acts in a pass: batch indices b, token slots t, and what each state is."""

    number: int
    """Index of the intervention among those of the run."""
    b: Tensor
    t: Tensor
    contexts: list[StateContext]

    def of_slot(self, slot: int) -> "_Hit":
        """Returns the part of the hit at one token slot, with -1 for that slot: the last one of a tensor."""
        chosen = (self.t == slot).nonzero().flatten()
        last = torch.full_like(chosen, -1)
        return self._replace(b=self.b[chosen], t=last, contexts=[self.contexts[i] for i in chosen.tolist()])


def token_phase(state: SequenceState, position: int, pass_phase: str) -> str:
    """Returns the phase of a token for interventions: prefill for a prompt token, decode for a generated token of a
    never verified request, else the phase of the pass."""
    if position < state.request.num_prompt_tokens:
        return "prefill"
    return pass_phase if state.is_verified else "decode"


class Editor:
    """Applies the interventions of one run. The engine calls `aim` before each pass and `rest` after it; during the
    pass, hooks call `edit` with the states."""

    def __init__(
        self,
        interventions: Sequence[Intervention],
        model: CachedLM,
        states: Sequence[SequenceState],
        drafting: Drafting | None = None,
        is_of_head: bool = False,
    ) -> None:
        """Checks the interventions, and sets is_edited on the requests that they change.

        drafting: how the run drafts; None for the slow reference (`cp.reference`).
        is_of_head: `model` is a draft head, whose states change drafts alone.
        Raises: ValueError for an intervention that does not fit the model or its request, see `check_model` and
        `check_request`; ModelError for a model without the method `editing`.
        """
        require_hooks(model)
        self.interventions = tuple(interventions)
        self._states = {state.request_id: state for state in states}
        modules = dict.fromkeys(one.place for one in self.interventions if is_module(one.site))
        shapes = row_shapes(model, list(modules))
        for one in self.interventions:
            check_model(one, model, shapes)
            if not is_of_head:
                check_request(one, self._states[one.request], drafting)
        for state in states:
            state.is_edited |= not is_of_head and any(one.request == state.request_id for one in self.interventions)
        self._special, self._num_layers = special_token_ids(model), model.n_layers
        self.rewritten: dict[int, frozenset[int]] = {}
        """Layer -> indices, in the list given to `aim`, of the tokens whose residual stream interventions change at
        that layer. Key n_layers: indices of the tokens whose logits cannot be computed from S of the last layer,
        because an intervention changes a module there."""
        self.written: list[set[int]] = [set() for _ in self.interventions]
        """For each intervention, the positions that it changed when they were last computed. If a preempted request is
        rebuilt, an intervention with `steps` acts on these positions again."""
        self._aimed: dict[tuple[str, int], list[_Hit]] = {}
        """By (site, layer): where interventions act in the current pass."""
        self._step = -1

    @property
    def sites(self) -> list[tuple[str, int]]:
        """The (site, layer) pairs of the hooks that the interventions need, sorted."""
        return sorted({one.place for one in self.interventions})

    def aim(self, step: int, slots: Sequence[TokenSlot]) -> None:
        """Finds where the interventions act in the coming pass. Must be called before every pass of the engine. slots:
        the tokens of the pass."""
        self._step, self._aimed = step, {}
        rewritten: dict[int, set[int]] = {}
        of_request: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            of_request.setdefault(slot.request_id, []).append(i)
        for number, one in enumerate(self.interventions):
            own = of_request.get(one.request, ())
            chosen = [i for i in own if self._acts(number, one, slots[i])]
            new = {slots[i].position for i in own if not slots[i].is_again}
            self.written[number] = (self.written[number] - new) | (new & {slots[i].position for i in chosen})
            if not chosen:
                continue
            b, t = (torch.tensor([slots[i][k] for i in chosen]) for k in (1, 2))
            about = one.request, one.site, one.layer, one.head
            contexts = [StateContext(*about, slots[i].position, slots[i].phase) for i in chosen]
            self._aimed.setdefault(one.place, []).append(_Hit(number, b, t, contexts))
            if one.site == "S" or (one.site == "pre" and one.layer > 0) or is_module(one.site):
                rewritten.setdefault(one.layer, set()).update(chosen)
            if is_module(one.site) and one.layer == self._num_layers - 1:
                rewritten.setdefault(self._num_layers, set()).update(chosen)
        self.rewritten = {layer: frozenset(numbers) for layer, numbers in rewritten.items()}

    def _acts(self, number: int, one: Intervention, slot: TokenSlot) -> bool:
        """Returns True if intervention `one`, with index `number`, changes the token of this slot in this pass."""
        if one.positions is not None and slot.position not in one.positions:
            return False
        if one.phases is not None and slot.phase not in one.phases:
            return False
        if not one.include_special and is_special(slot.position, slot.token_id, self._special):
            return False
        if one.drafts is not None and self._text_up_to(slot) not in one.drafts:
            return False
        if one.steps is None:
            return True
        return slot.position in self.written[number] if slot.is_again else self._step in one.steps

    def _text_up_to(self, slot: TokenSlot) -> str:
        """Returns the digest of the text whose last token is that of the slot."""
        state = self._states[slot.request_id]
        return text_digest([*[*state.token_ids, *state.draft][: slot.position], slot.token_id])

    def rest(self) -> None:
        """Ends the current pass: until the next `aim`, `edit` changes no state."""
        self._aimed = {}

    def edit(self, site: str, layer: int, value: Tensor) -> Tensor | None:
        """Returns a changed copy of a hook's tensor; None if no intervention acts at this site and layer in this pass.

        Tokens without an intervention keep their bits. Raises: ValueError if a changed state is NaN or infinite.
        """
        hits = self._aimed.get((site, layer), [])
        if site == RECURRENT and hits:  # called after each token, whose state is the newest
            hits = [hit for whole in hits if (hit := whole.of_slot(value.shape[1] - 1)).contexts]
            value = value[:, -1:]
        if not hits:
            return None
        value = value.clone()
        for hit in hits:
            one = self.interventions[hit.number]
            index = (hit.b, hit.t) if one.head is None else (hit.b, hit.t, one.head)
            old = value[index]
            given = old if one.keeps_shape else old.flatten(1)
            value[index] = one.changed(given, hit.contexts).reshape(old.shape)
            positions = [context.position for context in hit.contexts]
            if not bool(torch.isfinite(value[index]).all()):
                raise ValueError(f"{one} makes a state of positions {positions} NaN or infinite in {value.dtype}")
        return value


def intervention_entries(
    interventions: Sequence[Intervention], model_facts: Mapping[str, object], special: Sequence[int]
) -> dict[str, str]:
    """Returns the entries that interventions add to the schedule fingerprint, all text; {} without interventions.

    interventions: the SHA-256 of each request's interventions, in their order.
    interventions_act_through: "hooks of the PATH", where PATH is the model's path, such as fast or bridge.
    special_token_ids: `special`, the ids that some interventions leave out, if any does.
    """
    if not interventions:
        return {}
    texts: dict[int, list[dict[str, object]]] = {}
    for one in interventions:
        texts.setdefault(one.request, []).append({**one.record(), "request_id": None})
    digests = {r: hashlib.sha256(json.dumps(texts[r]).encode()).hexdigest() for r in sorted(texts)}
    named = "; ".join(f"request {r}: {digest}" for r, digest in digests.items())
    path = f"hooks of the {model_facts.get('path', 'model')}"
    is_any_left_out = not all(one.include_special for one in interventions)
    left_out = {"special_token_ids": str(list(special))} if is_any_left_out else {}
    return {"interventions": named, "interventions_act_through": path, **left_out}
