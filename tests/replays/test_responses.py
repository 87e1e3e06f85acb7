"""Responses of other programs: each layout gives the same tokens, and damaged ones a clear error within a second."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cacheprobe.trace.replays import responses
from cacheprobe.trace.replays.response import ReplayRefused
from cacheprobe.trace.replays.responses import read_responses
from tests.tiny import hf_model

PROMPT, IDS, NATS = (5, 6, 7), (8, 9, 4), (-0.5, -1.25, -3.0)
NAMES = ["token_id:8", "token_id:9", "token_id:4"]
COMPLETION = {"choices": [{"text": "abc", "prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 4],
               "logprobs": {"tokens": ["a", "b", "c"], "token_logprobs": list(NATS)}}]}  # fmt: skip
CHAT = {"prompt_token_ids": [5, 6, 7], "choices": [{"message": {"content": "abc"}, "logprobs": {
    "content": [{"token": name, "logprob": nats, "top_logprobs": []} for name, nats in zip(NAMES, NATS, strict=True)]
}}]}  # fmt: skip
SGLANG = {"text": "abc", "output_ids": [8, 9, 4], "meta_info": {
    "prompt_tokens": 3, "input_token_logprobs": [[None, 5, None], [-0.1, 6, None], [-0.2, 7, None]],
    "output_token_logprobs": [[-0.5, 8, None], [-1.25, 9, None], [-3.0, 4, None]],
}}  # fmt: skip
PLAIN = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 4], "logprobs": list(NATS)}
VLLM = SimpleNamespace(prompt_token_ids=[5, 6, 7], outputs=[SimpleNamespace(
    token_ids=(8, 9, 4), text="abc", logprobs=[{i: SimpleNamespace(logprob=n), 1: SimpleNamespace(logprob=-9.0)}
                                               for i, n in zip(IDS, NATS, strict=True)])])  # fmt: skip


@pytest.mark.parametrize("response", [COMPLETION, CHAT, SGLANG, PLAIN, VLLM])
def test_every_layout_says_the_same(response: object) -> None:
    (found,) = read_responses(response)
    assert (found.prompt, found.token_ids, found.logprob_nats) == (PROMPT, IDS, NATS)


@pytest.mark.parametrize("as_lines", [True, False])
def test_a_file_of_responses(tmp_path: Path, as_lines: bool) -> None:
    items = [COMPLETION, CHAT, SGLANG, PLAIN]
    text = "\n".join(map(json.dumps, items)) + "\n" if as_lines else json.dumps(items, indent=2)
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    assert [one.token_ids for one in read_responses(tmp_path / "r.json")] == [IDS] * 4
    (tmp_path / "one.json").write_text(json.dumps(PLAIN, indent=1), encoding="utf-8")
    assert [one.token_ids for one in read_responses([tmp_path / "one.json"])] == [IDS]


def test_lines_end_at_line_ends_alone(tmp_path: Path) -> None:
    text = json.dumps({"prompt": "a", "text": "b\u2028c\x85d"}, ensure_ascii=False)
    (tmp_path / "r.jsonl").write_text(f"{text}\n{text}\n", encoding="utf-8")
    assert [one.text for one in read_responses(tmp_path / "r.jsonl")] == ["b\u2028c\x85d"] * 2


def test_several_choices_and_outputs() -> None:
    assert read_responses([np.array([1, 2]), torch.tensor([3])])[1].token_ids == (3,)
    two = {**COMPLETION, "choices": COMPLETION["choices"] * 2}
    assert len(read_responses([two, PLAIN])) == 3
    assert [one.token_ids for one in read_responses([[1, 2], [3]])] == [(1, 2), (3,)]
    assert [one.token_ids for one in read_responses([1, 2])] == [(1, 2)]
    assert [one.text for one in read_responses(["a", "b"])] == ["a", "b"]


def test_outputs_of_generate() -> None:
    """Two prompts of one batch, padded on the left; the second ends at a stop token."""
    live = hf_model("llama")
    ids = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    made = live.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    stop = int(made.sequences[1, 6])
    first, second = read_responses(made, mask, [stop])
    assert first.prompt == (3, 4, 5, 6) and second.prompt == (7, 8) and second.token_ids is not None
    assert second.token_ids[-1] == stop and len(second.token_ids) <= 3
    assert second.logprob_nats is not None
    assert second.logprob_nats[0] == pytest.approx(float(made.logits[0][1].log_softmax(-1).max()))
    (only, _) = read_responses(made.sequences, mask)
    assert only.token_ids == tuple(made.sequences[0, 4:].tolist()) and only.logprob_nats is None


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ("runs/answers.jsonl", "if it names a file"),
        ({"choices": [{"message": {"content": "a", "reasoning_content": "b"}}]}, "also generated reasoning_content"),
        ({**PLAIN, "logprobs": [0.0, -(10**400), 0.0]}, "too large"),
        ({**PLAIN, "logprobs": [0.0, float("-inf"), 0.0]}, "expected a finite number"),
        (SimpleNamespace(sequences=torch.zeros(1, 3, dtype=torch.long), beam_indices=torch.zeros(1)), "beam search"),
        ({}, "expected choices, meta_info, token_ids or text"),
        ({"choices": []}, "at least one object"),
        ({"choices": [3]}, "must be a JSON object, got 3"),
        ({"choices": [{"text": ""}]}, "response 0 generated nothing"),
        ({**PLAIN, "token_ids": [8, 9]}, "holds 2 tokens and 3 log-probabilities"),
        ({**PLAIN, "logprobs": [0.0, float("nan"), 0.0]}, "token 1 has the log-probability nan"),
        ({**PLAIN, "logprobs": [0.0, 0.5, 0.0]}, "0 or below"),
        ({**PLAIN, "logprobs": [None, 0.0, 0.0]}, "entry 0 is None, no number; with echo it is the prompt's"),
        ({**PLAIN, "logprobs": "abc"}, "must be a list of numbers"),
        ({**PLAIN, "token_ids": [8, 9.5, 4]}, "token_ids: .*9.5"),
        ({**PLAIN, "token_ids": "abc"}, "must be a list of token ids"),
        ({"text": "abc", "logprobs": [0.0]}, "logprobs of unknown tokens"),
        ({**PLAIN, "prompt_token_ids": None, "prompt": 3}, "prompt must be text, got 3"),
        ({**PLAIN, "drafts": [{"start": 0, "token_ids": [8]}]}, "so 1 or later"),
        ({**PLAIN, "drafts": [[1, [8]], [1, [9]]]}, "two drafts start at token 1"),
        ({**PLAIN, "drafts": [7]}, "a draft needs start and token_ids"),
        ({**PLAIN, "drafts": 7}, "must be a list of drafts"),
        ({"meta_info": []}, "meta_info must be a JSON object"),
        ({"meta_info": {"output_token_logprobs": [[1]]}}, "an entry must be"),
        ({**SGLANG, "output_ids": [8, 9, 5]}, "are of different tokens"),
        ({"choices": [{"logprobs": {"tokens": [1], "token_logprobs": [0.0]}}]}, "must be text"),
        ({"choices": [{"text": "a", "logprobs": {"tokens": ["token_id:x"], "token_logprobs": [0.0]}}]}, "no token id"),
        (SimpleNamespace(prompt_token_ids=None, outputs=[]), "prompt_token_ids must be a list"),
        (b"abc", "responses must be files"),
        ([], "there are no responses"),
        (torch.zeros(2, 3), "must be token ids"),
        (torch.zeros(2, 3, dtype=torch.long), "give attention_mask="),
    ],
)
def test_what_is_no_response_is_refused(response: object, says: str) -> None:
    with pytest.raises(ReplayRefused, match=says):
        read_responses(response)


@pytest.mark.parametrize(
    ("mask", "says"), [(torch.ones(1, 2), "does not fit"), (torch.tensor([[1, 0]]), "on the right")]
)
def test_masks_are_checked(mask: torch.Tensor, says: str) -> None:
    sequences = torch.zeros(1, 3, dtype=torch.long) if says != "does not fit" else torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ReplayRefused, match=says):
        read_responses(sequences, mask)


@pytest.mark.parametrize("damage", ["cut", "deep", "bytes", "empty", "large", "folder", "pipe"])
def test_a_damaged_file_is_refused_within_a_second(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    whole = json.dumps(PLAIN).encode()
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        path = Path("/dev/zero")
    else:
        held = {"cut": whole[:-9], "deep": b"[" * 200_000, "bytes": b"\xff\xfe" + whole, "empty": b"", "large": whole}
        path.write_bytes(held[damage])
    if damage == "large":
        monkeypatch.setattr(responses, "LARGEST_BYTES", 10)
    began = time.monotonic()
    with pytest.raises(ReplayRefused, match=path.name):
        read_responses(path)
    assert time.monotonic() - began < 1


def test_every_cut_of_a_response_is_refused_or_shorter() -> None:
    """No cut raises anything else: JSON that ends early, and fields that are missing."""
    for response in (COMPLETION, CHAT, SGLANG, PLAIN):
        for path, _ in leaves(response):
            for value in (None, [], {}, "x", -1, 1e400, [[1]], {"a": 1}):
                try:
                    read_responses(replaced(response, path, value))
                except ReplayRefused as error:
                    assert "response 0" in str(error)


def leaves(item: object, path: tuple = ()) -> list[tuple[tuple, object]]:
    """Every place in a JSON object, and what stands there."""
    found = [(path, item)] if path else []
    held = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return found + [leaf for key, value in held for leaf in leaves(value, (*path, key))]


def replaced(item: object, path: tuple, value: object) -> object:
    """A copy of a JSON object with another value at one place."""
    copy = json.loads(json.dumps(item))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy
