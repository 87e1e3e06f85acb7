"""The states of a generation of each family, imported: those of hooks on transformers' blocks, or refused by name.

Most families keep what enters each block, some recurrent ones what leaves it; the same numbers do not say which.
"""

import copy
from pathlib import Path

import pytest
import transformers

import cacheprobe as cp
from cacheprobe.trace.importers.common import ImportRefused
from tests.field.tiny_family import tiny_family
from tests.field.variants import VARIANTS
from tests.reported.imports.imported import Generated, blocks_of

TABLE = Path(__file__).parents[3] / "docs" / "families.txt"
RUNNING = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines()[2:] if "| - |" not in line]
DENSE = [name for name in RUNNING if name not in VARIANTS or not VARIANTS[name].quantised]
QUICK = {"llama", "bloom", "mamba"}
REFUSED = {"zamba2"}
"""transformers computes a decoded token of Zamba2 by another formula than one of a prompt, a hundredth away."""
LEAVING = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
"""Their hidden_states[k] is what leaves block k, so that the last block's is there too."""
PROMPT = [(3 + 7 * i) % 89 for i in range(11)]
ROUNDING = 1e-3
"""Of a recurrent layer, which may add up a prompt in chunks; others differ by 1e-6."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in DENSE])
def test_states_of_a_family_are_those_of_its_blocks(name: str) -> None:
    transformers.logging.set_verbosity_error()
    variant = VARIANTS.get(name)
    hf = tiny_family(*(variant[:2] if variant else (name,)))
    made = Generated(copy.deepcopy(hf), [PROMPT], use_cache=True, max_new_tokens=8)
    model = cp.load_model(hf)
    if name in REFUSED:
        with pytest.raises(ImportRefused, match=type(hf).__name__):
            cp.import_generate(made.output, model=model, stop_token_ids=())
        return
    trace = cp.import_generate(made.output, model=model, stop_token_ids=())
    count = len(blocks_of(hf))
    assert trace.store.layers == tuple(range(count if name in LEAVING else count - 1))
    for layer in trace.store.layers:
        theirs, ours = trace.states("S", layer, 0), made.states(layer, 0)
        assert len(theirs) == len(PROMPT) + 7
        assert (theirs - ours).abs().max() <= ROUNDING * ours.abs().max()
