"""The contract of every registered kernel, in Triton's interpreter: its reference, float64, bits in other batches."""

import inspect
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheprobe.core.registry import available
from cacheprobe.ops.dispatch import OPERATIONS
from cacheprobe_kernels.base import INTERPRETED, Case, Draws, Kernel, Plan
from cacheprobe_kernels.cached_attention import CachedAttention
from cacheprobe_kernels.checks.contract import batch_complaints, poisoned, reference_complaints
from cacheprobe_kernels.lens_topk import LensTopK
from cacheprobe_kernels.matmul import Matmul
from cacheprobe_kernels.rms_norm import RmsNorm

KERNELS = dict(available("kernels"))
CASES = [
    pytest.param(kernel, case, id=f"{name}-{case.name}-{str(case.dtype).removeprefix('torch.')}")
    for name, kernel in KERNELS.items()
    for case in kernel.cases
]


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_a_kernel_is_its_reference(kernel: type[Kernel], case: Case) -> None:
    """And the definition in float64; memory that nobody wrote is NaN, and would show."""
    assert reference_complaints(kernel, case) == []


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_bits_do_not_depend_on_the_batch(kernel: type[Kernel], case: Case) -> None:
    """Rows alone, backwards, padded, cut; other stale slots; a second time."""
    assert batch_complaints(kernel, case) == []


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_what_it_is(name: str) -> None:
    kernel = KERNELS[name]
    doc = inspect.getdoc(kernel)
    assert kernel.name == name and doc and "Twin: cacheprobe.ops." in doc and kernel.because
    assert len(kernel.cases) >= 2 and len({case.name for case in kernel.cases}) == len(kernel.cases)
    shapes = [inspect.signature(call) for call in (kernel.plan, kernel.reference)]
    assert list(shapes[0].parameters) == list(shapes[1].parameters)
    arguments = kernel.inputs(kernel.full, Draws(torch.device("meta")))
    assert kernel.plan(**arguments).launches and kernel.work(arguments).num_bytes > 0


def test_the_page_names_each_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| `([\w.]+)` \|", page, re.MULTILINE))
    assert set(shown) == set(KERNELS)
    for name, place in shown.items():
        module, function = place.rsplit(".", 1)
        assert getattr(import_module(f"cacheprobe.ops.{module}"), function) is KERNELS[name].reference, name


def test_operations_are_the_kernels() -> None:
    """What can be dispatched is what is there, with the same reference."""
    assert {operation.name: operation.reference for operation in OPERATIONS} == {
        name: kernel.reference for name, kernel in KERNELS.items()
    }
    assert INTERPRETED, "tests of kernels need TRITON_INTERPRET=1 before triton is imported; tests/conftest.py sets it"


def broken(kernel: type[Kernel], spoil: Any) -> type[Kernel]:
    """The kernel with another plan: `spoil` gets the arguments and the true plan's function."""
    return type("Broken", (kernel,), {"plan": staticmethod(lambda **arguments: spoil(kernel.plan, arguments))})


def forgets_its_last_launch(plan: Any, arguments: dict[str, Any]) -> Plan:
    launches, returned = plan(**arguments)
    return Plan(launches[:-1], returned)


def shortened(plan: Any, arguments: dict[str, Any]) -> Plan:
    """The last rows, or columns, are left to whoever made the memory."""
    launches, returned = plan(**arguments)
    first = launches[-1]
    grid = (*first.grid[:-1], first.grid[-1] - 1)
    return Plan([*launches[:-1], replace(first, grid=grid)], returned)


def with_constant(**constants: Any) -> Any:
    """Another schedule, or another rule, for calls of more than one row."""

    def spoil(plan: Any, arguments: dict[str, Any]) -> Plan:
        launches, returned = plan(**arguments)
        changed = [replace(one, constants={**one.constants, **constants}) for one in launches]
        return Plan(changed if _num_rows(arguments) > 1 else launches, returned)

    return spoil


