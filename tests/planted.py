"""Faults of libraries, planted below cacheprobe: an operation that is right to rounding, and not the same everywhere.

They stand for processors that nobody here has. A fault changes chosen numbers of one operation to their next larger
neighbour, by what a library may let them depend on: the row, the slot, the address, the threads or the other rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import cacheprobe as cp
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import EngineError
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.ops import attention as request_attention
from cacheprobe.ops.attention import _attend_by_scores
from cacheprobe.ops.compiled.attention import decode_attention
from cacheprobe.ops.equality import bits
from tests.invariants.runs import outcome

_ALIGNMENT = 64
_FIRST_FAR = 16
"""The position from which a fault of positions acts."""


class Tokens(NamedTuple):
    """Where the numbers of one call belong; [b, t] each."""

    row: Tensor
    """Of the call's own input: its batch index in attention, its row of numbers elsewhere."""
    num_rows: int
    batch_row: Tensor
    slot: Tensor
    width: int
    """Slots of the window, or of the chunk of a prompt."""
    position: Tensor
    """-1 where the call does not belong to positions, as in the reading of states."""
    address: Tensor
    """Of each row's first number, modulo 64 bytes."""
    bit: Tensor
    """Of each batch index [b]: one bit of its first number."""


Condition = Callable[[Tokens], Tensor]
"""Which tokens of a call are changed, [b, t]."""


def in_second_half(at: Tokens) -> Tensor:
    return at.row >= (at.num_rows + 1) // 2


def in_row(number: int) -> Condition:
    """One batch index alone."""
    return lambda at: at.batch_row == number


def in_last_slot(at: Tokens) -> Tensor:
    return (at.slot == at.width - 1) & (at.width > 1)


def in_odd_slots(at: Tokens) -> Tensor:
    return at.slot % 2 == 1


def far_in_second_half(at: Tokens) -> Tensor:
    return in_second_half(at) & (at.position >= _FIRST_FAR)


def far(at: Tokens) -> Tensor:
    """A function of the position alone, which the request decides: no fault."""
    return at.position >= _FIRST_FAR


def on_second_thread(at: Tokens) -> Tensor:
    return in_second_half(at) & (torch.get_num_threads() > 1)


def with_several_threads(at: Tokens) -> Tensor:
    """The same for all tokens: no fault while the number of threads stays."""
    return (at.row >= 0) & (torch.get_num_threads() > 1)


def at_odd_address(at: Tokens) -> Tensor:
    return at.address != 0


def beside_others(at: Tokens) -> Tensor:
    """By all other rows, in whatever order they stand."""
    others = at.bit.sum() - at.bit.long()
    return (others % 2 == 1)[:, None] & (at.row >= 0) & (len(at.bit) > 1)


def before_another(at: Tokens) -> Tensor:
    """By the next row."""
    return at.bit.roll(-1)[:, None] & (at.row >= 0) & (len(at.bit) > 1)


def as_seen_on_amd(at: Tokens) -> Tensor:
    """Attention of torch 2.13 on an AMD EPYC: an odd window, two threads, second half of the batch, from 5 on."""
    is_such = at.width % 2 == 1 and torch.get_num_threads() == 2
    return in_second_half(at) & (at.position >= 5) & is_such


def in_some_narrow_passes(at: Tokens) -> Tensor:
    """As seen in float16, in attention with softcapped scores: the width of the pass decides a few tokens' bits. The
    trial of a shape has no text at these positions."""
    return (at.width < 4) & (at.position % 32 == 17)


DEPENDS_ON: dict[str, Condition] = {
    "row": in_second_half,
    "slot": in_last_slot,
    "odd slots": in_odd_slots,
    "position": far_in_second_half,
    "threads": on_second_thread,
    "address": at_odd_address,
    "neighbours": beside_others,
    "next neighbour": before_another,
}

_NORMS = {torch.Tensor.rsqrt_, torch.Tensor.rsqrt, torch.rsqrt, functional.layer_norm, functional.rms_norm}
_ACTIVATIONS = {functional.silu, functional.gelu, torch.tanh}


def _is_attention_of_torch(func: Any, args: Any) -> bool:
    """Fused, or the softmax of one that is written out."""
    return func is functional.scaled_dot_product_attention or (func is functional.softmax and args[0].dim() == 4)


