"""Takes the keys and values of one request out of a cache, with recurrent states if there are any, changes or compares
them, and puts them into another cache (cache surgery).

A `KVSnapshot` is immutable: every operation returns a new one, so many requests can continue from the same snapshot.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheprobe.core.values import listed, whole_number
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.head_masks import LayerHeadPosition
from cacheprobe.kvcache.recurrent import RecurrentCache, RowStates, before, memory_of

if TYPE_CHECKING:  # loaded where a table is made
    import pandas as pd

EDITED = "edited"


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """Holds a copy of the keys and values of a text's first positions, 0 to len - 1, taken from a cache.

    Keys include their rotary rotation, if the model has one, so each position's keys are valid at that position only.
    """

    token_ids: tuple[int, ...]
    """The tokens from which the keys and values were computed."""
    keys: tuple[Tensor, ...] = field(repr=False)
    """Keys [h, s, d] of each layer; `values` likewise."""
    values: tuple[Tensor, ...] = field(repr=False)
    provenance: tuple[str, ...] = field(repr=False)
    """Provenance of each position, as in the ledger; "edited" if keys or values were changed, or the position was
    hidden."""
    hidden: frozenset[int] = frozenset()
    """Positions that no later token attends to, in all layers and heads."""
    head_masks: frozenset[LayerHeadPosition] = field(default=frozenset(), repr=False)
    """(layer, head, position) at which no later token attends."""
    states: RowStates = field(default_factory=dict, repr=False)
    """Recurrent states by layer and position, of a model that has any: those after the last position, from which the
    text goes on, and those that the cache kept of earlier ones. Edits of keys and values leave them as they are."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def digest(self) -> str:
        """Returns the SHA-256 over tokens, keys, values, hidden positions, head masks, and the recurrent states after
        the last position, as 64 hexadecimal digits."""
        text = (self.token_ids, sorted(self.hidden), *([sorted(self.head_masks)] if self.head_masks else []))
        digest = hashlib.sha256(repr(text).encode())
        for tensor in (*self.keys, *self.values, *self._last_states()):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def cut(self, length: int) -> "KVSnapshot":
        """Returns a snapshot of the first `length` positions. Raises: ValueError for a length below 1 or above the
        number of positions, and if the recurrent states after the new last position were not kept."""
        if not 1 <= (length := whole_number("length", length)) <= len(self):
            raise ValueError(f"rows of {len(self)} positions cannot be cut to {length}; give 1 to {len(self)}")
        keys, values = (tuple(tensor[:, :length] for tensor in part) for part in (self.keys, self.values))
        hidden = frozenset(p for p in self.hidden if p < length)
        head_masks = frozenset(place for place in self.head_masks if place[2] < length)
        states = before(self.states, length)
        _require_last(states, length)
        return KVSnapshot(self.token_ids[:length], keys, values, self.provenance[:length], hidden, head_masks, states)

    def _last_states(self) -> Iterator[Tensor]:
        """Yields the recurrent states after the last position, in order of layers and names."""
        for _, of_layer in sorted(self.states.items()):
            yield from (value for _, value in sorted(of_layer[len(self) - 1].items()))

    def edited(
        self,
        change: Callable[[Tensor], Tensor],
        positions: "int | Iterable[int]",
        *,
        layers: "int | Iterable[int] | None" = None,
        heads: "int | Iterable[int] | None" = None,
        parts: str = "KV",
    ) -> "KVSnapshot":
        """Returns a new snapshot in which the chosen keys and values are replaced by `change` of them: a function from
        a tensor [h, s, d], for each layer and part, to one of the same shape.

        layers, heads: None for all; heads are key heads, fewer than query heads in grouped attention.
        parts: "K", "V" or "KV".  Raises: ValueError for unknown parts, a layer, head or position that does not exist,
        an empty list of them, another shape, and for results that are not finite: a mask is added to scores and hides
        no NaN.
        """

        def changed(layer: int, part: str, old: Tensor) -> Tensor:
            """Returns the result of `change` for a copy of `old`. Raises: ValueError for a result of another shape."""
            new = change(old.clone())
            if not isinstance(new, Tensor) or new.shape != old.shape:
                made = list(new.shape) if isinstance(new, Tensor) else f"{new!r:.60}"
                raise ValueError(
                    f"layer {layer} {part}: the change made {made} of {list(old.shape)}; return as many "
                    "rows, of the same width, as were given"
                )
            return new

        return self._with(changed, positions, layers, heads, parts)

    def spliced(
        self,
        donor: "KVSnapshot",
        positions: "int | Iterable[int]",
        *,
        layers: "int | Iterable[int] | None" = None,
        heads: "int | Iterable[int] | None" = None,
        parts: str = "KV",
    ) -> "KVSnapshot":
        """Returns a new snapshot with the donor's keys and values at `positions`, and this snapshot's elsewhere. The
        token ids do not change.

        Raises: ValueError for a donor of another length, shape or dtype (another model of the same shape is not
        noticed), unknown parts, a layer, head or position that does not exist, and an empty list of them.
        """
        _require_alike(self, donor)
        where = list(_checked_numbers(positions, len(self), "position"))

        def taken(layer: int, part: str, old: Tensor) -> Tensor:
            """Returns the donor's keys or values for this layer, at the chosen heads and positions."""
            source = donor.keys if part == "K" else donor.values
            return source[layer][list(self._heads(layer, heads))][:, where]

        return self._with(taken, where, layers, heads, parts)

    def masked(
        self,
        positions: "int | Iterable[int]",
        *,
        layers: "int | Iterable[int] | None" = None,
        heads: "int | Iterable[int] | None" = None,
    ) -> "KVSnapshot":
        """Returns a new snapshot in which no later token attends to `positions`, in the chosen layers and heads.

        layers, heads: None for all; heads are key heads: hiding one hides it from all query heads that share it.
        Twin: tests.kvcache.test_masked_parts: attention patterns cut by hooks in a whole forward without a cache.
        Raises: ValueError for a layer, head or position that does not exist, and an empty list of them.
        """
        where = _checked_numbers(positions, len(self), "position")
        provenance = _provenance_after_edit(self.provenance, where)
        if layers is None and heads is None:
            return replace(self, hidden=self.hidden | set(where), provenance=provenance)
        hidden_places = {
            (layer, head, position)
            for layer in self._layers(layers)
            for head in self._heads(layer, heads)
            for position in where
        }
        return replace(self, head_masks=self.head_masks | hidden_places, provenance=provenance)

    def _layers(self, layers: "int | Iterable[int] | None") -> Iterable[int]:
        """Returns the chosen layers; by default those that keep keys and values. Raises: ValueError for a layer that
        keeps none."""
        keeping = [layer for layer, keys in enumerate(self.keys) if keys.shape[0]]
        chosen = keeping if layers is None else list(_checked_numbers(layers, len(self.keys), "layer"))
        if without := sorted(set(chosen) - set(keeping)):
            raise ValueError(f"layer {without[0]} keeps no keys and values; choose of {keeping!s:.80}")
        return chosen

    def _heads(self, layer: int, heads: "int | Iterable[int] | None") -> Iterable[int]:
        count = self.keys[layer].shape[0]
        return range(count) if heads is None else _checked_numbers(heads, count, "head")

    def _with(
        self,
        change: Callable[[int, str, Tensor], Tensor],
        positions: "int | Iterable[int]",
        layers: "int | Iterable[int] | None",
        heads: "int | Iterable[int] | None",
        parts: str,
    ) -> "KVSnapshot":
        """Returns a new snapshot with change(layer, part, old) in place of the chosen keys and values `old`."""
        if not parts or set(parts) - set("KV"):
            raise ValueError(f"unknown parts {parts!r}; give K, V or KV")
        where = _checked_numbers(positions, len(self), "position")
        new_parts = {"K": list(self.keys), "V": list(self.values)}
        for layer in self._layers(layers):
            index = torch.tensor(list(self._heads(layer, heads)))
            for part in parts:
                tensor = new_parts[part][layer].clone()
                place = (index[:, None], torch.tensor(where)[None])
                tensor[place] = change(layer, part, tensor[place]).to(tensor.dtype)
                if not bool(torch.isfinite(tensor[place]).all()):
                    raise ValueError(
                        f"the edit of {part} in layer {layer} at positions {list(where)} is NaN or infinite in "
                        f"{tensor.dtype}: attention would be poisoned even where the slot is masked; give finite "
                        "numbers, or use masked() to hide positions"
                    )
                new_parts[part][layer] = tensor
        keys, values = tuple(new_parts["K"]), tuple(new_parts["V"])
        return replace(self, keys=keys, values=values, provenance=_provenance_after_edit(self.provenance, where))


