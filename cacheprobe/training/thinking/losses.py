"""Teacher-forced training of Thinking States models, and of the arms that they are compared with.

Gold thoughts are known, so every state is: all chunks of all texts run in one pass, and nothing is propagated back from
chunk to chunk.
Source: Thinking States (arXiv 2602.08332), section 3.3, Eq. 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.models.thinking.model import ThinkingModel, thought_table
from cacheprobe.tasks.thoughts import CHAINS, Annotated

ARMS = ("thinking", "plain", "no_feedback", "chain_of_thought")
"""thinking: the model.  plain: the backbone, answer only.  no_feedback: thoughts are trained, states are not added.
chain_of_thought: the backbone, which works through all operations in writing after the prompt, then answers."""
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded behind."""

    token_ids: Int[Tensor, "b t"]
    labels: Int[Tensor, "b t"]
    """The next token where it is trained, IGNORED elsewhere."""
    thoughts: Int[Tensor, "b k r"] | None


def collate(annotated: Sequence[Annotated], arm: str, pad_id: int = 0) -> Batch:
    """Prompts with what is to be written after them: the answer, or thoughts and answer in a chain of thought."""
    if arm not in ARMS:
        raise ValueError(f"unknown arm {arm!r}; choose one of {', '.join(ARMS)}")
    written = [spoken(item, arm) for item in annotated]
    # the end of the answer is predicted, and never fed
    length = max(len(item.token_ids) + len(said) - 1 for item, said in zip(annotated, written, strict=True))
    token_ids = torch.full((len(annotated), length), pad_id)
    labels = torch.full((len(annotated), length), IGNORED)
    for b, (item, said) in enumerate(zip(annotated, written, strict=True)):
        n = len(item.token_ids)
        whole = torch.tensor([*item.token_ids, *said])
        token_ids[b, : len(whole) - 1] = whole[:-1]
        labels[b, n - 1 : len(whole) - 1] = whole[n:]
    has_thoughts = arm in ("thinking", "no_feedback")
    return Batch(token_ids, labels, thought_table([a.thoughts for a in annotated], pad_id) if has_thoughts else None)


def spoken(item: Annotated, arm: str) -> tuple[int, ...]:
    """What is written after the prompt: the answer and its end; in a chain of thought, the chain before."""
    if arm != "chain_of_thought":
        return item.answer_ids
    if not item.chain_ids:
        raise ValueError(f"{item} has no chain of thought to write; annotate it with chain= one of {CHAINS}")
    return (*item.chain_ids, *item.answer_ids)


def skipping_positions(batch: Batch, chunk: int, reach: int, seed: int) -> Int[Tensor, "b t"]:
    """Positions of each text with two jumps, each of up to `reach`, at chunk boundaries: short texts then hold the
    distances of long ones. Small jumps are likelier.
    Source: positional skip-wise training, Zhu et al. 2023 (arXiv 2309.10400).
    """
    b, t = batch.token_ids.shape
    draw = torch.Generator().manual_seed(seed)
    positions = torch.arange(t).repeat(b, 1)
    for _ in range(2):
        at = torch.randint(0, max(t // chunk, 1), (b, 1), generator=draw) * chunk
        size = (torch.rand(b, 1, generator=draw) ** 3 * reach).long()
        positions = positions + (torch.arange(t) >= at) * size
    return positions


def crowd(positions: Int[Tensor, "b t"], chunk: int) -> Float[Tensor, "b 1 t t"]:
    """Bias of attention under which the positions that were skipped are filled: the tokens before the chunk before a
    query's own count as often as it takes for the query to see as many tokens as its position says. In the first two
    chunks there are none before those, and no bias.

    A bias of log n on a key is n such keys: short texts then hold the crowds of long ones, not only their distances.
    Chunks side by side count once, since in a long text nothing crowds between them.
    """
    index = torch.arange(positions.shape[1])
    near = (index // chunk - 1).clamp(min=0) * chunk  # where the chunk before a query's own begins
    times = 1 + (positions - index) / near.clamp(min=1)
    is_far = index < near[:, None]
    return (is_far * times.log()[..., None])[:, None]


def losses(
    model: ThinkingModel, batch: Batch, positions: Tensor | None = None, bias: Tensor | None = None
) -> dict[str, Tensor]:
    """Cross-entropy of what is written, in nats for each text, and of its thoughts: summed over tokens and chunks.

    "lm" over the answer's tokens (prompt tokens are not trained: the paper leaves it open), "thoughts" over every token
    of every thought, its end included; no coefficients.
    Twin: tests.test_thinking_training.losses_slowly, close(1e-5).
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