def _is_attention(func: Any, args: Any) -> bool:
    """Torch's, or cacheprobe's compiled one."""
    return func is decode_attention or _is_attention_of_torch(func, args)


def _is_attention_by_scores(func: Any, args: Any) -> bool:
    """Written out, with softcapped scores or sinks."""
    return func is _attend_by_scores


def _is_down_product(func: Any, args: Any) -> bool:
    """The MLP's second product, which makes vectors shorter: to less than half in GPT-2, whose other products do not.
    Elsewhere keys and values of few heads are half as long or less."""
    if func is functional.linear:
        outputs, inputs = args[1].shape
        is_conv = args[1].stride(0) < args[1].stride(1)
        return outputs < inputs and (is_conv or inputs < 2 * outputs)
    return func is torch.addmm and args[2].shape[0] > args[2].shape[1]


def _is_unembedding(func: Any, args: Any) -> bool:
    return func is functional.linear and args[1].shape[0] > 2 * args[1].shape[1] + 32


OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "attention": _is_attention,
    "attention of torch": _is_attention_of_torch,
    "attention by scores": _is_attention_by_scores,
    "product": _is_down_product,
    "unembedding": _is_unembedding,
    "norm": lambda func, args: func in _NORMS,
    "activation": lambda func, args: func in _ACTIVATIONS,
}


