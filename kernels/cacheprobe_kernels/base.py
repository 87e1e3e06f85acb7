"""What a kernel file offers: its launches, its reference, and the cases at which the two are compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch import Tensor

from cacheprobe_kernels.comparing import differences, named

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET=1 when triton was first imported."""

Arguments = dict[str, Any]
Outcome = dict[str, Tensor]
"""Every tensor that a call returned or changed, by name."""


@dataclass(frozen=True)
class Launch:
    """One launch of a jitted function. The compiler's check reads its arguments too, so they are written once."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def go(self) -> None:
        if prod(self.grid):
            options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
            self.function[self.grid](**self.arguments, **self.constants, **options)


class Plan(NamedTuple):
    """The launches of one call, in their order, and what they fill."""

    launches: list[Launch]
    returned: Any
    """A tensor, or a NamedTuple of tensors, not yet written."""


@dataclass(frozen=True)
class Case:
    """Sizes at which a kernel is compared with its reference."""

    name: str
    dtype: torch.dtype
    sizes: Mapping[str, int]
    is_exact: bool = False
    """Numbers are such that every order of sums gives the same bits: nothing but equality will do."""


@dataclass(frozen=True)
class Draws:
    """Random numbers for a case; on the meta device shapes alone."""

    device: torch.device
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        where = "cpu" if self.device.type == "meta" else self.device  # the dry run has no generator of its device
        object.__setattr__(self, "generator", torch.Generator(where).manual_seed(self.seed))

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        """From low to high - 1."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = torch.randint(low, high, shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device, dtype)

    def signs(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """-1 and 1."""
        return self.integers(0, 2, *shape, dtype=dtype) * 2 - 1

    def order(self, count: int) -> Tensor:
        """The numbers below count, shuffled."""
        if self.device.type == "meta":
            return torch.empty(count, dtype=torch.long, device="meta")
        return torch.randperm(count, generator=self.generator, device=self.generator.device).to(self.device)


@dataclass(frozen=True)
class Variant:
    """The same work in another batch: parts of its outcome must be bits of the whole one's."""

    name: str
    arguments: Arguments
    expected: Callable[[Outcome], Outcome]
    """From the outcome of the unchanged call, what this one has to give."""
    picked: Callable[[Outcome], Outcome] = lambda outcome: outcome
    """What is compared of this one's outcome."""
    calls: tuple[Arguments, ...] = ()
    """Calls to make one after another on the same tensors instead; the last one's outcome counts."""


class Work(NamedTuple):
    """What a call cannot do without."""

    num_bytes: int
    """Read or written once."""
    num_flops: int
    """Of matrix products."""


class Kernel:
    """One operation: derived from in each kernel's file and registered there."""

    name: ClassVar[str]
    cases: ClassVar[tuple[Case, ...]]
    """Small: the interpreter takes a second for some thousand numbers. The first one is tried before first use."""
    full: ClassVar[Case]
    """Of a real model: what is compiled ahead of time, and what is timed."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Arguments that are changed in place."""
    because: ClassVar[str]
    """Why numbers are not the reference's to the bit."""

    @staticmethod
    def plan(**arguments: Any) -> Plan:
        """The launches of a call. Raises: ValueError for arguments that no launch takes."""
        raise NotImplementedError

    @staticmethod
    def reference(**arguments: Any) -> Any:
        """The reference in `cacheprobe.ops`."""
        raise NotImplementedError

    @staticmethod
    def exact(**arguments: Any) -> Outcome:
        """The numbers among the outcome, by their definition in float64."""
        raise NotImplementedError

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        """Arguments of a case."""
        raise NotImplementedError

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        """Calls in another batch whose bits must not change."""
        raise NotImplementedError

    @staticmethod
    def rtol(name: str, case: Case) -> float | None:
        """How near to the reference: 0 to the bit; None where near ties leave the answer open in this case."""
        return 0.0

    @staticmethod
    def work(arguments: Arguments) -> Work:
        """For the comparison with what the device can do."""
        raise NotImplementedError

    @classmethod
    def run(cls, *args: Any, **kwargs: Any) -> Any:
        """Launch it."""
        launches, returned = cls.plan(*args, **kwargs)
        for launch in launches:
            launch.go()
        return returned

    @classmethod
    def tried(cls, device: torch.device) -> list[str]:
        """Returns complaints about the first case on a device: what is relied on before first use."""
        return cls.complaints(cls.cases[0], device)

    @classmethod
    def complaints(cls, case: Case, device: torch.device, memory: Callable[[], Any] = nullcontext) -> list[str]:
        """Returns where the outcome of a case is not that of the reference, or of the definition in float64.

        memory: a context in which the kernel runs, such as one that fills new tensors.
        """
        arguments = cls.inputs(case, Draws(device))
        with memory():
            got = cls.outcome(cls.run, arguments)
        found = list(cls.differences(case, "its reference", got, cls.outcome(cls.reference, arguments)))
        exact = cls.exact(**arguments)
        found += cls.differences(case, "the definition in float64", {name: got[name] for name in exact}, exact)
        return [f"{cls.label(case)}: {text}" for text in found]

    @classmethod
    def outcome(cls, call: Callable[..., Any], *calls: Arguments) -> Outcome:
        """Returns every tensor that calls on the same tensors return or change in the end. The arguments are copied."""
        shared = {name: _copied(calls[0][name]) for name in cls.writes}
        returned = None
        for arguments in calls:
            returned = call(**{**arguments, **shared})
        return {**named(returned), **shared}

    @classmethod
    def differences(cls, case: Case, what: str, got: Outcome, wanted: Outcome) -> Iterator[str]:
        """Yields a complaint for each tensor that is not `what` within this kernel's tolerance."""
        return differences(what, got, wanted, lambda name: cls.rtol(name, case), cls.because)

    @classmethod
    def label(cls, case: Case) -> str:
        """Returns the kernel's name, the case's name and its dtype, with which a complaint begins."""
        return f"{cls.name} {case.name} {str(case.dtype).removeprefix('torch.')}"


def by_rows(arguments: Arguments, names: Sequence[str], columns: Sequence[str]) -> Iterator[Variant]:
    """A row alone, and all backwards beside others: the i-th of each named argument belongs to one row."""
    count = len(arguments[names[0]])
    indices = {
        "the last row alone": [count - 1],
        "backwards, and padded with copies": [*range(count)[::-1], 0, 0, 0],
    }
    for said, index in indices.items():
        taken = {name: arguments[name][index] for name in names}

        def expected(whole: Outcome, index: list[int] = index) -> Outcome:
            return {column: whole[column][index] for column in columns}

        yield Variant(said, {**arguments, **taken}, expected, lambda outcome: {c: outcome[c] for c in columns})


def one_by_one(arguments: Arguments, names: Sequence[str], written: Sequence[str]) -> Iterator[Variant]:
    """Rows one after another, the last first, leave the same behind: the i-th of each named argument is of one row."""
    calls = tuple(
        {**arguments, **{name: arguments[name][i : i + 1] for name in names}}
        for i in reversed(range(len(arguments[names[0]])))
    )

    def kept(outcome: Outcome) -> Outcome:
        return {name: outcome[name] for name in written}

    yield Variant("row after row, backwards", arguments, kept, kept, calls)


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, as a slice of a copy of all memory behind the tensor."""
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    return (
        tensor.as_strided((numbers,), (1,), 0)
        .clone()
        .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    )


def size_in_bytes(*tensors: Tensor | None) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


def require_dense_rows(**tensors: Tensor | None) -> None:
    """Raises: ValueError where a tensor's last axis is not contiguous."""
    for name, one in tensors.items():
        if one is not None and one.ndim and one.shape[-1] > 1 and one.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last axis, got strides {one.stride()}; call .contiguous()"
            )


