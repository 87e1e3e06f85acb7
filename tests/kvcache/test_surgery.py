"""Cache surgery against the same cut made in Hugging Face's own cache, and against the oracle."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.surgery import KVSnapshot, diff_rows, put_snapshot, take_snapshot
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.equality import bitwise, close
from tests.field.tiny_family import tiny_family
from tests.tiny import SMALL, hf_model, loaded

SUMS = "without our cache the sums have other shapes"
PROMPT, OTHER = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 6]
ROWS = dict(capacity=96)
LIGHT = {**SMALL, "max_new_tokens": 8, "capture": "S"}


def went_on(rows: KVSnapshot, prompt: list[int] = PROMPT, **settings) -> cp.Trace:
    return cp.run(loaded(), [cp.Request(prompt, cached=rows, own_fingerprint=True)], **{**LIGHT, **settings})


@pytest.mark.parametrize("drafter", [None, cp.drafters.EarlyExit(layer=0)])
def test_an_edit_equals_the_same_edit_of_hugging_faces_cache(drafter) -> None:
    rows = cp.kv_snapshot(loaded(), PROMPT, **ROWS)
    rows = rows.edited(lambda old: old * -2, [1, 3], layers=1, heads=0, parts="V")
    rows = rows.edited(torch.zeros_like, 4, layers=[0, 2], parts="K")
    trace = went_on(rows, drafter=drafter)

    model, last = hf_model(), []
    model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0].clone()))
    with torch.inference_mode():
        cache = model(torch.tensor([PROMPT[:-1]]), use_cache=True).past_key_values
        cache.layers[1].values[0, 0, [1, 3]] *= -2
        cache.layers[0].keys[0, :, 4] = 0
        cache.layers[2].keys[0, :, 4] = 0
        last.clear()
        text = [PROMPT[-1]]
        for _ in range(8):
            logits = model(torch.tensor([text[-1:]]), past_key_values=cache, use_cache=True).logits
            text.append(int(logits[0, -1].argmax()))
    assert trace.committed(0) == text[1:]
    assert close(trace.states("S", 2, 0), torch.cat(last), 1e-5, because=SUMS)
    assert trace.committed(0) != cp.run(loaded(), [PROMPT], **LIGHT).committed(0)
    assert trace.ledger(0).provenance.tolist()[:5] == ["prefill", "edited", "prefill", "edited", "edited"]


@pytest.mark.parametrize("path", ["plain", "bridge"])
def test_a_masked_position_is_seen_by_no_later_token(path: str) -> None:
    rows = cp.kv_snapshot(loaded(), PROMPT, **ROWS).masked([1, 2])
    trace = went_on(rows, path=path)
    text, last = [*PROMPT, *trace.committed(0)[:-1]], []
    model = hf_model()
    model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0].clone()))
    hidden = torch.ones(len(text), len(text)).triu(1)
    hidden[5:, [1, 2]] = 1
    with torch.inference_mode():
        mask = hidden[None, None] * torch.finfo(torch.float32).min
        logits = model(torch.tensor([text]), attention_mask=mask, use_cache=False).logits
    assert close(trace.states("S", 2, 0), last[0][5:], 1e-5, because=SUMS)
    assert trace.committed(0) == logits[0, 5:].argmax(-1).tolist()
    assert trace.committed(0) != cp.run(loaded(), [PROMPT], **LIGHT).committed(0)


def test_all_rows_spliced_are_the_donors() -> None:
    own, donor = (cp.kv_snapshot(loaded(), prompt, **ROWS) for prompt in (PROMPT, OTHER))
    spliced = own.spliced(donor, range(5))
    assert all(bitwise(a, b) for a, b in zip(spliced.keys + spliced.values, donor.keys + donor.values, strict=True))
    assert went_on(spliced).committed(0) == went_on(donor, OTHER).committed(0) != went_on(own).committed(0)


def test_diff_finds_the_edit_and_nothing_else() -> None:
    rows = cp.kv_snapshot(loaded(), PROMPT, **ROWS)
    donor = cp.kv_snapshot(loaded(), OTHER, **ROWS)
    table = diff_rows(rows, rows.spliced(donor, [0, 3], layers=2, heads=1, parts="V"))
    assert (table.key == 0).all() and len(table) == 3 * 2 * 5
    found = table[table.value > 0]
    assert list(found[["layer", "head", "position"]].itertuples(index=False, name=None)) == [(2, 1, 0), (2, 1, 3)]
    expected = (rows.values[2][1, 3] - donor.values[2][1, 3]).norm() / rows.values[2][1, 3].norm()
    assert found.value.tolist()[1] == pytest.approx(float(expected), rel=1e-6)


def test_rows_are_values_of_their_own() -> None:
    rows = cp.kv_snapshot(loaded(), PROMPT, **ROWS)
    before = rows.digest()
    changed = rows.edited(lambda old: old.mul_(0), 1)
    assert rows.digest() == before != changed.digest() and rows.masked(1).digest() != before
    assert len(rows.cut(2)) == 2 and rows.masked([0, 3]).cut(2).hidden == {0}
    cache = KVCache(2, 8, [(2, 8, 8)] * 3, torch.float32)
    row = cache.allocate()
    put_snapshot(rows.masked(1), cache, row)
    cache.extend(row, 0, 5, "prefill")
    again = take_snapshot(cache, row, PROMPT[:5])
    assert again.hidden == {1} and all(bitwise(a, b) for a, b in zip(again.keys, rows.keys, strict=True))
    cache.release(row)
    assert not cache.hidden.any()


def nan(old: Tensor) -> Tensor:
    return old * float("nan")


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda rows: rows.edited(nan, 1), "the edit of K in layer 0 at positions .1. is NaN or infinite"),
        (
            lambda rows: rows.edited(torch.zeros_like, 5),
            "position 5 lies outside the rows.*positions 0 to 4",
        ),
        (lambda rows: rows.edited(torch.zeros_like, 1, layers=3), "layer 3 lies outside the rows.*layers 0 to 2"),
        (lambda rows: rows.edited(torch.zeros_like, 1, heads=2), "head 2 lies outside the rows.*heads 0 to 1"),
        (lambda rows: rows.edited(torch.zeros_like, []), "there is no position"),
        (lambda rows: rows.edited(torch.zeros_like, 1, parts="Q"), "unknown parts 'Q'; give K, V or KV"),
        (lambda rows: rows.edited(lambda old: old[:1], 1), r"layer 0 K: the change made \[1, 1, 8\] of \[2, 1, 8\]"),
        (lambda rows: rows.masked(-1), "position -1 lies outside"),
        (lambda rows: rows.masked(1, layers=3), "layer 3 lies outside the rows.*layers 0 to 2"),
        (lambda rows: rows.masked(1, heads=[2]), "head 2 lies outside the rows.*heads 0 to 1"),
        (lambda rows: rows.spliced(rows.cut(3), 1), "rows of 5 and 3 positions"),
        (lambda rows: diff_rows(rows, rows.cut(3)), "rows of 5 and 3 positions"),
        (
            lambda rows: diff_rows(rows, cp.kv_snapshot(loaded(dtype=torch.bfloat16), PROMPT, **ROWS)),
            r"rows of 3 layers, \[2, 5, 8\] in torch.float32 and of 3 layers.*bfloat16.*take both from one model",
        ),
        (
            lambda rows: went_on(replace(rows.masked(1), values=tuple(map(nan, rows.values))), PROMPT),
            "the rows' values of layer 0 hold NaN or infinity.*even where they are masked",
        ),
        (lambda rows: rows.cut(6), "cannot be cut to 6"),
        (lambda rows: went_on(rows, PROMPT[:5]), "must read the prompt's last token.*cached.cut.4."),
        (lambda rows: went_on(rows, OTHER), "read from another text"),
        (
            lambda rows: cp.run(loaded(), cp.Request(PROMPT, cached=rows, is_deterministic=True), **LIGHT),
            "goes on from cached rows.*own_fingerprint=True",
        ),
        (
            lambda rows: cp.run(loaded(dtype=torch.bfloat16), cp.Request(PROMPT, cached=rows), **LIGHT),
            "do not fit a model.*bfloat16",
        ),
        (lambda rows: cp.kv_snapshot(loaded(), [3], **ROWS), "a prompt of one token leaves no row"),
        (lambda rows: cp.run(loaded(), cp.Request(PROMPT, cached="rows"), **LIGHT), "must be KVSnapshot"),
    ],
)
def test_surgery_refuses(cut, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(cp.kv_snapshot(loaded(), PROMPT, **ROWS))


@pytest.mark.parametrize("family", ["gemma4_text", "nemotron_h"])
def test_layers_without_keys_are_left_out_or_refused_by_name(family: str) -> None:
    """Gemma 4 with shared keys, and a model with blocks of an MLP alone: layer 3 keeps none."""
    fields = dict(num_kv_shared_layers=2) if family == "gemma4_text" else {}
    one = PlainLM(tiny_family(family, fields), None, family)
    rows, donor = (cp.kv_snapshot(one, prompt, **ROWS) for prompt in (PROMPT, OTHER))
    keeping = [layer for layer, keys in enumerate(rows.keys) if keys.shape[0]]
    assert 3 not in keeping and keeping
    for changed, source in ((rows.edited(lambda old: old * 2, [1]), None), (rows.spliced(donor, [1]), donor)):
        for layer in keeping:
            expected = 2 * rows.keys[layer] if source is None else source.keys[layer]
            assert torch.equal(changed.keys[layer][:, 1], expected[:, 1])
    for call in (
        lambda: rows.masked([1], layers=3),
        lambda: rows.edited(lambda old: old, [1], layers=3),
        lambda: rows.spliced(donor, [1], layers=3),
    ):
        with pytest.raises(ValueError, match="layer 3 keeps no keys and values"):
            call()