class Planted(TorchFunctionMode):
    """Inside the `with`, an operation of torch has a fault, under whatever name it was imported."""

    def __init__(self, operation: str, condition: Condition, share: int = 1) -> None:
        """share: every such element of a token's numbers is changed."""
        super().__init__()
        self.is_faulty, self.condition, self.share = OPERATIONS[operation], condition, share
        self.num_calls = self.num_changed = 0
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._patches = (
            patch.object(StagedCache, "__init__", self._staging(StagedCache.__init__)),
            patch.object(request_attention, "decode_attention", self._decode),
            patch.object(request_attention, "_attend_by_scores", self._by_scores),
        )

    def _staging(self, stage: Callable[..., None]) -> Callable[..., None]:
        """Where each row of the next pass stands: of products and norms, their input does not say."""

        def note(staged: StagedCache, *given: Any) -> None:
            stage(staged, *given)
            self._positions = staged.positions

        return note

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *where: Any) -> Tensor:
        return self.__torch_function__(decode_attention, (), (q, keys, values, mask, *where), {"attn_mask": mask})

    def _by_scores(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self.__torch_function__(_attend_by_scores, (), tensors, options)

    def __enter__(self) -> "Planted":
        for replaced in self._patches:
            replaced.start()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for replaced in self._patches:
            replaced.stop()
        super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.pop("attn_mask") if func is decode_attention else kwargs.get("attn_mask")
        if not self.is_faulty(func, args):
            return func(*args, **kwargs)
        given = args[1] if func is torch.addmm else args[0]
        if given.dim() == 0 or not given.is_floating_point():
            return func(*args, **kwargs)
        self.num_calls += 1
        if self.is_faulty in (_is_attention, _is_attention_of_torch, _is_attention_by_scores):
            at, shape = self._attended(given, mask)
        else:
            at, shape = self._computed(given)
        chosen = self.condition(at)
        out = func(*args, **kwargs)
        if bool(chosen.any()):
            self.num_changed += 1
            elements = torch.arange(out.shape[-1]) % self.share == 0
            larger = out.nextafter(torch.full_like(out, torch.inf))
            out.copy_(torch.where(chosen.view(shape) & elements, larger, out))
        return out

    def _attended(self, q: Tensor, mask: Tensor | None) -> tuple[Tokens, tuple[int, ...]]:
        """Tokens of queries, or of scores, [b, h, t, ...]. Positions are the numbers of slots that are attended."""
        batch, _, count, _ = q.shape
        visible = q > torch.finfo(q.dtype).min / 2 if mask is None else mask == 0
        position = visible.sum(-1)[:, 0].expand(batch, count) - 1
        first = q[:, 0]
        width = self._positions.shape[1]
        row = torch.arange(batch)[:, None].expand(batch, count)
        slot = (torch.arange(count) % width).expand(batch, count)  # heads of a group stand behind each other
        at = Tokens(row, batch, row, slot, width, position, _addresses(first), _bit(q.reshape(batch, -1)[:, 0]))
        return at, (batch, 1, count, 1)

    def _computed(self, values: Tensor) -> tuple[Tokens, tuple[int, ...]]:
        """Tokens of [b, t, ...], [b, h, t, d] or [b * t, m]; what belongs to no pass has no positions."""
        batch, count = self._positions.shape
        shape: tuple[int, ...] = (batch, count, *[1] * (values.dim() - 2))
        position = self._positions
        if values.shape[:2] == (batch, count):
            tokens = values
        elif values.dim() == 4 and (values.shape[0], values.shape[2]) == (batch, count):
            tokens, shape = values.transpose(1, 2), (batch, 1, count, 1)
        elif values.dim() == 2 and len(values) == batch * count:
            tokens, shape = values.unflatten(0, (batch, count)), (batch * count, 1)
        else:
            tokens = values if values.dim() > 2 else values[None]
            batch, count = tokens.shape[:2]
            shape = (*values.shape[:-1][-2:], *[1] * (values.dim() - 2)) if values.dim() > 2 else (count, 1)
            position = torch.full((batch, count), -1)
        row = torch.arange(batch * count).view(batch, count)
        first = tokens.reshape(batch, count, -1)[:, :1, 0]
        at = Tokens(
            row,
            batch * count,
            torch.arange(batch)[:, None].expand(batch, count),
            torch.arange(count).expand(batch, count),
            count,
            position,
            _addresses(tokens.flatten(2) if tokens.dim() == 3 else tokens.select(2, 0)),
            _bit(first[:, 0]),
        )
        return at, shape


def _addresses(tokens: Tensor) -> Tensor:
    """Modulo 64 bytes, of the first number of each token of [b, t, ...]."""
    batch, count = tokens.shape[:2]
    places = torch.arange(batch)[:, None] * tokens.stride(0) + torch.arange(count) * tokens.stride(1)
    return (tokens.data_ptr() + places * tokens.element_size()) % _ALIGNMENT


def _bit(numbers: Tensor) -> Tensor:
    return bits(numbers) // 4 % 2 == 1


@dataclass(frozen=True)
class Verdict:
    """How a run under a fault ended: "right", "refused", "stopped" by the check while it runs, or "different"."""

    kind: str
    said: str = ""


def ends(model: Any, fault: Planted, prompts: Any, alone: Iterable[int] = (), **settings: Any) -> Verdict:
    """Run all prompts as deterministic requests under the fault, and compare what was not refused or stopped.

    With `cp.reference` all of them, with the request run alone those of `alone`; both under the same fault, and
    without the check while it runs, which may stop them too.
    """
    settings = {"deterministic": True, "progress": False, **settings}
    run_pass, num_passes = ModelRunner.run, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return run_pass(*args, **kwargs)

    try:
        with fault, patch.object(ModelRunner, "run", counted):
            trace = cp.run(model, prompts, **settings)
    except ValueError as error:
        assert not num_passes, f"refused after {num_passes} passes: {error}"
        return Verdict("refused", str(error))
    except EngineError as error:
        return Verdict("stopped", str(error))
    errors = trace.meta["errors"] | {key.split()[-1]: why for key, why in trace.missing.items()}
    with fault, patch.object(RecomputeChecker, "_add_duplicate", lambda *_: None):
        oracle = cp.reference(model, prompts, **settings)
        by_itself = {i % len(prompts): cp.run(model, [prompts[i]], **settings) for i in alone}
    for i in range(len(prompts)):
        if str(i) in errors:
            continue
        ours = outcome(trace, i)
        if ours != outcome(oracle, i):
            return Verdict("different", f"request {i} from the oracle in {_differing(ours, outcome(oracle, i))}")
        if i in by_itself and ours != outcome(by_itself[i]):
            return Verdict("different", f"request {i} from itself in {_differing(ours, outcome(by_itself[i]))}")
    return Verdict("stopped", next(iter(errors.values()))) if errors else Verdict("right")


def _differing(ours: Any, theirs: Any) -> str:
    return ", ".join(n for n, a, b in zip(ours._fields, ours, theirs, strict=True) if a != b)
