"""What does a training step cost as its tokens are cut into more chunks: all at once, and back through time?

    python -m cacheprobe_analyses.training_cost --json analyses/results/training-cost.json

The same number of text tokens and of thought tokens, in 1 to 16 chunks. "parallel": `training.thinking_states.losses`,
states from gold thoughts, one pass. "through time": chunk after chunk, each state made of what T expects its thought
to be, so that gradients run from the last chunk to the first. Forward and backward; weights are random.
Source: Thinking States (arXiv 2602.08332), section 3.3 and its figure of training cost by recurrent steps.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheprobe.core.progress import Progress
from cacheprobe.models.thinking.blocks import attention_bias
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.model import ThinkingModel, pad_in_front
from cacheprobe.training.loop import one_thread
from cacheprobe.training.thinking.losses import IGNORED, ThinkingBatch, losses
from cacheprobe_analyses.command import command

WAYS = ("parallel", "through time")


@dataclass(frozen=True)
class Config:
    """What is timed."""

    chunks: tuple[int, ...] = (1, 2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 16)
    text_tokens: int = 128
    """Of a text, in all its chunks; the answer's one token comes after them."""
    thought_tokens: int = 64
    """Of a text, in all its thoughts, their ends included."""
    repeats: int = 8
    d_vocab: int = 110
    seed: int = 0

    def __post_init__(self) -> None:
        for count in self.chunks:
            if self.text_tokens % count or self.thought_tokens % count or self.thought_tokens // count < 2:
                raise ValueError(
                    f"{self.text_tokens} text tokens and {self.thought_tokens} thought tokens do not go into {count} "
                    "equal chunks with thoughts of two tokens or more; change the numbers"
                )


@dataclass(frozen=True)
class Line:
    """One batch size and number of chunks. Seconds are of processor time: forward and backward, medians."""

    batch: int
    chunks: int
    chunk_tokens: int
    tokens_of_a_thought: int
    seconds: dict[str, float]
    ratios: dict[str, float]
    """Over the parallel step in the fewest chunks, of the same batch and round: medians over rounds."""
    blocks_in_a_row: dict[str, int]
    """The longest chain of blocks of the forward that wait for each other, T's and C's included."""


@dataclass(frozen=True)
class Result:
    """What was timed, and how it came out."""

    text_tokens: int
    thought_tokens: int
    repeats: int
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, held: dict[str, Any]) -> "Result":
        """From its stored form."""
        return cls(**{**held, "lines": tuple(Line(**line) for line in held["lines"])})

    def table(self) -> str:
        head = "| batch | chunks | tokens of a chunk | of a thought |"
        head += "".join(f" {way}, s | ratio | blocks in a row |" for way in WAYS)
        out = [head, "|---" * (4 + 3 * len(WAYS)) + "|"]
        for line in self.lines:
            told = "".join(
                f" {line.seconds[way]:.4f} | {line.ratios[way]:.2f} | {line.blocks_in_a_row[way]} |" for way in WAYS
            )
            out.append(f"| {line.batch} | {line.chunks} | {line.chunk_tokens} | {line.tokens_of_a_thought} |{told}")
        return "\n".join(out)


def losses_through_time(model: ThinkingModel, batch: ThinkingBatch, is_soft: bool = True) -> dict[str, Tensor]:
    """The losses of a recurrent step: chunk after chunk over keys and values that are kept, and their graph with them.

    A chunk's state is C of the embeddings that T expects, given gold tokens before each, so a thought is one pass of T.
    is_soft: False feeds C with the gold thoughts instead: then these are the parallel step's losses.
    Twin: training.thinking_states.losses, close(1e-4), where is_soft is False.
    """
    assert batch.thoughts is not None
    config, chunk, (b, t) = model.config, model.config.chunk, batch.token_ids.shape
    count = batch.thoughts.shape[1]
    positions = torch.arange(t)[None]
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    state = model.embed.weight.new_zeros(b, chunk, config.d_model)
    logits, thought_logits = [], []
    for i, start in enumerate(range(0, t, chunk)):
        here = positions[:, start : start + chunk]
        bias = attention_bias(config, here, positions[:, : start + chunk], config.attention_window)

        def memory(layer: int, keys: Tensor, values: Tensor, bias: Tensor = bias) -> tuple[Tensor, Tensor, Tensor]:
            if layer in kept:
                keys, values = torch.cat([kept[layer][0], keys], 2), torch.cat([kept[layer][1], values], 2)
            kept[layer] = keys, values
            return keys, values, bias

        x = model.enter(batch.token_ids[:, start : start + chunk], here, memory)
        hidden = model.loop(x, state[:, : x.shape[1]], here, memory)
        logits.append(model.read_out(model.leave(hidden, here, memory)))
        if i >= count:
            state = torch.zeros_like(state)
            continue
        thought = batch.thoughts[:, i]
        thought_logits.append(model.think(hidden, thought[:, :-1]))
        said = thought_logits[-1].softmax(-1) @ model.embed.weight if is_soft else model.embed(thought)
        state = _state(model, said, thought)
    trained, is_real = batch.labels != IGNORED, batch.thoughts != config.pad_id
    text, thoughts = torch.cat(logits, 1), torch.stack(thought_logits, 1)
    return {
        "lm": F.cross_entropy(text[trained], batch.labels[trained], reduction="sum") / b,
        "thoughts": F.cross_entropy(thoughts[is_real], batch.thoughts[is_real], reduction="sum") / b,
    }


