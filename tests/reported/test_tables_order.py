"""Numbers and texts stand beside the tokens that they are of, also where a part ended."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from transformers import PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.trace.stored import growing_run
from tests.capture.recorded_run import failing_after
from tests.dashboard.growing_run import part_each_round
from tests.tiny import PROMPTS, SMALL, VOCAB, hf_model, loaded


def plain(text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's logits of a text, and what leaves its second block."""
    with torch.inference_mode():
        found = hf_model()(torch.tensor([list(text)]), output_hidden_states=True)
    return found.logits[0].double(), found.hidden_states[2][0]


def gap(logits: torch.Tensor) -> float:
    best = logits.topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize("drafter", [None, cp.drafters.EarlyExit(layer=1)])
def test_margins_are_the_gaps_of_the_logits_in_order(drafter: object) -> None:
    """Of the smallest choice of a pass; close(1e-4): sums in another order."""
    trace = cp.run(loaded(), PROMPTS, **SMALL, drafter=drafter)
    texts = {i: [*PROMPTS[i], *trace.committed(i)] for i in range(len(PROMPTS))}
    logits = {i: plain(text)[0] for i, text in texts.items()}
    lengths, seen = {i: len(prompt) for i, prompt in enumerate(PROMPTS)}, 0
    for event in trace.events().sort_values(["step", "request_id"]).itertuples():
        request, start = event.request_id, lengths[event.request_id]
        nats = logits[request].log_softmax(-1)
        own = [float(nats[start - 1 + i, token]) for i, token in enumerate(event.committed_token_ids)]
        assert list(event.committed_logprobs_nats) == pytest.approx(own, abs=1e-4)
        if event.phase == "verify":
            drafted = [*texts[request][:start], *event.draft_token_ids]
            gaps = [gap(one) for one in plain(drafted)[0][start - 1 :]]
        else:
            gaps = [gap(logits[request][start - 1])] if len(event.committed_token_ids) else []
        if gaps:
            assert event.margin_nats == pytest.approx(min(gaps), abs=1e-4)
            seen += 1
        lengths[request] += len(event.committed_token_ids)
    assert seen > 20 and trace.events().groupby("step").margin_nats.nunique().max() > 3


def bytes_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token for each byte, so that most characters are several."""
    signs = sorted({sign for word, _ in ByteLevelSplit(add_prefix_space=False).pre_tokenize_str(text) for sign in word})
    vocabulary = {sign: i for i, sign in enumerate([*signs, *(f"w{i}" for i in range(VOCAB - len(signs)))])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevelSplit(add_prefix_space=False), ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_text_that_ends_in_half_a_character_goes_on_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)
    said = "é東京🙂 a" * 9
    tokenizer = bytes_tokenizer(said)
    ids = tokenizer(said)["input_ids"]
    assert len(ids) == len(said.encode())
    model, response = cp.load_model(hf_model(), tokenizer=tokenizer), {"prompt_token_ids": [0, 1], "token_ids": ids}
    settings = dict(window=4, capacity=192, capture="S", progress=False)
    halves = 0
    for files in range(9, 120, 19):
        folder = tmp_path / str(files)
        with failing_after(files):
            cp.replay(model, [response], **settings, out=folder)
        growing, followed = cp.load_trace(folder), growing_run(folder)
        so_far = growing.committed(0)
        assert growing.text(0) == followed.requests[0]["text"] == tokenizer.decode(so_far)
        halves += growing.text(0).endswith("\ufffd")
    assert halves > 2
    assert cp.replay(model, [response], **settings, out=tmp_path / "whole").text(0) == said
