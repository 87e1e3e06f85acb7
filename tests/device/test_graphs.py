"""Passes that a CUDA graph computes have the bits of the modules. Which passes are captured, and what ends that."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.fast.graphs import Graphs
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import bitwise
from tests.device.captured import CudaGraph
from tests.device.counts import Gpu
from tests.device.runs import kernels_by_references, states
from tests.feeding import texts
from tests.tiny import by_modules, hf_model

pytestmark = pytest.mark.determinism

SITES = [("pre", 0), *((site, layer) for layer in range(3) for site in "STC")]
PROMPTS = [[5 + i, 6, 7, 8 + i, 9] for i in range(4)]
DRAFTERS: dict[str, Callable[[], Any]] = {
    "fast path": cp.drafters.FastPath,
    "early exit": lambda: cp.drafters.EarlyExit(layer=1),
    "none": lambda: None,
}


@pytest.fixture
def on_kernels(gpu: Gpu) -> Iterator[Gpu]:
    """The pretend GPU, on which references compute our kernels."""
    with kernels_by_references(gpu):
        yield gpu


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often passes were captured, compared with the modules, and launched as a graph."""
    found = dict.fromkeys(("_record", "_require_equal", "_replay"), 0)

    def counted(name: str) -> Callable[..., Any]:
        own = getattr(Graphs, name)

        def run(*args: Any) -> Any:
            found[name] += 1
            return own(*args)

        return run

    for name in found:
        monkeypatch.setattr(Graphs, name, counted(name))
    return found


def loaded(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> PlainLM:
    model = cp.load_model(copy.deepcopy(hf_model(family, dtype, **settings)).to("cuda"))
    assert isinstance(model.tapes, Graphs)
    return model


def fed(model: PlainLM, count: int = 27, rows: tuple[int, ...] = (3, 0, 2)) -> list[Tensor]:
    """Logits, states, keys and values of passes of one and four tokens, at growing positions; some stop after two
    blocks. What a listener keeps is not copied."""
    held, found, kept = model.new_cache(4, 64), list[Tensor](), list[Tensor]()

    def keep(site: str, layer: int, value: Tensor) -> None:
        kept.extend((torch.tensor([ord(site[0]), layer]), value))

    with model.capturing(SITES, keep):
        for turn in range(count):
            step = turn % 9
            width, layers = (1, 4)[step % 3 == 2], 2 if step in (3, 7) else None
            places = rows[turn % 2 :] + rows[: turn % 2]
            ids = torch.stack(texts(*[width] * 3, seed=turn))
            starts = [5 * step, 2 + 5 * step, 1]
            found.append(model.forward(ids, held, places, starts, num_layers=layers))
    return [one.cpu() for one in (*found, *kept, *held.keys, *held.values)]


def require_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) and all(bitwise(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma3", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_is_that_of_the_modules(
    on_kernels: Gpu, counts: dict[str, int], family: str, dtype: torch.dtype
) -> None:
    """Shapes come again with other tokens, positions and rows. Activations that a listener keeps stay as they were."""
    model = loaded(family, dtype)
    ours = fed(model)
    assert model.tapes is not None and not model.tapes.refusal, model.tapes.refusal
    assert counts["_record"] >= 3, "a shape is its width and layers"
    assert counts["_replay"] > counts["_require_equal"] + 6
    require_same(ours, fed(by_modules(model)))
    assert not on_kernels.refused


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.float32), ("gemma2", torch.float32)]
)
def test_runs_have_the_tokens_and_states_of_the_modules(
    on_kernels: Gpu, counts: dict[str, int], family: str, dtype: torch.dtype, drafter: str, is_deterministic: bool
) -> None:
    model = loaded(family, dtype)
    settings = {"window": 4, "group": 4, "max_new_tokens": 16, "capture": "STC", "deterministic": is_deterministic}
    traces = [
        cp.run(one, PROMPTS, drafter=DRAFTERS[drafter](), progress=False, **settings)
        for one in (model, by_modules(model))
    ]
    assert family == "gemma2" or counts["_replay"] > 2 * counts["_record"], "soft caps are computed by torch"
    for number in range(len(PROMPTS)):
        assert traces[0].committed(number) == traces[1].committed(number)
        found = states(traces[0], number)
        assert found.isfinite().all() and bitwise(found, states(traces[1], number))


def test_a_module_that_reads_a_number_ends_it(on_kernels: Gpu, counts: dict[str, int]) -> None:
    """The reason is kept, the modules run, and the cache is theirs."""
    model = loaded()
    block = model.model.model.layers[1].mlp
    own = block.forward
    block.forward = lambda values: own(values) * (2 if float(values[0, 0, 0]) > 1e9 else 1)
    ours = fed(model)
    assert model.tapes is not None and "not permitted when stream is capturing" in model.tapes.refusal
    assert counts == {"_record": 1, "_require_equal": 0, "_replay": 0}
    require_same(ours, fed(by_modules(model)))