def _state(model: ThinkingModel, said: Tensor, thought: Tensor) -> Tensor:
    """C of embeddings [b, r, m] that stand in the place of the tokens of `thought`, [b, c, m]."""
    pad = model.config.pad_id
    padded = pad_in_front(thought, max(model.config.chunk, thought.shape[1]), pad)
    is_real = padded != pad
    embedded = model.embed(padded)
    embedded = embedded.masked_scatter(is_real[..., None].expand_as(embedded), said[thought != pad])
    return model.compression(embedded, is_real.long())


def drawn(config: Config, batch: int, chunks: int) -> tuple[ThinkingModel, ThinkingBatch]:
    """A model of that chunk, and random texts; every thought is another, so that none is compressed for two."""
    c, r = config.text_tokens // chunks, config.thought_tokens // chunks
    model = ThinkingModel(ThinkingConfig(config.d_vocab, chunk=c, max_thought=r), config.seed)
    draw = torch.Generator().manual_seed(config.seed)
    token_ids = torch.randint(3, config.d_vocab, (batch, config.text_tokens + 1), generator=draw)
    labels = torch.full_like(token_ids, IGNORED)
    labels[:, -2], labels[:, -1] = token_ids[:, -1], model.config.eos_id
    thoughts = torch.randint(3, config.d_vocab, (batch, chunks, r), generator=draw)
    thoughts[..., -1] = model.config.eos_id
    return model, ThinkingBatch(token_ids, labels, thoughts)


@one_thread()
def run(config: Config, report: Callable[[str], None] = lambda line: None, progress: bool = False) -> Result:
    """Time every number of chunks both ways, in rounds, so that what slows the machine down slows all alike."""
    lines = []
    for batch in config.batches:
        subjects = {chunks: drawn(config, batch, chunks) for chunks in config.chunks}
        seconds: dict[tuple[int, str], list[float]] = {(n, way): [] for n in config.chunks for way in WAYS}
        with Progress((config.repeats + 1) * len(seconds), f"batch {batch}", "steps", enabled=progress) as bar:
            for repeat in range(config.repeats + 1):
                for n, way in seconds:
                    taken = _seconds(*subjects[n], losses if way == "parallel" else losses_through_time)
                    if repeat:  # the first round warms up
                        seconds[n, way].append(taken)
                    bar.advance(note=f"{n} chunks, {way}")
        base = seconds[config.chunks[0], "parallel"]
        for n in config.chunks:
            model, _ = subjects[n]
            line = Line(
                batch,
                n,
                model.config.chunk,
                config.thought_tokens // n,
                {way: median(seconds[n, way]) for way in WAYS},
                {way: median(s / b for s, b in zip(seconds[n, way], base, strict=True)) for way in WAYS},
                dict(zip(WAYS, _chains(model.config, n), strict=True)),
            )
            lines.append(line)
            report(str(line))
    return Result(config.text_tokens, config.thought_tokens, config.repeats, tuple(lines))


def _seconds(
    model: ThinkingModel, batch: ThinkingBatch, step: Callable[[ThinkingModel, ThinkingBatch], dict[str, Tensor]]
) -> float:
    model.zero_grad(set_to_none=True)
    began = time.process_time()
    torch.stack(list(step(model, batch).values())).sum().backward()
    return time.process_time() - began


def _chains(config: ThinkingConfig, chunks: int) -> tuple[int, int]:
    """Blocks in a row, all chunks at once and one after another; the answer comes after the last chunk."""
    loop, last = config.l_out - config.l_in, config.n_layers - config.l_out
    at_once = max(config.l_in, 1) + loop + max(last, config.thinking_layers)
    return at_once, config.l_in + chunks * (loop + config.thinking_layers + 1) + loop + last


def main() -> None:
    reporting = partial(run, report=lambda line: print(line, flush=True))
    command(__doc__, Config, reporting, repeats="rounds; medians are taken over them")


if __name__ == "__main__":
    main()
