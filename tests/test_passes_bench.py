"""The benchmarks of single passes: every way computes the same pass, and thoughts are thought however wide it is."""

import torch

import cacheprobe as cp
from cacheprobe_benchmarks import thinking_states, torch_compile
from cacheprobe_benchmarks.hugging_face import HuggingFace


def test_ours_and_the_static_cache_read_the_same_slots() -> None:
    """In float32, so that nothing is left between them but the order of sums; a pass leaves the next as it was."""
    hf = HuggingFace(torch.float32).model
    step = torch_compile._static(hf, hf.forward)
    ours = torch_compile._ours(cp.load_model("smollm2-135m", dtype="float32", progress=False))
    expected, made = step(), ours()
    assert expected.shape == made.shape == (torch_compile.ROWS, 1, hf.config.vocab_size)
    assert (expected - made).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(step(), expected) and torch.equal(ours(), made)


def test_what_thinking_costs_in_small() -> None:
    told = thinking_states.run(**thinking_states.SMALL)
    ratios = told["thinking_over_plain"]
    assert list(ratios) == [f"{count} chunks a pass" for count in thinking_states.CHUNKS]
    assert all(ratio > 1 for ratio in ratios.values()), "thoughts are not free"
