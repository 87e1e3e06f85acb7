"""The models of recurrent_coin against transformers' own layers and explicit loops; training, probe and exchange on
short texts."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.mamba.modeling_mamba import MambaMixer

from cacheprobe.ops.equality import close
from cacheprobe.training.loop import LoopSettings
from cacheprobe_analyses.recurrent import recurrent_coin
from cacheprobe_analyses.recurrent.parity_models import (
    FLIP,
    HEADS,
    LEAVE,
    TAILS,
    TEST_SEED,
    SignedMambaMixer,
    Subject,
    right,
    texts,
    trained,
    untrained,
)
from cacheprobe_analyses.recurrent.state_of_coin import exchanged, probed

ROOT = Path(__file__).parents[2]
SHORT = Subject("deltanet", True, longest=24, loop=LoopSettings(250, 32, 3e-3, weight_decay=0.0))


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(seed))


def mixer(is_signed: bool) -> Any:
    live: Any = untrained(Subject("mamba", is_signed))
    return live.backbone.layers[0].mixer


@torch.inference_mode()
def test_an_unsigned_mamba_is_that_of_transformers() -> None:
    ours = mixer(False)
    assert isinstance(ours, SignedMambaMixer)
    theirs = MambaMixer(ours.config, 0)
    theirs.load_state_dict(ours.state_dict())
    x = inputs()
    assert close(ours(x), theirs(x), 1e-5, because="sums are reordered")
    held, other = (DynamicCache(config=ours.config) for _ in range(2))
    for t in (slice(0, 5), slice(5, 6), slice(6, 7)):
        assert close(ours(x[:, t], held), theirs(x[:, t], other), 1e-5, because="sums are reordered")
    states: Any = [cache.layers[0] for cache in (held, other)]
    assert close(*(one.recurrent_states[0] for one in states), 1e-5, because="sums are reordered")
    assert not close(mixer(True)(x), theirs(x), 1e-2, because="the same weights, another transition")


@torch.inference_mode()
@pytest.mark.parametrize("is_signed", [False, True])
def test_mamba_equals_a_loop(is_signed: bool) -> None:
    """Token by token, as the paper writes it: h = (2 s(x) - 1) h + dt B x."""
    one, x = mixer(is_signed), inputs()
    u, gate = one.in_proj(x).chunk(2, dim=-1)
    padded = F.pad(u, (0, 0, 3, 0))
    h, out = torch.zeros(2, one.intermediate_size, one.ssm_state_size), []
    for t in range(x.shape[1]):
        v = F.silu((padded[:, t : t + 4] * one.conv1d.weight[:, 0].T).sum(1) + one.conv1d.bias)
        dt, b, c = one.x_proj(v).split([one.time_step_rank, one.ssm_state_size, one.ssm_state_size], dim=-1)
        dt = F.softplus(one.dt_proj(dt))
        s = (-one.A_log.exp() * dt[:, :, None]).exp()
        h = (2 * s - 1 if is_signed else s) * h + (dt * v)[:, :, None] * b[:, None]
        out.append(((h * c[:, None]).sum(-1) + one.D * v) * F.silu(gate[:, t]))
    assert close(one(x), one.out_proj(torch.stack(out, 1)), 1e-5, because="sums are reordered")


@torch.inference_mode()
@pytest.mark.parametrize("is_signed", [False, True])
def test_deltanet_equals_a_loop(is_signed: bool) -> None:
    """Token by token, without a gate: S = S (I - beta k k^T) + beta v k^T, with beta below 1, or below 2."""
    live: Any = untrained(Subject("deltanet", is_signed))
    one, x, width = live.model.layers[0].linear_attn, inputs(), 16
    joined = torch.cat([one.q_proj(x), one.k_proj(x), one.v_proj(x)], dim=-1)
    padded = F.pad(joined, (0, 0, 3, 0))
    convolved = [(padded[:, t : t + 4] * one.conv1d.weight[:, 0].T).sum(1) for t in range(x.shape[1])]
    q, k, v = F.silu(torch.stack(convolved, 1)).view(2, -1, 3, 4, width).unbind(2)
    q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
    q = q / width**0.5
    beta = one.b_proj(x).sigmoid() * (2 if is_signed else 1)
    assert (float(beta.max()) > 1) == is_signed
    state, out = torch.zeros(2, 4, width, width), []
    for t in range(x.shape[1]):
        kt, vt, bt = k[:, t, :, None], v[:, t, :, :, None], beta[:, t, :, None, None]
        state = state - bt * (state @ kt.mT) @ kt + bt * vt @ kt
        out.append(state @ q[:, t, :, :, None])
    read = torch.stack(out, 1)[..., 0]
    normed = one.o_norm(read.reshape(-1, width), one.g_proj(x).reshape(-1, width)).view(2, x.shape[1], -1)
    assert close(one(x), one.o_proj(normed), 1e-4, because="chunks sum in another order")


def test_the_coin_of_a_text() -> None:
    tokens, lies = texts(50, 11, 3)
    for text, lay in zip(tokens.tolist(), lies.tolist(), strict=True):
        is_heads = True
        for token, said in zip(text, lay, strict=True):
            assert token in (LEAVE, FLIP)
            is_heads ^= token == FLIP
            assert said == (HEADS if is_heads else TAILS)
    assert not torch.equal(tokens, texts(50, 11, TEST_SEED + 3)[0])


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'rwkv'; choose transformer, deltanet, mamba"):
        Subject("rwkv")
    with pytest.raises(ValueError, match="a transformer has no state transition"):
        Subject("transformer", True)
    with pytest.raises(ValueError, match="unknown preset 'tiny'; choose full or small"):
        recurrent_coin.Config(preset="tiny")


@pytest.mark.slow
def test_a_trained_state_holds_the_coin_and_an_untrained_one_does_not() -> None:
    live, seconds = trained(SHORT)
    bare = untrained(SHORT)
    assert seconds > 0 and right(live, 16, 24, 0).float().mean() > 0.95 > right(bare, 16, 24, 0).float().mean()
    moved = exchanged(live, 6, before=8, behind=2, seed=0)
    assert moved["right"] > 0.9 and moved["moved"] > 0.9 and moved["moved_alike"] < 0.1
    assert exchanged(bare, 6, before=8, behind=2, seed=0)["moved"] < 0.9
    lines = probed(live, bare, 8, list(range(4, 28)), 0)
    assert [line["ago"] for line in lines] == [0, 1, 2, 3]
    best = max(line["accuracy"] for line in lines)
    assert best > max(max(line[control] for line in lines) for control in ("untrained", "shuffled"))


def test_the_table_takes_the_best_seed_and_every_control() -> None:
    def line(name: str, seed: int, longer: float) -> dict[str, Any]:
        controls = dict(low=0.5, high=0.9, untrained=0.51, last_tokens=0.52, shuffled=0.53)
        probe = [dict(ago=float(ago), accuracy=0.6 + ago / 10, **controls) for ago in range(4)]
        exchange = dict(right=0.98, moved=0.97, moved_alike=0.01)
        is_read = name != "transformer" and seed == 0
        return dict(
            model=name, seed=seed, steps=1, trained=0.99, longer=longer, last=0.0, cpu_seconds=7.0,
            probe=probe if is_read else None, exchange=exchange if is_read else None,
        )  # fmt: skip

    models = [line(name, seed, seed / 2) for name in recurrent_coin.PUBLISHED for seed in range(3)]
    table = recurrent_coin.Result(json.loads(json.dumps(asdict(recurrent_coin.Result(models))))["models"]).table()
    assert "| deltanet [-1, 1] | 0.990 | 1.000 | 0.000, 0.500, 1.000 | 1.000 |" in table
    assert "| mamba [0, 1] | 0.600 | 0.900 (k = 3) | 0.500 to 0.900 | 0.510 | 0.520 | 0.530 |" in table
    assert "| mamba [-1, 1] | 0.980 | 0.970 | 0.010 |" in table and "7 s of one core" in table


def test_the_small_form_trains_one_seed_of_each() -> None:
    config = recurrent_coin.Config(preset="small")
    assert [one.name for one in recurrent_coin.subjects(config)] == list(recurrent_coin.PUBLISHED)
    assert len(recurrent_coin.subjects(replace(config, preset="full"))) == 15


def test_the_page_shows_the_stored_result() -> None:
    stored = json.loads((ROOT / "analyses/results/recurrent-coin.json").read_text(encoding="utf-8"))
    table = recurrent_coin.Result(**stored).table()
    assert (ROOT / "docs/recurrent-coin.txt").read_text(encoding="utf-8") == table + "\n"
    seeds = [one["seed"] for one in stored["models"] if one["model"] == "mamba [-1, 1]"]
    assert seeds == list(range(recurrent_coin.Config().seeds))
    # what the page says of the exchange, of the probe and of negative eigenvalues
    for one in stored["models"]:
        assert all(line["low"] < 0.5 for line in one["probe"] or ()), one
        is_signed = "-1" in one["model"]
        assert (one["trained"] > 0.95) == is_signed, one
        if is_signed and one["exchange"] is not None:
            assert one["exchange"]["moved"] > 0.95 and one["exchange"]["moved_alike"] < 0.05
