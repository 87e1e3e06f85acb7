"""The choice between compiled loops and torch: by the processor, the compiler, the system's permission and a trial."""

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cacheprobe.ops.compiled import operations as choice
from cacheprobe.ops.compiled import queue, tiles
from cacheprobe.ops.compiled.lanes import FLOATS, FORMATS, PAIRS, TILES
from cacheprobe.ops.compiled.operations import CompiledOperations, CompiledProduct, CompiledReadout, choose
from cacheprobe.ops.readout import Readout

pytestmark = pytest.mark.determinism

CPU = torch.device("cpu")


def capabilities(**named: object) -> dict[str, object]:
    return {"architecture": "x86_64", "avx2": True, "fma3": True, "cpu_name": "AMD EPYC", **named}


@pytest.mark.parametrize(
    ("machine", "by_dtype"),
    [
        (capabilities(avx512_bf16=True), {"float32": FLOATS, "bfloat16": PAIRS, "float16": FLOATS, "float64": None}),
        (capabilities(), {"float32": FLOATS, "bfloat16": FLOATS, "float16": FLOATS}),
        (capabilities(cpu_name="Intel(R) Xeon(R)", avx512_bf16=True), {"float32": None, "bfloat16": FLOATS}),
        (capabilities(cpu_name="Intel(R) Xeon(R)", avx512_bf16=True, amx_bf16=True), {"bfloat16": TILES}),
        (capabilities(amx_fp16=True), {"float16": None}),
        (capabilities(avx2=False), {"float32": None, "bfloat16": None}),
        ({"architecture": "aarch64", "cpu_name": ""}, {"float32": None, "bfloat16": None}),
    ],
)
def test_the_choice_is_the_processors(
    machine: dict[str, object], by_dtype: dict[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: machine)
    monkeypatch.setattr(choice, "FEATURES", {"+avx2", "+fma", "+avx512bf16", "+amx-bf16", "+amx-tile"})
    monkeypatch.setattr(choice, "LANES", choice.SIDE)
    monkeypatch.setattr(choice, "refusal_of_tiles", str)
    for name, kind in by_dtype.items():
        found, reason = choice._kind(getattr(torch, name), CPU)
        assert found == kind and reason
        assert choice._kind(getattr(torch, name), torch.device("meta"))[0] is None


def test_the_compilers_processor_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process for an instruction that it may not use."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities(avx512_bf16=True))
    monkeypatch.setattr(choice, "FEATURES", {"+avx2", "+fma"})
    assert choice._kind(torch.bfloat16, CPU)[0] == FLOATS
    monkeypatch.setattr(choice, "FEATURES", set())
    assert choice._kind(torch.bfloat16, CPU)[0] is None


def test_matrix_units_need_a_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction of theirs ends a process that may not use them."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities(amx_bf16=True))
    monkeypatch.setattr(choice, "FEATURES", {"+avx2", "+fma", "+amx-bf16", "+amx-tile"})
    monkeypatch.setattr(choice, "LANES", choice.SIDE)
    for refusal, kind in (("", TILES), ("Operation not permitted", FLOATS)):
        monkeypatch.setattr(choice, "refusal_of_tiles", lambda refusal=refusal: refusal)
        found, reason = choice._kind(torch.bfloat16, CPU)
        assert found == kind and reason.endswith(refusal)
    monkeypatch.setattr(choice, "refusal_of_tiles", str)
    monkeypatch.setattr(choice, "LANES", 8)
    assert choice._kind(torch.bfloat16, CPU)[0] is None  # torch uses them
    monkeypatch.setattr(tiles, "refusal_of_tiles", lambda: "Operation not permitted")
    for loops in (queue._loops, choice._loops_of_states):
        with pytest.raises(RuntimeError, match="refused this process.*Operation not permitted"):
            loops.__wrapped__(TILES, FORMATS[torch.bfloat16])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
def test_a_refusal_says_why() -> None:
    """Where Linux gives the permission, it refuses it while a thread has a small alternate signal stack."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=True)
    always = tiles.refusal_of_tiles()  # of a processor or a kernel without them
    assert done.stdout.strip() == (always or "a thread's alternate signal stack is too small")


SMALL_STACK = """
import ctypes
from cacheprobe.ops.compiled.tiles import refusal_of_tiles

class Stack(ctypes.Structure):
    _fields_ = [("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
print(refusal_of_tiles())
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loops_pass_their_trial(dtype: torch.dtype) -> None:
    assert "failed their trial" not in choose(dtype, CPU).reason


def test_the_trial_finds_wrong_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the third 16 outputs of a panel, as of a compiler's fault in the code of the third tile."""
    product = CompiledProduct.__call__

    def wrong(self: CompiledProduct, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = product(self, values, weight, bias)
        if len(weight) >= 64 * 8 * torch.get_num_threads():  # else a panel has fewer than 64 outputs
            made[:, 32:48] += 1
        return made

    assert choice._product_error(CompiledProduct(FLOATS), torch.bfloat16) is None
    monkeypatch.setattr(CompiledProduct, "__call__", wrong)
    assert "away from float64's" in str(choice._product_error(CompiledProduct(FLOATS), torch.bfloat16))


def test_without_openmp_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", capabilities)
    monkeypatch.setattr(choice, "find_thread_runner", lambda: None)
    assert choice._kind(torch.float32, CPU) == (
        None, "this torch has no GNU OpenMP library, on whose threads the loops run",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "why"),
    [
        (CompiledProduct, "__call__", "a product of 1 rows of 64 is .* away"),
        (CompiledOperations, "norm", "a norm of kind .* is .* away"),
        (CompiledReadout, "of_logits", "another entropy_nats than torch's"),
        (CompiledReadout, "of_states", "another entropy_nats than torch's"),
    ],
)
def test_wrong_loops_are_not_used(owner: type, name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may be wrong: the loops are compared with torch before they are used."""
    real = getattr(owner, name)

    def wrong(self: object, *of: object) -> object:
        made = real(self, *of)
        if isinstance(made, Readout):
            return made._replace(entropy_nats=made.entropy_nats + 1e-3)
        return made * 1.01

    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setattr(choice, "_kind", lambda *of: (FLOATS, "a test"))
    found = choose.__wrapped__(torch.bfloat16, CPU)
    assert found.operations is None
    assert re.search(f"failed their trial: {why}", found.reason), found.reason


def test_wrong_activations_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.Queue, "silu", lambda self, values: values * 2)
    monkeypatch.setattr(choice, "_kind", lambda *of: (FLOATS, "a test"))
    found = choose.__wrapped__(torch.float32, CPU)
    assert found.operations is None and "a silu is" in found.reason
