"""How far two float32 sweeps of one grid are from the truth, which the same sweeps in float64 tell."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformer_lens.patching import get_act_patch_resid_pre

import cacheprobe as cp
from cacheprobe.edits.patching.cells import run_once
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.settings import keeping_float64

Text = Sequence[int]
Pair = tuple[int, int]


def our_sweep(model: PlainLM, clean: Text, corrupt: Text, answer: Pair, path: str = "auto") -> Tensor:
    """[l, t] logit differences of every cell, in float64 of the model's own logits."""
    grid = cp.patching.activation(model, clean, corrupt, site="pre", answer=answer, path=path, progress=False)
    return torch.tensor(grid.matrix("logit_difference").to_numpy())


def their_sweep(model: PlainLM, clean: Text, corrupt: Text, answer: Pair) -> Tensor:
    """The same by `transformer_lens.patching`, whose own table of what cells say is in float32: they are noted here.

    In float64 what TransformerLens and transformers round to float32 is left as it is: norms, rotations, softmaxes.
    """
    noted: list[Tensor] = []

    def difference(logits: Tensor) -> Tensor:
        noted.append(logits[0, -1, answer[0]].double() - logits[0, -1, answer[1]].double())
        return noted[-1]

    with torch.inference_mode(), keeping_float64(model.dtype):
        _, cache = model.bridge.run_with_cache(torch.tensor([clean]))
        table = get_act_patch_resid_pre(model.bridge, torch.tensor([corrupt]), cache, difference)
    found = torch.stack(noted).view(table.shape)
    if not torch.equal(found.to(table.dtype), table):
        raise RuntimeError("transformer_lens.patching does not go through its cells layer by layer any more")
    return found


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, over the largest of what is wanted, or over 1 if that is more."""
    return float((found.double() - wanted.double()).abs().max()) / max(1.0, float(wanted.abs().max()))


def precision(
    narrow: PlainLM, wide: PlainLM, clean: Text, corrupt: Text, answer: Pair, found: Mapping[str, Tensor]
) -> dict[str, float]:
    """Distances between sweeps of one grid, as `apart` has them.

    narrow, wide: the model in float32 and in float64.  found: what both said in float32, by "ours", "transformerlens".
    in_float64: of both sweeps, which share no code; what they agree on is the truth of the others.
    """
    truth, theirs = our_sweep(wide, clean, corrupt, answer), their_sweep(wide, clean, corrupt, answer)
    on_bridge = our_sweep(narrow, clean, corrupt, answer, path="bridge")
    largest = run_once(narrow, tuple(clean)).logits.abs().max()
    return {
        "in_float64": apart(truth, theirs),
        "ours_from_truth": apart(found["ours"], truth),
        "transformerlens_from_truth": apart(found["transformerlens"], truth),
        "ours_from_transformerlens": apart(found["ours"], found["transformerlens"]),
        "ours_on_the_bridge_from_truth": apart(on_bridge, truth),
        "ours_on_the_bridge_from_transformerlens": apart(on_bridge, found["transformerlens"]),
        "last_bit_of_the_largest_logit": float(step(largest)),
        "largest_logit": float(largest),
    }


def step(value: Tensor) -> Tensor:
    """What its last bit is worth."""
    return torch.nextafter(value, torch.full_like(value, torch.inf)) - value


def sanity(model: PlainLM, clean: Text, corrupt: Text, answer: Pair) -> dict[str, float]:
    """How far NLD is from 1 where everything is patched, and from 0 where nothing is: the largest over all layers.

    one_step: what the last bit of a logit is in NLD, which divides by how far apart the texts put the answers.
    """
    alike = [a == b for a, b in zip(clean, corrupt, strict=True)].index(False)
    grid = cp.patching.prefix(
        model, clean, corrupt, answer=answer, positions=[alike - 1, len(clean) - 1], progress=False
    )
    nld, position = grid.table.nld, grid.table.position
    distance = abs(grid.meta["clean_logit_difference"] - grid.meta["corrupt_logit_difference"])
    largest = run_once(model, tuple(clean)).logits[list(answer)].abs().max()
    return {
        "everything_is_off_one_by": float((nld[position == len(clean) - 1] - 1).abs().max()),
        "nothing_is_off_zero_by": float(nld[position == alike - 1].abs().max()),
        "apart": distance,
        "one_step": float(step(largest)) / distance,
    }


def farthest_apart(model: PlainLM, clean: Text, corrupt: Text) -> Pair:
    """The two tokens between whose logits the texts make the largest difference."""
    ends = (run_once(model, tuple(text)).logits for text in (clean, corrupt))
    gain = next(ends).double() - next(ends).double()
    return int(gain.argmax()), int(gain.argmin())


Sweep = Callable[[PlainLM, Text, Text, Pair], Tensor]
SWEEPS: dict[str, Sweep] = {"ours": our_sweep, "transformerlens": their_sweep}