def _num_rows(arguments: dict[str, Any]) -> int:
    return next(value.shape[0] for value in arguments.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("kernel", [RmsNorm, Matmul, CachedAttention, LensTopK])
@pytest.mark.parametrize("spoil", [forgets_its_last_launch, shortened])
def test_unwritten_memory_is_caught(kernel: type[Kernel], spoil: Any) -> None:
    assert reference_complaints(broken(kernel, spoil), kernel.cases[0]) != []


@pytest.mark.parametrize(
    ("kernel", "case", "constants"),
    [
        (Matmul, 0, {"BLOCK_I": 16}),  # other steps along the sum
        (RmsNorm, 3, {"BLOCK": 32}),
    ],
)
def test_a_schedule_that_follows_the_rows_is_caught(kernel: type[Kernel], case: int, constants: dict) -> None:
    """Right to the reference's satisfaction, and yet of other bits alone than in a batch."""
    wide = replace(kernel.cases[case], dtype=torch.float32)
    spoiled = broken(kernel, with_constant(**constants))
    assert reference_complaints(spoiled, wide) == []
    assert any("the last row alone" in text for text in batch_complaints(spoiled, wide))


def test_a_split_that_follows_the_queries_is_caught() -> None:
    """One query alone would be summed in one piece, and in a window in several."""

    def spoil(plan: Any, arguments: dict[str, Any]) -> Plan:
        launches, returned = plan(**arguments)
        if arguments["q"].shape[2] > 1:
            return Plan(launches, returned)
        halves = [replace(one, constants={**one.constants, "BLOCK_S": 32}) if i == 0 else one
                  for i, one in enumerate(launches)]  # fmt: skip
        return Plan(halves, returned)

    sizes = {"b": 1, "g": 1, "groups": 1, "t": 2, "s": 40, "dk": 16, "dv": 16, "start": 33}
    case = Case("short", torch.float32, sizes)
    assert any("the last query alone" in t for t in batch_complaints(broken(CachedAttention, spoil), case))


@pytest.mark.parametrize(
    ("kernel", "arguments", "said"),
    [
        (Matmul, {"values": torch.ones(4, 2).T, "weight": torch.ones(3, 4)}, r"values must be contiguous"),
        (Matmul, {"values": torch.ones(2, 4).half(), "weight": torch.ones(3, 4)}, r"values float16, weight float32"),
    ],
)
def test_what_no_launch_takes_is_refused(kernel: type[Kernel], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernel.run(**arguments)


MISFITS = {
    "cached_attention": {
        "rows": lambda a: a["rows"].repeat(2),
        "positions": lambda a: a["positions"][:, :0],
        "q": lambda a: a["q"][:, :-1],
        "keys": lambda a: a["keys"][:-1],
        "values": lambda a: a["values"][:, :, :-1],
        "hidden": lambda a: torch.zeros(1, 1, 1, dtype=torch.bool),
    },
    "store_kv": {
        "rows": lambda a: a["rows"][:-1],
        "starts": lambda a: a["starts"].int(),
        "k": lambda a: a["k"][:, :-1],
        "keys": lambda a: a["keys"][:, :-1],
        "values": lambda a: a["values"][..., :-1].contiguous(),
    },
    "matmul": {"weight": lambda a: a["weight"][:, :-1], "bias": lambda a: a["bias"][:-1]},
    "rms_norm": {"weight": lambda a: a["weight"][:-1], "values": lambda a: a["values"].to("meta")},
    "capture_pack": {"rows": lambda a: a["rows"].repeat(2), "out": lambda a: a["out"][:, :-1]},
    "lens_topk": {
        "norm_weight": lambda a: a["norm_weight"][:-1],
        "unembedding": lambda a: a["unembedding"][:, :-1],
        "target_token_ids": lambda a: a["target_token_ids"].repeat(2),
        "bias": lambda a: a["bias"][:-1],
    },
}
"""By kernel, arguments that do not fit the others: most would let it read or write beyond a tensor."""


@pytest.mark.parametrize(("name", "changed"), [(name, one) for name, changes in MISFITS.items() for one in changes])
def test_arguments_that_do_not_fit_are_refused(name: str, changed: str) -> None:
    """Before anything is launched; a kernel without the check would end the process, or write into other memory."""
    kernel = KERNELS[name]
    arguments = kernel.inputs(kernel.cases[0], Draws(torch.device("cpu")))
    kernel.plan(**arguments)
    with pytest.raises(ValueError, match="to fit the other|needs? as many|must be|share|one device"):
        kernel.run(**{**arguments, changed: MISFITS[name][changed](arguments)})


@pytest.mark.parametrize(("name", "number"), [("rows", 3), ("rows", -1), ("positions", 24)])
def test_numbers_outside_of_the_cache_are_refused_on_the_cpu(name: str, number: int) -> None:
    """In the interpreter, where reading them costs no wait."""
    arguments = CachedAttention.inputs(CachedAttention.cases[0], Draws(torch.device("cpu")))
    arguments[name].view(-1)[0] = number
    with pytest.raises(ValueError, match=rf"{name} must lie in 0 to \d+, got"):
        CachedAttention.run(**arguments)


def test_poison_is_there_and_goes() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all() and (torch.empty(2, dtype=torch.long) == -77).all()
    assert torch.empty is not None and "filled" not in torch.empty.__name__


def test_no_rows_are_no_launch() -> None:
    """Nothing to do is no error."""
    arguments = RmsNorm.inputs(RmsNorm.cases[0], Draws(torch.device("cpu")))
    got = RmsNorm.outcome(RmsNorm.run, {**arguments, "values": arguments["values"][:0]})
    assert got["out"].shape == (0, 48)
