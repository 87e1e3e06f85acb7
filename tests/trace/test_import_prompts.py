"""The prompt of an imported run is shown as its text, in every view and in the dashboard's menu."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cacheprobe as cp
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard.facts import _request_label
from cacheprobe.views.report.listings import request_listings
from cacheprobe.views.text import token_texts
from tests.tiny import hf_model

WORDS = ["<unk>", "A", "Ġcoin", "Ġis", "Ġheads", ".", "Ċ", "Ġtails"]
IDS, TEXT = [1, 2, 3, 4, 5, 6], "A coin is heads.\n"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Its tokens bring their own blanks, as those of most models do."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def of_generate(folder: Path, **speaker: Any) -> cp.Trace:
    asked = dict(return_dict_in_generate=True, output_hidden_states=True, do_sample=False, pad_token_id=0)
    return cp.import_generate(hf_model().generate(torch.tensor([IDS]), max_new_tokens=2, **asked), **speaker)


def of_vllm(folder: Path, **speaker: Any) -> cp.Trace:
    save_file({"hidden_states": torch.zeros(6, 1, 8), "token_ids": torch.tensor(IDS)}, folder / "a.safetensors")
    return cp.import_vllm(folder / "a.safetensors", [1], **speaker)


@pytest.mark.parametrize("imported", [of_generate, of_vllm])
def test_the_prompt_of_an_import_is_its_text(imported: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Before, the menu said "token ids", and views put a blank between tokens that bring their own."""
    trace = imported(tmp_path, tokenizer=tokenizer)
    assert trace.requests[0].prompt == trace.requests[0].prompt_token_ids == tuple(IDS)
    (request,) = (stored := StoredRun(trace.save(tmp_path / "run"))).requests
    assert request["prompt"] == request["prompt_token_ids"] == IDS
    assert _request_label(request, token_texts(stored.rows)).endswith("· A coin is heads.⏎")
    assert ("prompt", "A coin is heads.⏎") in request_listings(trace, 0)[0].rows
    assert ">A coin is heads.\n</span>" in drawn(trace)


def drawn(trace: cp.Trace) -> str:
    return str(cp.plots.request_text(trace.rows(), trace.events(), 0))


def test_show_says_why_an_import_of_vllm_has_no_ledger(tmp_path: Path) -> None:
    """Before, `cacheprobe show RUN --request 0` failed."""
    listings = {listing.title: listing for listing in request_listings(of_vllm(tmp_path), 0)}
    assert listings["cache at its end"].note.startswith("vLLM's files do not say which cache slots")


def test_the_models_own_tokenizer_gives_the_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trace = of_generate(tmp_path, model=cp.load_model(hf_model(), tokenizer=tokenizer))
    assert ("prompt", "A coin is heads.⏎") in request_listings(trace, 0)[0].rows


def test_without_a_tokenizer_it_is_the_ids(tmp_path: Path) -> None:
    for trace in (of_vllm(tmp_path), of_generate(tmp_path, model=cp.load_model(hf_model()))):
        assert trace.requests[0].prompt == tuple(IDS)
        assert ("prompt", "<1><2><3><4><5><6>") in request_listings(trace, 0)[0].rows


def test_token_texts_are_joined_as_they_are(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of a run of ours too, whose prompt was given as token ids."""
    model = cp.load_model(hf_model(), tokenizer=tokenizer)
    trace = cp.run(model, [IDS], capacity=96, max_new_tokens=2, capture="S", progress=False)
    assert trace.requests[0].prompt == tuple(IDS)
    assert ("prompt", "A coin is heads.⏎") in request_listings(trace, 0)[0].rows
    assert ">A coin is heads.\n</span>" in drawn(trace)
