"""Tokens fed outside the engine: a text in parts, and continuations beside those of Hugging Face's generate."""

import torch

import cacheprobe as cp
from cacheprobe.models.feeding import continue_texts, feed
from cacheprobe.ops.sampling import lowest_argmax
from tests.tiny import PROMPTS, hf_model, loaded

LENGTH = 9


def greedy(rows: list[int], logits: torch.Tensor) -> list[int]:
    return [lowest_argmax(row) for row in logits]


def test_continuations_are_those_of_generate() -> None:
    """Prompts of different lengths, together; == in float32."""
    plain, prompts = hf_model(), [list(prompt) for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
    assert len({len(prompt) for prompt in prompts}) > 1
    alone = [
        plain.generate(torch.tensor([prompt]), max_length=LENGTH, min_length=LENGTH, do_sample=False, eos_token_id=None)
        for prompt in prompts
    ]
    assert continue_texts(cp.load_model(hf_model()), prompts, LENGTH, greedy) == [ids[0].tolist() for ids in alone]


def test_a_text_that_is_long_enough_is_left_alone() -> None:
    assert continue_texts(loaded(), [[1, 2, 3], [4]], 3, greedy)[0] == [1, 2, 3]


def test_a_text_in_two_parts_has_the_states_of_the_whole() -> None:
    """close(1e-5), because a pass of another width sums in another order."""
    model, text, sites = loaded(), torch.tensor([PROMPTS[0], PROMPTS[0][::-1]]), [("S", 0), ("T", 1)]
    whole = feed(model, text, sites)
    first = feed(model, text[:, :2], sites, cache=model.new_cache(2, text.shape[1]))
    second = feed(model, text[:, 2:], sites, start=2, cache=first.cache)
    torch.testing.assert_close(torch.cat([first.out, second.out], dim=1), whole.out, atol=1e-5, rtol=1e-5)
    for place in sites:
        parts = torch.cat([first.states[place], second.states[place]], dim=1)
        torch.testing.assert_close(parts, whole.states[place], atol=1e-5, rtol=1e-5)
    assert feed(model, text, logit_slots=[1]).out.shape[:2] == (2, 1)
    assert feed(model, text, num_layers=1).out.shape == (*text.shape, model.d_model)
