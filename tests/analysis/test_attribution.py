"""Direct logit attribution against a forward with plain hooks, and against TransformerLens' own."""

import copy
from functools import cache

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module

import cacheprobe as cp
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.frozen_norm import FrozenNorm
from cacheprobe.models.hf.lm import HuggingFaceLM
from tests.models.test_families import ALIKE
from tests.tiny import FAMILIES, PROMPTS, SMALL, hf_model, loaded
from tests.twins.attribution_slowly import attribution_slowly, frozen_slowly

FEW = {**SMALL, "max_new_tokens": 8}
CAPTURE = cp.CaptureConfig(sites="STC", heads=("z",))
MANY = [pytest.param(f, marks=[pytest.mark.slow] if f in ALIKE else []) for f in FAMILIES]
EXACT = 1e-4
"""In float32 of logits of about 5: two forwards over the same text, whose sums are reordered."""


WRONG = cp.drafters.Scripted(lambda state: [1, 2, 3])


@cache
def drafted(family: str = "llama", dtype: torch.dtype = torch.float32) -> cp.Trace:
    return cp.run(loaded(family, dtype), PROMPTS[:2], **FEW, capture=CAPTURE, drafter=WRONG)


def by_part(table: pd.DataFrame) -> dict[tuple, float]:
    plain = table.astype(object).where(table.notna(), None)
    return {(line.site, line.layer, line.head): line.logit for line in plain.itertuples()}


@pytest.mark.parametrize("family", MANY)
def test_parts_are_those_of_a_slow_forward(family: str) -> None:
    trace, plain = drafted(family), hf_model(family)
    position, committed = 7, trace.committed(0)
    slow = attribution_slowly(plain, [*PROMPTS[0], *committed][: position + 1], committed[position + 1 - 5])
    coarse, fine = (cp.analysis.attribution(trace, 0, position, heads=heads) for heads in (False, True))
    assert set(coarse.token_id) == {committed[position + 1 - 5]} and coarse.status.eq("committed").all()
    for table in (coarse, fine):
        assert abs(table.logit.sum() - slow["sum", None, None]) < EXACT
        parts = by_part(table)
        assert abs(parts.pop(("rest", None, None))) < EXACT
        parts = {key: value for key, value in parts.items() if key[0] != "T bias"}
        assert all(abs(value - slow[key]) < EXACT for key, value in parts.items()), family
    assert len(fine) >= len(coarse) + 3 * 3 and sum(key[2] is not None for key in by_part(fine)) == 3 * 4
    assert max(abs(fine.logit)) > 100 * EXACT


@pytest.mark.parametrize(("family", "biases"), [("gpt2", {"norm bias"}), ("phi", {"norm bias", "unembed bias"})])
def test_biases_are_parts_of_their_own(family: str, biases: set[str]) -> None:
    """They are zero in a fresh model; here they are as large as all else."""
    plain, generator = hf_model(family), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.5, generator=generator)
    trace = cp.run(cp.load_model(copy.deepcopy(plain)), PROMPTS[:1], **FEW, capture=CAPTURE)
    parts = by_part(cp.analysis.attribution(trace, 0, 7, token=17))
    slow = attribution_slowly(plain, [*PROMPTS[0], *trace.committed(0)][:8], 17)
    assert {key[0] for key in parts if key[1:] == (None, None)} == {"embed", "rest"} | biases
    assert abs(sum(parts.values()) - slow["sum", None, None]) < EXACT and abs(parts["rest", None, None]) < EXACT
    assert all(
        abs(parts[key, None, None] - slow[key, None, None]) < EXACT < abs(parts[key, None, None]) for key in biases
    )
    for layer in range(3):
        by_head = sum(parts["T", layer, head] for head in range(4))
        assert abs(by_head + parts["T bias", layer, None] - slow["T", layer, None]) < EXACT
        assert abs(parts["T bias", layer, None]) > EXACT


@pytest.mark.parametrize("family", MANY)
def test_the_sum_is_the_models_own_logit(family: str) -> None:
    """Of a committed row and of a rolled-back one, for two tokens at once; a soft cap comes after the sum."""
    model, trace = loaded(family), drafted(family)
    cap = getattr(model.config, "final_logit_softcapping", None)
    rows = pd.concat(
        [trace.rows(0, "committed").tail(1), trace.rows(0, "rolled_back").query("num_layers == 3").head(1)]
    )
    assert set(rows.status) == {"committed", "rolled_back"}
    for row in rows.row:
        own = model.read_out(trace.vectors("S", 2, [int(row)]))[0]
        sums = cp.analysis.attribution(trace, 0, row=row, token=[3, 11]).groupby("token_id").logit.sum()
        for token_id, total in sums.items():
            total = cap * float(torch.tanh(torch.tensor(total / cap))) if cap else total
            assert abs(total - float(own[token_id])) < EXACT


