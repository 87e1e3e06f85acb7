"""What the documentation's examples say of their values is true."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from tests.project.test_docs_blocks import BLOCK
from tests.reported.stated_outputs import run_and_compare
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

CAPTURE = Path(__file__).parents[2] / "docs" / "capture.md"


def logits_of(text: list[int]) -> torch.Tensor:
    """Of Hugging Face's model, at each position."""
    with torch.inference_mode():
        return hf_model()(torch.tensor([text])).logits[0]


def test_the_attribution_of_the_page_is_about_the_token_that_it_names() -> None:
    """The row at a position predicts the next one; close(1e-4): sums in another order."""
    page = CAPTURE.read_text(encoding="utf-8")
    (block,) = BLOCK.findall(page.split("## Which parts gave a logit?")[1].split("\n## ")[0])
    trace = cp.run(loaded(), PROMPTS[:2], **{**SMALL, "max_new_tokens": 6})
    scope: dict[str, Any] = {"cp": cp, "model": loaded(), "prompts": PROMPTS[:2], "trace": trace, "request_id": 0}
    wrong = run_and_compare(
        block.replace("cp.run(model, prompts", "cp.run(model, prompts, max_new_tokens=6"), "", scope
    )
    assert wrong == []
    text = [*PROMPTS[0], *scope["trace"].committed(0)]
    first = len(PROMPTS[0])
    assert "position)  # of that token" in block and "- 1  # predicts the first generated token" in block
    table, position = scope["table"], first - 1
    assert set(table.token_id) == {text[first]} and set(table.position) == {position}
    assert table.logit.sum() == pytest.approx(float(logits_of(text)[position, text[first]]), abs=1e-4)


def test_values_are_compared_where_they_are_made() -> None:
    code = "import torch\nx = torch.zeros(2, 3)  # [n, m]\ny = x.T\nx[0]  # [n, m]\n(\n    y\n)  # [m]\n"
    assert run_and_compare(code, "a page", {}) == ["[n, m]: has the shape [3]", "[m]: has the shape [3, 2]"]