def require_dense_slots(**tensors: Tensor) -> None:
    """Raises: ValueError where the slots of a cache [rows, heads, slots, d] do not follow one another in memory."""
    for name, one in tensors.items():
        if one.shape[2] > 1 and (one.stride(2) != one.shape[3] or (one.stride(3) != 1 and one.shape[3] > 1)):
            raise ValueError(f"{name} must be dense in slots and numbers, as KVCache makes them; got {one.stride()}")


def require_one_dtype(**tensors: Tensor | None) -> None:
    """Raises: ValueError where floating tensors differ in type."""
    kinds = {name: str(one.dtype).removeprefix("torch.") for name, one in tensors.items() if one is not None}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise ValueError(f"one type is needed for all, got {said}; convert them with .to(dtype)")


def require_one_device(**tensors: Tensor | None) -> None:
    """Raises: ValueError where tensors lie on several devices: a kernel would read an address of another memory."""
    places = {name: str(one.device) for name, one in tensors.items() if one is not None}
    if len(set(places.values())) > 1:
        said = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ValueError(f"one device is needed for all, got {said}; move them with .to(device)")


def require_shape(name: str, tensor: Tensor | None, *shape: int) -> None:
    """Raises: ValueError unless a tensor has this shape, which the other arguments give it. None has any."""
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} must be of {shape} to fit the other arguments, got {tuple(tensor.shape)}")


def require_integers(**tensors: Tensor) -> None:
    """Raises: ValueError for tensors that are not int64: a kernel would read other numbers."""
    for name, one in tensors.items():
        if one.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {str(one.dtype).removeprefix('torch.')}")


def require_inside(name: str, numbers: Tensor, end: int) -> None:
    """Raises: ValueError for a number below 0 or not below `end`. Checks nothing on a GPU, since that would wait for
    the device; the interpreter would read memory that is not the tensor's, and may end the process."""
    if INTERPRETED and numbers.device.type == "cpu" and numbers.numel():
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= end:
            raise ValueError(f"{name} must lie in 0 to {end - 1}, got {low} to {high}")


def next_power_of_2(number: int) -> int:
    return triton.next_power_of_2(number)
