"""Patching cells of several layers in one forward, in families whose blocks read what earlier blocks made, add several
parts, or keep no memory."""

import pytest
import torch

from cacheprobe.edits.patching.pairs import activation
from cacheprobe.models.plain.lm import PlainLM
from tests.field.original import changing, logits_of, states_of
from tests.field.tiny_family import tiny_family

FIELDS: dict[str, dict[str, object]] = {"gemma4_text": dict(num_kv_shared_layers=2)}
CLEAN = [3, 10, 17, 24, 31, 38, 45, 52, 59, 66]
CORRUPT = [*CLEAN[:3], 88, *CLEAN[4:]]
POSITION = 3
_SLOW = [
    pytest.param(family, site, marks=pytest.mark.slow)
    for family in ("nemotron_h", "rwkv", "zamba", "granitemoeshared")
    for site in "STC"
]


@pytest.mark.parametrize(
    ("family", "site"),
    [("gemma4_text", "S"), ("gemma4_text", "T"), ("falcon_h1", "T"), ("falcon_h1", "C"), ("zamba2", "S"), *_SLOW],
)
def test_cells_of_several_layers_give_what_the_original_gives(family: str, site: str) -> None:
    original = tiny_family(family, FIELDS.get(family, {}))
    one = PlainLM(tiny_family(family, FIELDS.get(family, {})), None, family)
    donors = states_of(original, one.blocks, CLEAN)
    cells = activation(
        one, CLEAN, CORRUPT, site=site, layers=range(4), positions=[POSITION], answer=(1, 2), progress=False
    ).table
    for layer, block in enumerate(one.blocks):
        if site != "S" and not {"T": block.attended, "C": block.mlp}[site]:
            continue

        def put(value: torch.Tensor, layer: int = layer) -> torch.Tensor:
            changed = value.clone()
            changed[:, POSITION] = donors[site, layer][POSITION]
            return changed

        with changing(original, block, site, put):
            logits = logits_of(original, CORRUPT)[-1]
        found = float(cells[cells.layer == layer].logit_difference.iloc[0])
        # sums in float32 have another order in a batch
        assert abs(found - float(logits[1] - logits[2])) <= 1e-4 * float(logits.abs().max())
