"""Checks by a head's own predictions that it is given the target states that it was trained on."""

import math

import torch
from torch import Tensor

from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.models.heads.lm import HeadLM

_TEXT = (
    "The old harbour was quiet in the morning. A few boats lay at the wall, and the fishermen mended their nets, as "
    "their fathers had done before them. When the sun came over the hill, the baker opened his shop, and the smell of "
    "fresh bread filled the narrow streets. Children ran down to the water to look at the ships. One of them, a girl "
    "of about ten, asked her grandfather how far it was to the other side. He laughed and said that nobody had ever "
    "measured it, but that his own boat had taken three days and two nights to cross. She thought about this for a "
    "while, and then she asked whether he had been afraid of the dark.\n\n"
    "To make the bread, mix 500 grams of flour with a little salt, add 300 millilitres of warm water and the yeast, "
    "and knead the dough for ten minutes. Cover it with a cloth and let it rise until it has doubled in size. Then put "
    "it into a hot oven, and bake it for about forty minutes, until the crust is brown.\n\n"
    "Question: What is the capital of France, and on which river does it lie?\n"
    "Answer: The capital of France is Paris, which lies on the river Seine. It is the largest city of the country, and "
    "more than two million people live there. Many visitors come to see the Eiffel Tower, which was built in 1889.\n\n"
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)"
)
_LENGTH = 384
_MARGIN, _SIGMAS = 0.3, 3.0
"""Nats, and standard errors, by which other layers must be better. Heads that were trained here for SmolLM2, and given
the right states, were up to 0.14 nats better with those one block later, which say more of the next token. So states
that are one block off are found only if they cost the head more than that."""
_LEARNED = 0.5
"""Nats by which a head must be better than one that gives each of its tokens the same probability. A random head is
worse than that, and what it prefers says nothing."""


def check_convention(head: HeadLM, target: CachedLM) -> None:
    """Checks that the head predicts the target's own choices on a fixed text no better from the states one block later
    or earlier than from those at its `target_sites`. Layer ids are counted in two ways, which differ by one block.

    Raises: ValueError, which names both sets of layers, if it does: by 0.3 nats and three standard errors.
    """
    scores = convention_scores(head, target)
    stated = scores.pop(0, torch.zeros(0))
    if len(stated) < 2 or not scores:
        return
    shift, best = max(scores.items(), key=lambda one: float(one[1].mean()))
    gain, vocab = best - stated, head.d_vocab if head.token_ids is None else len(head.token_ids)
    least = max(_MARGIN, _SIGMAS * float(gain.std()) / len(gain) ** 0.5)
    if float(gain.mean()) < least or float(best.mean()) < _LEARNED - math.log(vocab):
        return
    inputs = [_place(site, layer) or 0 for site, layer in head.target_sites]
    other = [one + shift for one in inputs]
    raise ValueError(
        f"{head.name} reads the states that enter blocks {inputs} of {target.name}, and predicts its tokens better "
        f"from those that enter blocks {other}: log-probability {float(best.mean()):.2f} instead of "
        f"{float(stated.mean()):.2f} nats; its layer ids are counted otherwise: give "
        f'layers_are="{"outputs" if shift > 0 else "inputs"}", or layer_ids='
    )


def convention_scores(head: HeadLM, target: CachedLM) -> dict[int, Tensor]:
    """Returns, by shift, the log-probabilities [n] in nats that a head gives to the tokens that the target itself would
    choose next, over a fixed text. Shift 0 is of the states at `head.target_sites`; 1 and -1 of those one block later
    and earlier, if the target has such. {} for a head that reads states other than the stream between blocks.

    Tokens that the head never drafts are left out.
    """
    places = [_place(site, layer) for site, layer in head.target_sites]
    if None in places:  # a state that is no stream between blocks
        return {}
    streams = [place for place in places if place is not None]
    shifts = [shift for shift in (0, 1, -1) if all(0 <= one + shift <= target.n_layers for one in streams)]
    sites = {j: ("S", j - 1) if j else ("pre", 0) for j in {one + shift for one in streams for shift in shifts}}
    token_ids = convention_text(target, min(_LENGTH, target.n_ctx, head.n_ctx))
    fed = feed(target, token_ids, [*sites.values()])
    wanted = fed.out[0, 1:].argmax(-1, keepdim=True)
    scores = {}
    for shift in shifts:
        states = torch.stack([fed.states[sites[one + shift]] for one in streams], dim=2)
        cache = head.new_cache(1, token_ids.shape[1])
        residual = head.run(token_ids[:, 1:], head.entering(states[:, :-1]), cache, [0], [0])
        logprobs = head.read_out(residual[0]).float().log_softmax(-1)
        scores[shift] = logprobs.gather(1, wanted.to(logprobs.device))[:, 0].cpu()
    known = scores[0].isfinite()
    return {shift: one[known] for shift, one in scores.items()}


def _place(site: str, layer: int) -> int | None:
    """Returns j if a site is the stream that enters block j, or the last one; None for another site."""
    return {"S": layer + 1, "pre": layer}.get(site)


def convention_text(target: CachedLM, length: int = _LENGTH) -> Tensor:
    """Returns the token ids [1, t] of the fixed text, at most `length`; random ids for a target without a tokenizer."""
    if target.tokenizer is not None:
        return torch.tensor([target.encode(_TEXT)[:length]])
    return torch.randint(0, target.d_vocab, (1, length), generator=torch.Generator().manual_seed(0))
