"""The benchmarks of single passes: every way computes the same pass, and thoughts are thought however wide it is."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.speed import thinking_states, torch_compile


def test_ours_and_the_static_cache_read_the_same_slots() -> None:
    """In float32, so that nothing is left between them but the order of sums; a pass leaves the next as it was."""
    hf = HuggingFace(torch.float32).model
    step = torch_compile._static(hf, hf.forward)
    ours = torch_compile._ours(cp.load_model("smollm2-135m", dtype="float32", progress=False))
    expected, made = step(), ours()
    assert expected.shape == made.shape == (torch_compile.ROWS, 1, hf.config.vocab_size)
    assert (expected - made).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(step(), expected) and torch.equal(ours(), made)


def test_a_pass_takes_a_round_for_each_chunk_that_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why thoughts are not free, counted: how long a round takes is the machine's affair.

    That a ratio is thinking over plain is checked in test_bench_ratios.py, with planted costs.
    """
    rounds: dict[int, set[int]] = {}
    in_rounds = ThinkingLM._in_rounds

    def counted(self: ThinkingLM, x: Tensor, *rest: Any) -> Tensor:
        h = in_rounds(self, x, *rest)
        rounds.setdefault(x.shape[1] // self.config.chunk, set()).add(self.num_rounds)
        return h

    monkeypatch.setattr(ThinkingLM, "_in_rounds", counted)
    told = thinking_states.run(1, **thinking_states.SMALL)
    assert list(told["thinking_over_plain"]) == [f"{count} chunks a pass" for count in thinking_states.CHUNKS]
    whole = told["prompt_tokens"] // told["chunk"]
    assert rounds.pop(0) == {1} and whole in rounds  # 0: a token of the answer by itself
    # a prompt's first chunk knows no state and has nothing to say
    assert all(of <= {chunks - 1, chunks} for chunks, of in rounds.items()), rounds
