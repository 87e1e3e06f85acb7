"""Cases of attention over the cache: random ones, their definition, and the same queries in another batch."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cacheprobe_kernels.base import Arguments, Case, Draws, Outcome, Variant


def attention_inputs(case: Case, draws: Draws) -> Arguments:
    """Windows of t queries that end at different positions of rows in another order; stale slots hold large numbers.
    Heads of keys hide slots of their own."""
    b, g, groups, t, s, dk, dv, start = (case.sizes[n] for n in ("b", "g", "groups", "t", "s", "dk", "dv", "start"))
    if start + b - 1 + t > s:
        raise ValueError(f"{case.name}: {b} windows of {t} from {start} on leave the {s} slots")
    # a KVCache, too, holds more slots than it counts
    keys, values = (draws.normal(b + 1, g, s + 3, width, dtype=case.dtype)[:, :, :s] for width in (dk, dv))
    for held in (keys, values):
        held[:, :, start + b + t :] = 30.0  # stale, finite, and larger than all that counts
    back = torch.arange(b, device=draws.device)[:, None]
    arguments = {
        "q": draws.normal(b, t, g * groups, dk, dtype=case.dtype).transpose(1, 2),
        "keys": keys,
        "values": values,
        "rows": draws.order(b + 1)[:b],
        "positions": start + back + torch.arange(t, device=draws.device),
        "scale": 1 / math.sqrt(dk),
    }
    if "window" in case.sizes:
        arguments["window"] = case.sizes["window"]
    if case.sizes.get("has_hidden"):
        arguments["hidden"] = draws.integers(0, 2, b + 1, g, s, dtype=torch.bool)
    return arguments


def exact_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float,
    hidden: Tensor | None = None, window: int | None = None,
) -> Outcome:  # fmt: skip
    """Query by query in float64, over the slots that it sees and no others."""
    b, h, t, _ = q.shape
    groups = h // keys.shape[1]
    out = torch.zeros(b, h, t, values.shape[3], dtype=torch.float64, device=q.device)
    for i in range(b):
        row = int(rows[i])
        for j in range(t):
            own = int(positions[i, j])
            first = 0 if window is None else max(0, own - window + 1)
            for head in range(h):
                gone = None if hidden is None else hidden[row, head // groups]
                seen = [s for s in range(first, own + 1) if s == own or gone is None or not gone[s]]
                k, v = (held[row, head // groups, seen].double() for held in (keys, values))
                out[i, head, j] = torch.softmax(k @ q[i, head, j].double() * scale, 0)[None] @ v
    return {"out": out}


def attention_variants(arguments: Arguments) -> Iterator[Variant]:
    """A query alone, batch rows backwards, windows cut as a loop would, other stale slots in a larger cache."""
    q, positions = arguments["q"], arguments["positions"]
    b, t = positions.shape
    last = {name: arguments[name][b - 1 :] for name in ("q", "rows", "positions")}
    alone = {**last, "q": last["q"][:, :, t - 1 :], "positions": last["positions"][:, t - 1 :]}
    yield Variant(
        "the last query alone", {**arguments, **alone}, lambda whole: {"out": whole["out"][b - 1 :, :, t - 1 :]}
    )
    turned = list(range(b))[::-1]
    backwards = {name: arguments[name][turned] for name in last}
    yield Variant("batch rows backwards", {**arguments, **backwards}, lambda whole: {"out": whole["out"][turned]})
    cut = -(-t // 3)
    for said, part in {"the first queries": slice(0, cut), "the other queries": slice(min(cut, t - 1), t)}.items():
        some = {"q": q[:, :, part], "positions": positions[:, part]}
        yield Variant(said, {**arguments, **some}, lambda whole, part=part: {"out": whole["out"][:, :, part]})
    others, end = dict(arguments), int(positions.max()) + 1
    for name in ("keys", "values"):
        held = arguments[name].clone()
        held[:, :, end:] = torch.nan
        held[[r for r in range(b + 1) if r not in arguments["rows"].tolist()]] = -1e4
        others[name] = torch.nn.functional.pad(held, (0, 0, 0, 37))
    if "hidden" in arguments:
        others["hidden"] = torch.nn.functional.pad(arguments["hidden"], (0, 37))
    yield Variant("other stale slots, more capacity", others, lambda whole: whole)