def test_a_rolled_back_row_speaks_for_its_branch() -> None:
    """Its text is the committed one and the draft; with nothing committed behind it, its own first choice is taken."""
    trace = drafted()
    event = trace.events().query("num_rolled_back > 0 and num_accepted == 0").iloc[0]
    request = int(event.request_id)
    row = trace.rows(request, "rolled_back").query(f"step == {event.step}").iloc[0]
    text = [*PROMPTS[request], *trace.committed(request)][: event.draft_start] + list(event.draft_token_ids[:1])
    table = cp.analysis.attribution(trace, request, row=row.row)
    own = loaded().read_out(trace.vectors("S", 2, [int(row.row)]))[0]
    assert set(table.token_id) == {int(own.argmax())} and set(table.status) == {"rolled_back"}
    slow = attribution_slowly(hf_model(), text, int(own.argmax()))
    assert all(abs(v - slow[k]) < EXACT for k, v in by_part(table).items() if k[0] != "rest")
    rejected = cp.analysis.attribution(trace, request, int(event.draft_start) - 1, token=int(event.draft_token_ids[0]))
    kept = cp.analysis.attribution(trace, request, int(event.draft_start) - 1)
    assert rejected.logit.sum() < kept.logit.sum()  # the verifier's choice is the larger logit


def test_transformer_lens_says_the_same() -> None:
    """Its logit_attrs of a bridge with folded weights; of differences, since it centres the unembedding there."""
    trace, live = drafted("gpt2"), hf_model("gpt2")
    architecture = type(live).__name__
    bridge = build_bridge_from_module(live, architecture, hf_config=live.config)
    bridge.enable_compatibility_mode(disable_warnings=True)
    text = torch.tensor([[*PROMPTS[0], *trace.committed(0)][:8]])
    with torch.inference_mode():
        _, cache = bridge.run_with_cache(text)
        stack, labels = cache.decompose_resid(layer=3, return_labels=True, mode="all")
        theirs = cache.logit_attrs(stack, tokens=17, incorrect_tokens=5)[:, 0, -1]
    theirs = dict(zip(labels, theirs.tolist(), strict=True))
    ours = {token: by_part(cp.analysis.attribution(trace, 0, 7, token=token, heads=False)) for token in (17, 5)}
    apart = {key: ours[17][key] - ours[5][key] for key in ours[17]}
    for layer in range(3):
        for site, name in (("T", "attn_out"), ("C", "mlp_out")):
            assert abs(apart[site, layer, None] - theirs[f"{layer}_{name}"]) < EXACT, (site, layer)
    embed = theirs["embed"] + theirs.get("pos_embed", 0.0)
    assert abs(apart["embed", None, None] - embed) < EXACT and abs(embed) > 100 * EXACT


def test_sixteen_bits_leave_a_rest() -> None:
    trace = drafted(dtype=torch.bfloat16)
    table = cp.analysis.attribution(trace, 0, 7)
    own = loaded(dtype=torch.bfloat16).read_out(trace.states("S", 2, 0)[7][None].to(torch.bfloat16))[0]
    assert abs(table.logit.sum() - float(own[table.token_id[0]])) < 0.05  # one rounding of a logit of about 4
    assert 0 < abs(by_part(table)["rest", None, None]) < 0.1


def test_a_thinking_models_rest_is_what_it_added() -> None:
    model = cp.load_model("coinflip-thinking")
    trace = cp.run(model, [list(range(5, 17))], capture=CAPTURE, max_new_tokens=8, progress=False)
    first, later = (by_part(cp.analysis.attribution(trace, 0, position, token=9)) for position in (1, 10))
    assert abs(first["rest", None, None]) < EXACT < abs(later["rest", None, None])
    own = model.read_out(trace.states("S", model.n_layers - 1, 0)[10][None])[0]
    assert abs(sum(later.values()) - float(own[9])) < EXACT


def test_what_does_not_fall_into_parts_is_refused() -> None:
    trace = drafted()
    exited = cp.run(loaded(), PROMPTS[:1], **FEW, capture=CAPTURE, drafter=cp.drafters.EarlyExit(layer=1))
    early = exited.rows(0).query("num_layers == 2").iloc[0]
    with pytest.raises(ValueError, match="the drafter stopped after layer 1"):
        cp.analysis.attribution(exited, 0, row=early.row)
    for wrong, message in (
        (dict(position=7, row=3), "say which row: position= for the canonical one"),
        (dict(), "say which row"),
        (dict(position=99), "request 0 has no canonical row at position 99"),
        (dict(row=10**6), "request 0 has no row 1000000"),
        (dict(position=7, token=97), "give text, or token ids below 97, got"),
    ):
        with pytest.raises(ValueError, match=message):
            cp.analysis.attribution(trace, 0, **wrong)
    few = cp.run(loaded(), PROMPTS[:1], **FEW, capture="ST")
    with pytest.raises(ValueError, match="this run kept S, T of layers .* and not C; run it with capture='STC'"):
        cp.analysis.attribution(few, 0, 7)
    with pytest.raises(ValueError, match="and not 1;"):
        cp.analysis.attribution(cp.run(loaded(), PROMPTS[:1], **FEW, layers=[0, 2]), 0, 7)
    with pytest.raises(ValueError, match="site z was not captured"):
        cp.analysis.attribution(cp.run(loaded(), PROMPTS[:1], **FEW), 0, 7, heads=True)
    with pytest.raises(ValueError, match="the trace is of weights"):
        cp.analysis.attribution(trace, 0, 7, model=loaded("qwen2"))