def test_a_module_that_changes_from_pass_to_pass_ends_it(on_kernels: Gpu, counts: dict[str, int]) -> None:
    """Python keeps a count that a graph does not see: the comparison in the third pass does."""
    model, calls = loaded(), list[int]()
    block = model.model.model.layers[1].mlp
    own = block.forward

    def forward(values: Tensor) -> Tensor:
        calls.append(1)
        return own(values) * (1 + (len(calls) > 3))

    block.forward = forward
    fed(model)
    assert model.tapes is not None and "gives other bits at C1" in model.tapes.refusal
    assert counts == {"_record": 1, "_require_equal": 2, "_replay": 2}


def logits_of(model: PlainLM, held: object, step: int = 0) -> Tensor:
    return model.forward(texts(1, seed=step)[0][None], held, [0], [step]).cpu()


@pytest.mark.parametrize("edit", ["in place", "another parameter"])
def test_an_edit_of_the_weights_is_seen(on_kernels: Gpu, counts: dict[str, int], edit: str) -> None:
    model = loaded("qwen2")
    held = model.new_cache(1, 16)
    before = [logits_of(model, held) for _ in range(4)][-1]
    layer = model.live.model.layers[1].self_attn.v_proj
    with torch.no_grad():
        if edit == "in place":
            layer.weight.mul_(2)
        else:
            layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)
    after = [logits_of(model, held) for _ in range(4)]
    assert not bitwise(after[0], before) and counts["_record"] == (1 if edit == "in place" else 2)
    assert all(bitwise(one, logits_of(by_modules(model), model.new_cache(1, 16))) for one in after)


def test_a_cache_that_is_gone_takes_its_graphs_along(on_kernels: Gpu, counts: dict[str, int]) -> None:
    model = loaded()
    caches, found = [model.new_cache(1, 16) for _ in range(2)], list[Tensor]()
    for number in range(10):
        found.append(logits_of(model, caches[number // 5], number % 5))
    assert counts["_record"] == 2 and repr(model.tapes) == "Graphs(2 shapes)"
    require_same(found[:5], found[5:])
    caches.pop()
    gc.collect()
    assert repr(model.tapes) == "Graphs(1 shapes)"


def test_passes_that_a_graph_cannot_hold_run_the_modules(on_kernels: Gpu, counts: dict[str, int]) -> None:
    """Chosen logits, hidden slots, wide passes; with editors and other hooks."""
    model = loaded()
    held = model.new_cache(1, 64)
    plain = [logits_of(model, held) for _ in range(4)][-1]
    done = dict(counts)
    ids = texts(20)[0][None]
    for _ in range(4):
        model.forward(ids[:, :2], held, [0], [0], logit_slots=[1])
        model.forward(ids, held, [0], [0])
        with model.editing([("C", 1)], lambda site, layer, value: value * 0):
            assert not bitwise(logits_of(model, held), plain)
        hook = model.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0)
        assert not bitwise(logits_of(model, held), plain)
        hook.remove()
    held.hidden[0, 1] = True
    logits_of(model, held, 3)
    assert counts == done
    held.hidden[0, 1] = False
    assert bitwise(logits_of(model, held), plain) and counts["_replay"] == done["_replay"] + 1


def test_a_copy_of_a_model_makes_graphs_of_its_own(on_kernels: Gpu) -> None:
    model = loaded("gpt2")
    held = model.new_cache(1, 16)
    wanted = [logits_of(model, held) for _ in range(5)][-1]
    other = copy.deepcopy(model)
    for weight in model.live.parameters():
        weight.data.zero_()
    held = other.new_cache(1, 16)
    assert bitwise([logits_of(other, held) for _ in range(5)][-1], wanted)


# -- the pretend graph


def test_a_graph_computes_when_it_is_launched(gpu: Gpu) -> None:
    a, total = torch.ones(2, 3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with gpu.in_phase("capture"), torch.cuda.graph(graph):
        twice = a * 2
        total += twice.sum(0)
        mask = torch.zeros(3, device="cuda").masked_fill_(total > 5, 1)
    assert "capture" not in gpu.launches_by_phase() and total.tolist() == [0] * 3
    assert twice.isnan().all() and mask.isnan().all()
    with gpu.in_phase("launch"):
        graph.replay()
    assert (twice.tolist(), total.tolist(), mask.tolist()) == ([[2] * 3] * 2, [4] * 3, [0] * 3)
    a.fill_(2)
    graph.replay()
    assert (twice.tolist(), total.tolist(), mask.tolist()) == ([[4] * 3] * 2, [12] * 3, [1] * 3)
    assert gpu.launches_by_phase()["launch"] == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda a: float(a[0]), lambda a: a.cpu(), lambda a: a.copy_(torch.ones(3)), lambda a: a.nonzero(),
        lambda a: torch.ones(3).to("cuda", non_blocking=True), lambda a: torch.cuda.synchronize(),
        lambda a: torch.empty(3).copy_(a, non_blocking=True),
    ],
)  # fmt: skip
def test_a_capture_refuses_what_the_host_reads_and_copies(gpu: Gpu, use: Callable[[Tensor], Any]) -> None:
    a, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    assert isinstance(graph, CudaGraph)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        a *= 2
        use(a)
    assert a.tolist() == [1] * 3 and not gpu.waits_by_phase().get("capture")
