"""Captured modules: against PyTorch hooks on a whole forward of the transformers model, for every status of a row."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf import modules
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.trace.recording import disk_writer
from tests.capture.recorded_run import failing_after
from tests.planted_drafts import planted
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

SUMS = "without a cache the sums have other shapes"
NAMES = {
    "llama": ["model.layers.*.mlp.down_proj.input", "model.layers.1.self_attn.k_proj", "model.norm", "lm_head"],
    "qwen3": ["model.layers.*.self_attn.q_norm", "model.layers.2.post_attention_layernorm", "model.embed_tokens"],
    "gpt2": ["transformer.h.*.attn.c_attn", "transformer.h.1.mlp.act", "transformer.ln_f"],
    "gemma3": ["model.layers.*.post_feedforward_layernorm", "model.layers.0.self_attn.k_norm", "model.layers.1.input"],
}
LONG: dict[str, Any] = {**SMALL, "max_new_tokens": 12, "deterministic": [0, 1]}
EXIT = cp.drafters.EarlyExit(layer=0)


def by_transformers(model: Any, name: str, text: list[int]) -> Tensor:
    """What a module computes for each token of a text, [t, ...], in one forward without a cache."""
    path, side = (name.removesuffix(end) for end in (".input", ".output")), name.rpartition(".")[2]
    module, seen = model.get_submodule(min(path, key=len)), list[Tensor]()
    if side == "input":
        handle = module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    else:
        handle = module.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.inference_mode():
        model(torch.tensor([text]), use_cache=False)
    handle.remove()
    (value,) = seen
    value = value[0] if len(value) == 1 else value
    return value if len(value) == len(text) else value.transpose(0, 1)  # Gemma's norms of keys: [h, t, d]


@cache
def run_of(family: str, temperature: float = 0.0, capture: "str | None" = "S") -> cp.Trace:
    config = cp.CaptureConfig(capture, modules=NAMES[family])
    sampling = cp.SamplingParams(temperature=temperature)
    return cp.run(loaded(family), PROMPTS[:3], **LONG, capture=config, drafter=EXIT, sampling=sampling, seed=3)


def require_equal(trace: cp.Trace, value_of: Callable[[str, list[int]], Tensor]) -> int:
    """Compares every captured row, close(1e-4); a draft's text is that of its verify pass. Returns the number of rows
    of rejected drafts."""
    num_rejected = 0
    for request in trace.requests:
        whole = [*request.prompt_token_ids, *trace.committed(request.request_id)]
        rows = trace.rows(request.request_id)
        passes = [fed for _, fed in rows[rows.phase == "verify"].groupby("step")]
        for fed in [rows[(rows.status == "committed")], *passes]:
            fed = fed.sort_values("position")
            text = [*whole[: fed.position.min()], *fed.token_id.tolist()]
            num_rejected += int((fed.status == "rolled_back").sum())
            for name in trace.store.modules:
                right = value_of(name, text)[fed.position.tolist()]
                assert close(trace.module(name, fed).float(), right, 1e-4, because=SUMS), name
    return num_rejected


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_modules_are_as_hooks_on_transformers_see_them(family: str, temperature: float) -> None:
    trace = run_of(family, temperature)
    assert require_equal(trace, lambda name, text: by_transformers(hf_model(family), name, text)) > 5
    assert len(trace.store.modules) == len(NAMES[family]) + loaded(family).n_layers - 1
    assert "plain" in trace.meta["path_reason"]


def test_the_comparison_sees_a_module_of_another_side(monkeypatch: pytest.MonkeyPatch) -> None:
    find = modules.find_tensor
    swapped = {"input": "output", "output": "input"}

    def other_side(*given: Any) -> modules.TensorPlace:
        place = find(*given)
        return place._replace(side=swapped[place.side])

    monkeypatch.setattr("cacheprobe.models.plain.sites.find_tensor", other_side)
    run_of.cache_clear()
    with pytest.raises(AssertionError):
        require_equal(run_of("llama"), lambda name, text: by_transformers(hf_model("llama"), name, text))
    run_of.cache_clear()


def rotated_queries(model: Any, layer: int, text: list[int]) -> Tensor:
    """Queries after the rotary embedding, [t, h, d]: by transformers' own function, from what its modules return."""
    attention, seen = model.model.layers[layer].self_attn, dict[str, Any]()
    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: seen.update({name: output}))
        for name, module in {
            "q": getattr(attention, "q_norm", attention.q_proj),
            "turn": model.model.rotary_emb,
        }.items()
    ]
    with torch.inference_mode():
        model(torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    queries = seen["q"].view(1, len(text), -1, attention.head_dim).transpose(1, 2)
    return apply_rotary_pos_emb(queries, queries, *seen["turn"])[0][0].transpose(0, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_queries_after_the_rotation(family: str) -> None:
    """On the plain path by the attention's name; on the bridge by TransformerLens' hook point: the same numbers."""
    plain = cp.CaptureConfig(None, modules="model.layers.*.self_attn.query", layers=(1, 2))
    trace = cp.run(loaded(family), PROMPTS[:2], **LONG, capture=plain, drafter=EXIT)
    layers = trace.store.modules

    def right(name: str, text: list[int]) -> Tensor:
        return rotated_queries(hf_model(family), layers[name], text)

    assert [*layers.values()] == [1, 2] and require_equal(trace, right) > 5
    point = cp.capture_module("blocks.1.attn.hook_rot_q")
    bridged = cp.run(loaded(family), PROMPTS[:2], **LONG, capture=point, drafter=EXIT)
    assert bridged.meta["path_reason"] == "bridge: blocks.1.attn.hook_rot_q is a hook point of TransformerLens"
    layers = bridged.store.modules
    assert require_equal(bridged, right) > 5


def test_a_request_gives_its_rows_of_a_module() -> None:
    """No site, as a text without letters, is allowed beside modules."""
    name = "model.layers.0.mlp"
    trace = cp.run(loaded(), PROMPTS[:2], **LONG, capture=cp.CaptureConfig("", modules=name), drafter=EXIT)
    for status in (None, "rolled_back"):
        of_all = trace.module(name, trace.rows(1, status))
        assert len(of_all) and trace[1].module(name, status).equal(of_all)
    with pytest.raises(ValueError, match="nothing would be kept"):
        cp.CaptureConfig("")


def test_passes_that_stop_before_a_module_have_no_rows_of_it() -> None:
    trace = run_of("llama")
    drafted = trace.rows(0)[trace.rows(0).num_layers == 1]
    assert len(drafted) and trace.module("model.layers[0].mlp.down_proj.input", drafted).isfinite().all()
    with pytest.raises(ValueError, match="the drafter stopped after layer 0, so there is no state at layer 1"):
        trace.module("model.layers.1.self_attn.k_proj", drafted)


def test_capturing_changes_nothing_and_is_verified(tmp_path: Path) -> None:
    trace = run_of("llama")
    without = cp.run(loaded(), PROMPTS[:3], **LONG, capture="S", drafter=EXIT)
    assert [trace.committed(r) for r in range(3)] == [without.committed(r) for r in range(3)]
    assert bitwise(trace.states("S", 2, 0), without.states("S", 2, 0))
    assert cp.verify(trace, progress=False).first_difference is None
    stored = cp.load_trace(trace.save(tmp_path / "run"), loaded())
    assert stored.store.modules == trace.store.modules and cp.verify(stored, progress=False).first_difference is None
    for name in trace.store.modules:
        rejected = trace.rows(0, "rolled_back")
        rejected = rejected[rejected.phase == "verify"]
        assert bitwise(stored.module(name, rejected), trace.module(name, rejected))
    assert trace.digest(0) == stored.digest(0) != without.digest(0)


def test_a_change_of_one_stored_number_is_found() -> None:
    trace = run_of("llama")
    kept = trace.store.stored("model.layers.1.self_attn.k_proj", 1)
    kept[trace.rows(0, "committed").state_index.iloc[3], 0] += 1
    found = cp.verify(trace, progress=False).first_difference
    run_of.cache_clear()
    assert found is not None and "site model.layers.1.self_attn.k_proj of layer 1 differs" in found


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_run_on_disk_that_was_stopped_goes_on(
    tmp_path: Path, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cp.CaptureConfig("S", modules=NAMES["qwen3"], dtype=dtype)
    given: Any = dict(**LONG, capture=config, drafter=EXIT)
    monkeypatch.setattr(disk_writer, "SECONDS", 0.0)
    monkeypatch.setattr(disk_writer, "_SHARE", 0.0)
    with planted(draft=0.0, verify=1e-9):
        memory = cp.run(loaded("qwen3"), PROMPTS[:3], **given)
        with failing_after(12):
            cp.run(loaded("qwen3"), PROMPTS[:3], **given, out=tmp_path / "run")
        again = cp.resume(tmp_path / "run", loaded("qwen3"), drafter=EXIT, progress=False)
    assert memory.row_table.drop(columns="step").equals(again.row_table.drop(columns="step"))  # it read prompts again
    rows = memory.rows()[memory.rows().num_layers == 3]
    for name, layer in memory.store.modules.items():
        assert again.store.modules[name] == layer
        assert bitwise(again.module(name, rows), memory.module(name, rows))


def test_a_stream_has_them_too() -> None:
    config = cp.CaptureConfig(None, modules=NAMES["qwen3"])
    given = {name: value for name, value in LONG.items() if name != "progress"}
    stream = cp.stream(loaded("qwen3"), PROMPTS[:3], **given, capture=config, drafter=EXIT)
    assert len(list(stream)) > 3
    whole = run_of("qwen3")
    name = "model.layers.1.self_attn.q_norm"
    for trace in (stream.trace(), whole):
        assert bitwise(trace.module(name, trace.rows(0, "committed")), whole.module(name, whole.rows(0, "committed")))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.1.self_attn.q_nrom", "has no module model.layers.1.self_attn.q_nrom; did you mean .*q_norm"),
        ("model.layers.7.mlp", "has layers 0 to 2, and no module model.layers.7.mlp"),
        ("model.layers", "has no module model.layers"),
        ("model.layers.1.query", "no queries are seen at model.layers.1; name an attention"),
        ("model.layers.1.mlp.output[1]", "has 1 tensors as its output, and no .1."),
        ("model.rotary_emb.input[1]", r"is \[2, 13\] in a pass of 2 x 13 tokens: it has no entry for each token"),
        ("model.nrom", "has no module model.nrom; did you mean model.norm"),
        ("blocks.1.attn.hook_rot_x", "has no hook blocks.1.attn.hook_rot_x; did you mean"),
        ("blocks.1.attn.hook_attn_scores", "numbers for a token, as many as there are tokens in the pass"),
    ],
)
def test_what_has_no_rows_is_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        cp.run(loaded("qwen3"), PROMPTS[:2], **LONG, capture=cp.CaptureConfig(None, modules=name))


def test_a_module_that_was_not_captured_is_refused_with_its_remedy() -> None:
    trace = run_of("qwen3")
    with pytest.raises(ValueError, match=r"was not captured; this run kept model.*CaptureConfig\(modules=\('lm_head"):
        trace.module("lm_head", trace.rows(0))


@pytest.mark.parametrize(
    ("path", "name", "says"),
    [
        ("bridge", "model.layers.1.mlp", "modules of transformers have hooks with path='plain' alone"),
        (
            "plain",
            "blocks.1.attn.hook_rot_q",
            "cannot run without its bridge: blocks.1.attn.hook_rot_q is",
        ),
    ],
)
def test_a_path_without_the_module_is_refused_with_its_remedy(path: str, name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        cp.run(loaded("qwen3"), PROMPTS[:2], **LONG, path=path, capture=cp.CaptureConfig(modules=name))