def take_snapshot(cache: KVCache, cache_row: int, token_ids: Iterable[int]) -> KVSnapshot:
    """Copies the keys and values at a cache row's first positions, which the caller must have computed from
    `token_ids`, and the recurrent states that the cache keeps there; returns a KVSnapshot.

    Raises: ValueError for no token or more than are cached, and for a cache that holds something else beside them.
    """
    token_ids = tuple(token_ids)
    require_plain(cache)
    if not 1 <= len(token_ids) <= int(cache.lengths[cache_row]):
        raise ValueError(f"cache row {cache_row} holds {int(cache.lengths[cache_row])} positions, not {len(token_ids)}")
    keys, values = (
        tuple(tensor[cache_row, :, : len(token_ids)].clone() for tensor in part) for part in (cache.keys, cache.values)
    )
    hidden = frozenset(cache.hidden[cache_row, : len(token_ids)].nonzero().flatten().tolist())
    head_masks = cache.head_masks.of(cache_row, len(token_ids))
    provenance = tuple(cache.ledger.names(cache_row, len(token_ids)))
    memory = memory_of(cache)
    states = {} if memory is None else memory.of_row(cache_row, len(token_ids))
    _require_last(states, len(token_ids))
    return KVSnapshot(token_ids, keys, values, provenance, hidden, head_masks, states)


def put_snapshot(snapshot: KVSnapshot, cache: KVCache, cache_row: int) -> None:
    """Writes a snapshot's keys, values, recurrent states, hidden positions and head masks into a cache row, from slot 0
    on; no other slot of the row stays hidden. The caller must set the row's length and ledger, and see that the cache
    has len(snapshot) slots.

    Raises: ValueError as `require_fit`: for another number of layers or heads, another width or dtype, NaN or infinity,
    and a cache that holds something beside them and recurrent states.
    """
    require_fit(snapshot, cache)
    if (memory := memory_of(cache)) is not None:
        memory.put(cache_row, snapshot.states)
    for ours, theirs in ((snapshot.keys, cache.keys), (snapshot.values, cache.values)):
        for source, target in zip(ours, theirs, strict=True):
            target[cache_row, :, : len(snapshot)] = source
    cache.hidden[cache_row] = False
    cache.hidden[cache_row, sorted(snapshot.hidden)] = True
    cache.head_masks.put(cache_row, snapshot.head_masks, [keys.shape[0] for keys in snapshot.keys])


def require_fit(snapshot: KVSnapshot, cache: KVCache) -> None:
    """Checks a snapshot against a cache; the numbers of slots are not compared. Raises: ValueError unless the cache has
    the same layers, heads, widths, dtypes and recurrent states, and every number of the snapshot is finite."""
    require_plain(cache)
    last = list(snapshot._last_states())
    for name, part in (("keys", snapshot.keys), ("values", snapshot.values), ("recurrent states", last)):
        if bad := [layer for layer, tensor in enumerate(part) if not bool(torch.isfinite(tensor).all())]:
            raise ValueError(
                f"the rows' {name} of layer {bad[0]} hold NaN or infinity, which poisons attention even where they are "
                "masked; change rows with edited(), which refuses that, or take them anew"
            )
    ours = [(tensor.dtype, tensor.shape[0], tensor.shape[2]) for tensor in (*snapshot.keys, *snapshot.values)]
    theirs = [(tensor.dtype, tensor.shape[1], tensor.shape[3]) for tensor in (*cache.keys, *cache.values)]
    if ours != theirs:
        raise ValueError(
            f"cache rows of {len(snapshot.keys)} layers, {ours[0][1]} x {ours[0][2]} in {ours[0][0]}, do not fit a "
            f"model of {len(cache.keys)} layers, {theirs[0][1]} x {theirs[0][2]} in {theirs[0][0]}; take them from "
            "this model"
        )
    memory = memory_of(cache)
    initial = {} if memory is None else memory.initial
    wanted = [value for _, of_layer in sorted(initial.items()) for _, value in sorted(of_layer.items())]
    if set(snapshot.states) != set(initial) or [(v.dtype, v.shape) for v in last] != [
        (v.dtype, v.shape) for v in wanted
    ]:
        raise ValueError(
            f"the rows hold {len(last)} recurrent states of layers {sorted(snapshot.states)}, and the model has "
            f"{len(wanted)} of layers {sorted(initial)}; take the rows from this model"
        )


