"""Computes teacher-forced losses of Thinking States models and of the other arms (trained variants).

Source: Thinking States (arXiv 2602.08332), section 3.3, Eq. 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.values import require_one_of
from cacheprobe.models.thinking.model import ThinkingModel, thought_table
from cacheprobe.tasks.thoughts import CHAINS, Annotated

ARMS = ("thinking", "plain", "no_feedback", "chain_of_thought")
"""Names of the trained variants of the model. thinking: the whole model.  plain: the backbone, answer only.
no_feedback: thoughts are trained, but chunk states are not added.
chain_of_thought: the backbone, which writes the chain of thought after the prompt, and then the answer."""
IGNORED = -100


@dataclass(frozen=True)
class ThinkingBatch:
    """Holds texts side by side as tensors, padded at the end."""

    token_ids: Int[Tensor, "b t"]
    labels: Int[Tensor, "b t"]
    """[b, t] the next token at trained positions, IGNORED elsewhere."""
    thoughts: Int[Tensor, "b k r"] | None
    """[b, k, r] the r tokens of the gold thought after each of k chunks; None for an arm without thoughts."""


def collate(annotated: Sequence[Annotated], arm: str, pad_id: int = 0) -> ThinkingBatch:
    """Returns a ThinkingBatch of texts: each prompt, followed by the tokens that `arm`, one of ARMS, should write.
    Raises: ValueError for an unknown arm, or if the arm writes a chain of thought and a text has none."""
    require_one_of("arm", arm, ARMS)
    targets = [tokens_to_write(item, arm) for item in annotated]
    # the end of the answer is predicted, and never fed
    length = max(len(item.token_ids) + len(target) - 1 for item, target in zip(annotated, targets, strict=True))
    token_ids = torch.full((len(annotated), length), pad_id)
    labels = torch.full((len(annotated), length), IGNORED)
    for b, (item, target) in enumerate(zip(annotated, targets, strict=True)):
        n = len(item.token_ids)
        whole = torch.tensor([*item.token_ids, *target])
        token_ids[b, : len(whole) - 1] = whole[:-1]
        labels[b, n - 1 : len(whole) - 1] = whole[n:]
    has_thoughts = arm in ("thinking", "no_feedback")
    return ThinkingBatch(
        token_ids, labels, thought_table([a.thoughts for a in annotated], pad_id) if has_thoughts else None
    )


def tokens_to_write(item: Annotated, arm: str) -> tuple[int, ...]:
    """Returns the token ids that `arm`, one of ARMS, should write after the prompt: the right answer and <eos>; for
    "chain_of_thought", the chain of thought first. Raises: ValueError if that chain is missing."""
    if arm != "chain_of_thought":
        return item.answer_ids
    if not item.chain_ids:
        raise ValueError(f"{item} has no chain of thought to write; annotate it with chain= one of {CHAINS}")
    return (*item.chain_ids, *item.answer_ids)


def skipping_positions(batch: ThinkingBatch, chunk: int, jump: int, seed: int) -> Int[Tensor, "b t"]:
    """Returns position ids [b, t] that skip ids at two random chunk boundaries of a text: fewer than `jump` ids each
    time, and more often few than many.

    Short texts then contain the distances between positions of long texts.
    Source: positional skip-wise training, Zhu et al. 2023 (arXiv 2309.10400).
    """
    b, t = batch.token_ids.shape
    draw = torch.Generator().manual_seed(seed)
    positions = torch.arange(t).repeat(b, 1)
    for _ in range(2):
        at = torch.randint(0, max(t // chunk, 1), (b, 1), generator=draw) * chunk
        size = (torch.rand(b, 1, generator=draw) ** 3 * jump).long()  # the cube makes small jumps likelier
        positions = positions + (torch.arange(t) >= at) * size
    return positions


def attention_crowding(positions: Int[Tensor, "b t"], chunk: int) -> Float[Tensor, "b 1 t t"]:
    """Returns an attention bias [b, 1, t, t] with which earlier tokens count several times, in place of skipped tokens.

    Tokens before the chunk that precedes a query's own chunk are weighted so that the query sees as many tokens as its
    position says. In the first two chunks there are no such tokens and no bias. A bias of log n on a key acts like n
    such keys.
    """
    index = torch.arange(positions.shape[1])
    near = (index // chunk - 1).clamp(min=0) * chunk  # where the chunk before a query's own begins
    times = 1 + (positions - index) / near.clamp(min=1)
    is_far = index < near[:, None]
    return (is_far * times.log()[..., None])[:, None]


def losses(
    model: ThinkingModel, batch: ThinkingBatch, positions: Tensor | None = None, bias: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns a dictionary name -> loss: cross-entropies in nats, summed over the tokens of a text, averaged over the
    texts.

    "lm": the tokens to write after the prompt; prompt tokens are not trained, because the paper leaves this open.
    "thoughts": every token of every thought, including its end; not returned for an arm without thoughts.
    Twin: sums over single tokens, in tests.training.test_thinking_training, close(1e-5).
    """
    logits, thought_logits = model(batch.token_ids, batch.thoughts, positions, bias)
    count = len(batch.token_ids)
    trained = batch.labels != IGNORED
    out = {"lm": F.cross_entropy(logits[trained], batch.labels[trained], reduction="sum") / count}
    if batch.thoughts is not None:
        assert thought_logits is not None
        is_real = batch.thoughts != model.config.pad_id
        out["thoughts"] = F.cross_entropy(thought_logits[is_real], batch.thoughts[is_real], reduction="sum") / count
    return out