def test_a_hidden_step_between_heads_and_stream_is_noticed() -> None:
    trace = drafted()
    states = trace.store.all_of("T", 1)
    states *= 1.01
    with pytest.raises(ModelError, match="layer 1: the heads' z through the output projection is not T"):
        cp.analysis.attribution(trace, 0, 7)
    assert abs(by_part(cp.analysis.attribution(trace, 0, 7, heads=False))["rest", None, None]) > EXACT
    states /= 1.01
    drafted.cache_clear()


def test_processed_logits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, right = drafted(), HuggingFaceLM.read_out_with_gradients
    for name in ("read_out", "read_out_with_gradients"):
        monkeypatch.setattr(HuggingFaceLM, name, lambda self, states: 2 * right(self, states))
    with pytest.raises(ModelError, match="its logits are not its final norm and unembedding"):
        cp.analysis.attribution(trace, 0, 7)


class Cubic(torch.nn.Module):
    """No norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**3


def test_frozen_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 32, generator=generator, dtype=torch.float64)
    layer_norm = torch.nn.LayerNorm(32)
    torch.nn.init.normal_(layer_norm.weight, 1.0)
    torch.nn.init.normal_(layer_norm.bias, 1.0)
    for norm in (layer_norm, loaded("gemma2").output_parts().norm, loaded("olmo2").output_parts().norm):
        held = FrozenNorm(norm, parts.sum(0))
        through, bias = frozen_slowly(norm, parts, parts.sum(0))
        assert torch.allclose(
            held(parts), through, rtol=1e-5, atol=1e-6
        )  # in float64 but for the norm's own square root
        assert torch.allclose(held.bias, bias, atol=1e-6)
        assert torch.allclose(held(parts).sum(0) + held.bias, norm(parts.sum(0).float()).double(), atol=1e-5)
    with pytest.raises(ModelError, match="Cubic is no norm that is linear at a fixed scale"):
        FrozenNorm(Cubic(), parts[0])


def test_the_figure_says_which_part_gives_most() -> None:
    table = cp.analysis.attribution(drafted(), 0, 7)
    figure = cp.plots.attribution(table)
    assert isinstance(figure, go.Figure)
    heat = next(trace for trace in figure.data if trace.type == "heatmap")
    cells = table[table["head"].notna()].set_index(["head", "layer"]).logit
    for y, head in enumerate(heat.y):
        for x, layer in enumerate(heat.x):
            assert heat.z[y][x] == pytest.approx(cells[int(str(head).split()[-1]), int(layer)])
    bars = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data if trace.type == "bar"}
    by_layer = table[table.site == "C"].set_index("layer").logit
    assert bars["C (MLP output)"] == pytest.approx({int(layer): value for layer, value in by_layer.items()})
    total = table.logit.sum()
    assert f"{total:.2f}" in figure.layout.title.text and "position 7" in figure.layout.title.text
    top = table[~table.site.isin(["rest"])].sort_values("logit").iloc[-1]
    assert top.site in figure.layout.title.text
    plain = cp.plots.attribution(cp.analysis.attribution(drafted(), 0, 7, heads=False))
    assert not [trace for trace in plain.data if trace.type == "heatmap"]


def test_the_figure_of_two_tokens_is_their_difference() -> None:
    table = cp.analysis.attribution(drafted(), 0, 7, token=[17, 5], heads=False)
    figure = cp.plots.attribution(table)
    totals = table.groupby("token_id").logit.sum()
    assert (
        f"{totals[17] - totals[5]:.2f}" in figure.layout.title.text
        and "<17> over <5>" in figure.layout.title.text.replace("&lt;", "<").replace("&gt;", ">")
    )
    with pytest.raises(ValueError, match="one token, or two to compare; the table has 3"):
        cp.plots.attribution(cp.analysis.attribution(drafted(), 0, 7, token=[1, 2, 3]))
    with pytest.raises(ValueError, match="the table is empty"):
        cp.plots.attribution(table.iloc[:0])