def diff_rows(a: KVSnapshot, b: KVSnapshot) -> "pd.DataFrame":
    """Returns a DataFrame of the differences between two snapshots: one line for each layer, head and position.

    Columns: layer, head, position, key and value: the norm of the difference divided by the norm in `a` (0 if equal).
    Raises: ValueError for snapshots of different length, shape or dtype.
    """
    import pandas as pd

    _require_alike(a, b)
    parts = []
    for layer in range(len(a.keys)):
        distances = [_relative_distance(x[layer], y[layer]) for x, y in ((a.keys, b.keys), (a.values, b.values))]
        heads, length = distances[0].shape
        index = pd.MultiIndex.from_product([[layer], range(heads), range(length)], names=["layer", "head", "position"])
        parts.append(
            pd.DataFrame(dict(key=distances[0].flatten(), value=distances[1].flatten()), index=index).reset_index()
        )
    return pd.concat(parts, ignore_index=True)


def _relative_distance(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double().cpu(), b.double().cpu()
    return (a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-30)  # no division by the norm 0


def require_plain(cache: KVCache) -> None:
    """Checks that a cache holds keys, values and recurrent states only. Raises: ValueError for other subclasses of
    KVCache, such as the cache of a Thinking States model."""
    if type(cache) not in (KVCache, RecurrentCache):
        raise ValueError(
            f"a {type(cache).__name__} holds more than keys and values, which surgery would leave behind; use a model "
            "whose only memory is keys and values"
        )


def _require_last(states: RowStates, length: int) -> None:
    """Raises: ValueError if a layer's recurrent states after position length - 1 are not there."""
    for layer, of_layer in states.items():
        if length - 1 not in of_layer:
            least = min(of_layer, default=None)
            there = "none are" if least is None else f"those from position {least} on are"
            raise ValueError(
                f"the recurrent states of layer {layer} after position {length - 1} were not kept ({there}); take the "
                "rows from a prompt of that length"
            )


def _require_alike(a: KVSnapshot, b: KVSnapshot) -> None:
    if len(a) != len(b):
        raise ValueError(
            f"rows of {len(a)} and {len(b)} positions: the same position does not mean the same in both; cut() the "
            "longer one, or use texts of one length"
        )
    shapes = [[(tensor.shape, tensor.dtype) for tensor in (*snapshot.keys, *snapshot.values)] for snapshot in (a, b)]
    if shapes[0] != shapes[1]:
        ours, theirs = (f"{len(one) // 2} layers, {list(one[0][0])} in {one[0][1]}" for one in shapes)
        raise ValueError(
            f"rows of {ours} and of {theirs} are of different models or dtypes, and cannot be joined or compared; take "
            "both from one model"
        )


def _provenance_after_edit(provenance: tuple[str, ...], where: Iterable[int]) -> tuple[str, ...]:
    return tuple(EDITED if p in set(where) else name for p, name in enumerate(provenance))


def _checked_numbers(given: "int | Iterable[int]", count: int, noun: str) -> tuple[int, ...]:
    numbers = tuple(whole_number(f"a {noun}", x) for x in listed(given))
    if not numbers:
        raise ValueError(f"there is no {noun}, so nothing would change; give at least one")
    if bad := [x for x in numbers if not 0 <= x < count]:
        raise ValueError(f"{noun} {bad[0]} lies outside the rows, which have {noun}s 0 to {count - 1}")
    return tuple(dict.fromkeys(numbers))
