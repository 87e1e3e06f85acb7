"""The whole loop in Triton kernels, in the interpreter: drafts, rollback, capture and lens, beside the run by torch."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.registry import available
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops import dispatch
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.trace.recording import lens_reader
from cacheprobe.trace.trace import Trace
from cacheprobe_benchmarks.shared.tiny import Size, tiny_model

pytestmark = pytest.mark.determinism

SIZE = Size(vocab=40, hidden=16, mlp=24, layers=2, heads=4, initializer_range=0.3)
RUN = dict(window=4, group=2, capacity=32, prefill_chunk=8, max_new_tokens=5, deterministic=True, progress=False)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
MOST_ULP = 32
"""Of the largest number of a vector; reordered sums of two blocks stay below."""


def tiny(products: str, family: str = "llama", window: int | None = None) -> PlainLM:
    return cp.load_model(tiny_model(family, size=SIZE, window=window), products=products)


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[Trace, Counter[str], PlainLM]]:
    """A run in kernels, how often each kernel ran in it, and its model."""
    model, counts = tiny("kernels"), Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lens_reader, "LENS_TILE", 48)  # the interpreter takes seconds for a tile; any height will do
        for name, kernel in available("kernels").items():
            right = kernel.run
            patch.setattr(
                kernel, "run", lambda *a, _run=right, _name=name, **k: (counts.update([_name]), _run(*a, **k))[1]
            )
        trace = run(model, PROMPTS)
        yield trace, Counter(counts), model


def ulp_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two tensors [n, m] in units of the last place of each vector's largest number."""
    largest = b.abs().amax(-1, keepdim=True).clamp(min=2**-20)
    ulp = 2.0 ** (largest.log2().floor() - 23)
    return float(((a - b).abs() / ulp).max())


def run(model: PlainLM, prompts: list[list[int]], **changes: object) -> Trace:
    return cp.run(model, prompts, drafter=cp.drafters.EarlyExit(layer=0), **{**RUN, **changes})


def test_a_run_in_kernels_is_the_run_by_torch(counted: tuple[Trace, Counter[str], PlainLM]) -> None:
    """Tokens, verdicts and labels ==, states to some ulp, readings close; all six kernels did run."""
    ours, calls, _ = counted
    theirs = run(tiny("torch"), PROMPTS)
    assert {name: calls[name] > 0 for name in available("kernels")} == dict.fromkeys(available("kernels"), True)
    assert ours.tokens == theirs.tokens
    rows, expected = ours.row_table, theirs.row_table
    assert rows.equals(expected) and {"committed", "rolled_back"} <= set(rows.status)
    for site in "STC":
        for layer in range(2):
            a, b = (trace.store.all_of(site, layer) for trace in (ours, theirs))
            ran = ~b.isnan().all(-1)  # a draft leaves after layer 0
            assert torch.equal(a.isnan().any(-1), ~ran) and int(ran.sum()) > 15
            apart = ulp_apart(a[ran], b[ran])
            assert 0 < apart <= MOST_ULP, (site, layer, apart)
    mine, other = (trace.hypotheses().sort_values(["row", "layer"]) for trace in (ours, theirs))
    for name in ("row", "layer", "token_id", "rank", "committed_token_id"):
        assert mine[name].tolist() == other[name].tolist(), name
    assert abs(mine.logprob_nats.to_numpy() - other.logprob_nats.to_numpy()).max() < 1e-5
    facts = ours.fingerprint
    assert all(
        "Triton" in facts[name] and "interpreter" in facts[name] for name in ("products", "readings", "attention")
    )
    assert "Triton" not in str(theirs.fingerprint)


def of_request(trace: Trace, request_id: int) -> dict[str, object]:
    """Tokens, and the states and readings of the committed rows, by position and layer."""
    rows = trace.row_table
    mine = rows[(rows.request_id == request_id) & (rows.status == "committed")].sort_values("position")
    found: dict[str, object] = {"tokens": trace.tokens[request_id], "positions": mine.position.tolist()}
    for site in "STC":
        for layer in range(2):
            found[f"{site}{layer}"] = trace.store.all_of(site, layer)[mine.state_index.tolist()]
    read = trace.hypotheses()
    read = read[read.row.isin(mine.row)].sort_values(["position", "layer"])
    found["Z"] = torch.tensor(read[["token_id", "logprob_nats", "entropy_nats"]].to_numpy(dtype="float64"))
    return found


def test_a_request_has_the_same_bits_in_two_batches(counted: tuple[Trace, Counter[str], PlainLM]) -> None:
    """Alone, and beside another."""
    beside, _, model = counted
    a, b = of_request(run(model, [PROMPTS[1]]), 0), of_request(beside, 1)
    assert a["tokens"] == b["tokens"] and a["positions"] == b["positions"]
    for name in a.keys() - {"tokens", "positions"}:
        assert bitwise(a[name], b[name]), name
    assert len(a["Z"]) > 5 and len(a["S0"]) == len(a["positions"]) > 5


def test_torch_and_kernels_agree_on_hidden_slots() -> None:
    """In windows, in all heads and in one."""
    ids, outputs = torch.tensor([[3, 1, 4, 1, 5]]), []
    for products in ("kernels", "torch"):
        form = tiny(products, "mistral", 4)
        cache = form.new_cache(2, 16)
        form.forward(ids, cache, [1], [0])
        cache.hidden[1, 3] = True
        cache.head_masks.put(1, [(0, 1, 4)], [2, 2])
        outputs.append(form.forward(ids, cache, [1], [5])[0])
    assert ulp_apart(*outputs) <= MOST_ULP


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="kernels do not compute float64"):
        cp.load_model(tiny_model(size=SIZE, dtype=torch.float64), products="kernels")
    monkeypatch.setattr(dispatch, "uses_triton_interpreter", lambda: False)
    with pytest.raises(ModelError, match=r"Triton kernels: there is no GPU; use products=.auto"):
        tiny("kernels")
    with pytest.raises(ModelError, match="none of auto, torch, kernels"):
        tiny("cuda")


def test_gradients_flow_past_kernels() -> None:
    """Kernels have no backward: where a gradient is needed, the modules' own forwards compute."""
    metric = cp.analysis.logit_difference(3, 5)
    ours, theirs = (cp.gradients(tiny(kind), PROMPTS[:1], metric, progress=False) for kind in ("kernels", "torch"))
    assert close(ours.of_request("S", 0, 0), theirs.of_request("S", 0, 0), 1e-4, because="sums are reordered")
