"""Trains draft heads (EAGLE-3 heads, MTP modules) on the target states that a run recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from cacheprobe.core.files import write_json
from cacheprobe.core.noise import derive_seed
from cacheprobe.core.values import Json
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.module import HeadModule
from cacheprobe.training.loop import Loop, TrainingProgress
from cacheprobe.training.settings import HeadSettings

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

ABOUT, CHECKPOINTS = "about.json", "training"
"""File of a head's folder that says how it was trained, and the folder there of the checkpoint of an unfinished one."""
ROWS_AT_ONCE = 256
"""Number of rows in one product with the target's unembedding."""
SPLIT_SEED = 0
"""Seed of the choice of held-out prompts, which is one for heads of all seeds."""
CHAIN_DECAY = 0.8
"""Weight of the loss of each further token of a chain, relative to the token before it."""


def held_out_prompts(trace: "Trace", share: float, generator: torch.Generator) -> set[tuple[int, ...]]:
    """Returns the prompts of a trace that a training never sees: this share of its different prompts, drawn at random,
    at least one.

    Raises: ValueError if all requests have one prompt.
    """
    prompts = list(dict.fromkeys(request.prompt_token_ids for request in trace.requests))
    if len(prompts) < 2:
        raise ValueError("the trace has one prompt, so none can be held out; run at least two")
    count = min(max(1, round(share * len(prompts))), len(prompts) - 1)
    return {prompts[i] for i in torch.randperm(len(prompts), generator=generator)[:count].tolist()}


def model_of_trace(trace: "Trace") -> CachedLM:
    """Returns the model of a trace. Raises: ValueError for a trace without its model, or of another one."""
    model = trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use cp.load_trace(dir, model)")
    here, there = model.fingerprint().get("weights_sha256"), trace.fingerprint.get("weights_sha256")
    if here != there:
        raise ValueError(f"the run was made with weights {there}, {model.name} has {here}; load the run's model")
    return model


class HeadBatch(NamedTuple):
    """Holds n texts of up to t states each; shorter ones are padded at the end."""

    token_ids: Tensor
    """[n, t + 1]: the token of each state, and the one after the last."""
    states: Tensor
    """[n, t, l, m]: the target's states at the l layers that the head reads."""
    last: Tensor
    """[n, t, m]: the target's state of the last layer, from which its next token is read."""
    counts: Tensor
    """[n, t]: True where the token after a state was generated."""


@dataclass(frozen=True, eq=False)
class HeadTexts:
    """Reads the texts of a trace that generated tokens, and their states, from where the trace stores them."""

    trace: "Trace"
    model: CachedLM
    layers: tuple[int, ...]
    """Layers of the target that the head reads, at site S."""
    request_ids: tuple[int, ...]

    def token_ids(self, request_id: int) -> list[int]:
        """Returns the token ids of prompt and generated text."""
        return [*self.trace.requests[request_id].prompt_token_ids, *self.trace.committed(request_id)]

    def batch(self, request_ids: Sequence[int]) -> HeadBatch:
        """Returns a batch of texts, in float32. Raises: ValueError for states that the trace does not have."""
        parts = zip(*map(self._text, request_ids), strict=True)
        return HeadBatch(*(pad_sequence(list(part), batch_first=True) for part in parts))

    def _text(self, request_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the parts of a HeadBatch of one text."""
        token_ids, layers = self.token_ids(request_id), (*self.layers, self.model.n_layers - 1)
        try:
            states = [self.trace.states("S", layer, request_id).float() for layer in layers]
        except ValueError as error:
            wanted = tuple(sorted({*layers}))
            raise ValueError(
                f"this draft head needs S of layers {wanted}: {error}; run with capture='S', or "
                f"CaptureConfig(sites='S', layers={wanted})"
            ) from error
        if len(states[0]) != len(token_ids) - 1:
            raise ValueError(
                f"request {request_id} has states of {len(states[0])} of its {len(token_ids) - 1} tokens before the "
                "last; a head needs those of all, so begin no request from a KVSnapshot"
            )
        positions = torch.arange(len(states[0]))
        counts = positions >= self.trace.requests[request_id].num_prompt_tokens - 1
        return torch.tensor(token_ids), torch.stack(states[:-1], dim=1), states[-1], counts


def split_texts(trace: "Trace", layers: Sequence[int], settings: HeadSettings) -> tuple[HeadTexts, HeadTexts]:
    """Returns the texts of a trace to train on, and those held out. Texts of equal prompts are on one side, the same
    one for all seeds.

    Raises: ValueError for a trace without its model or of another one, of one prompt, of fewer texts than a step reads,
    and without the states.
    """
    model = model_of_trace(trace)
    held = held_out_prompts(trace, settings.held_out, torch.Generator().manual_seed(SPLIT_SEED))
    wordy = [one for one in trace.requests if len(trace.committed(one.request_id)) > settings.chain]
    sides = [[one.request_id for one in wordy if (one.prompt_token_ids in held) == is_held] for is_held in (0, 1)]
    if len(sides[0]) < settings.batch or not sides[1]:
        raise ValueError(
            f"a step draws {settings.batch} texts, the trace has {len(sides[0])} of more than {settings.chain} tokens "
            f"to train on and {len(sides[1])} held out; make a larger run, or lower batch"
        )
    trained, held_out = (HeadTexts(trace, model, tuple(layers), tuple(side)) for side in sides)
    trained.batch(trained.request_ids[:1])
    return trained, held_out


def chain_rows(module: HeadModule, batch: HeadBatch, chain: int) -> list[tuple[Tensor, Tensor]]:
    """Runs a head on texts as it drafts: from each position, a chain of `chain` tokens, all positions at once. Returns
    for each step of the chains the rows that have a target: logits [r, v] over the head's vocabulary, with gradients,
    and which of the target's distributions each should equal [r].

    Row i of step 0 holds the target's state of position i and token i + 1. Row i of step k holds what the head feeds
    back of row i of step k - 1, and token i + 1 + k of the text. It stands at position i + k, and attends to rows up to
    i of step 0 and to row i of each step between. The target's distributions are those where `batch.counts` is True.
    Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840), section 3.1, training-time test.
    Twin: tests.twins.heads_slowly.chain_losses_slowly, close(1e-5): one chain, one row at a time.
    """
    length = batch.states.shape[1]
    least = torch.finfo(torch.float32).min
    causal, own = torch.full((2, length, length), least)
    causal, own = causal.triu(1), own.fill_diagonal_(0)
    target = torch.full(batch.counts.shape, -1).masked_scatter_(batch.counts, torch.arange(int(batch.counts.sum())))
    given, cache, rows = module.entering(batch.states), DynamicCache(), []
    for k in range(chain):
        mask = torch.cat([causal, *[own] * k], dim=-1)[None, None]
        token_ids = batch.token_ids.roll(-1 - k, dims=1)[:, :length]  # the last 1 + k rows hold others; none counts
        module.given = given
        try:
            residual = module.residual(token_ids, mask, torch.arange(k, length + k)[None], cache)
        finally:
            module.given = None
        wanted = target[:, 1 + k :]
        logits = module.lm_head(module.model.norm(residual[:, : length - 1 - k][wanted >= 0]))
        rows.append((logits, wanted[wanted >= 0]))
        given = module.fed_back(residual)
    return rows


@torch.no_grad()
def read_target(model: CachedLM, batch: HeadBatch, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns what the target predicts after each of the r positions that count: probabilities [r, v] of the head's
    vocabulary, and the likeliest token [r] as id of this vocabulary, or -1 if the head lacks it.

    token_ids: the target's ids of the head's vocabulary, in ascending order; None for all.
    """
    own = torch.arange(model.d_vocab) if token_ids is None else token_ids
    ids = torch.full((model.d_vocab,), -1).index_copy_(0, own, torch.arange(len(own)))
    probs, best = [], []
    for states in batch.last[batch.counts].split(ROWS_AT_ONCE):
        whole = model.read_out(states.to(model.device, model.dtype)).float().cpu().softmax(-1).clone()
        probs.append(whole if token_ids is None else whole[:, token_ids])
        best.append(ids[whole.argmax(-1)])
    return torch.cat(probs), torch.cat(best)


class HeadTraining:
    """Trains a head's own parameters on texts, in float32, with AdamW.

    The loss of a step of the chains is the cross entropy to the target's own probabilities, over the tokens of the
    head's vocabulary, summed over the steps with weights that fall by CHAIN_DECAY.
    Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840), section 3.1, and the weights in github.com/SafeAILab/EAGLE.
    """

    def __init__(
        self,
        module: HeadModule,
        token_ids: Tensor | None,
        shared: Sequence[str],
        texts: HeadTexts,
        settings: HeadSettings,
        folder: Path | None = None,
    ) -> None:
        """module: the head, whose parameters are changed.  token_ids: as of `read_target`.  shared: names of the
        parameters that belong to the target, and stay.  folder: of the checkpoint, from which the training goes on.

        Raises: ValueError for a checkpoint of another training.
        """
        self.module, self.token_ids, self.texts, self.settings = module, token_ids, texts, settings
        weights = {name: weight for name, weight in module.named_parameters() if name not in shared}
        groups = [
            {"params": [w for w in weights.values() if w.dim() >= 2]},
            {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
        self.loop = Loop(weights, optimizer, settings, folder)

    def run(self, until: int | None = None, progress: bool = True) -> None:
        """Runs the steps that are left, up to step `until` (default: all)."""
        with TrainingProgress(self.settings.steps, self.loop.step, progress) as show:
            for at in self.loop.run(self.gradients_of, until, save_every=50):
                show(at.step, "cross entropy " + ", ".join(f"{loss:.2f}" for loss in at.losses.values()))

    def gradients_of(self, step: int) -> dict[str, float]:
        """Computes the gradients of one step. Returns the loss, in nats, of each token of a chain."""
        draws = torch.Generator().manual_seed(derive_seed(self.settings.seed, step) % 2**63)
        some = torch.randperm(len(self.texts.request_ids), generator=draws)[: self.settings.batch].tolist()
        losses = self.losses(self.texts.batch([self.texts.request_ids[i] for i in some]))
        total = torch.stack([loss * CHAIN_DECAY**k for k, loss in enumerate(losses)]).sum()
        weights = list(self.loop.weights.values())
        for weight, gradient in zip(weights, torch.autograd.grad(total, weights), strict=True):
            weight.grad = gradient
        return {f"token {k + 1}": float(loss.detach()) for k, loss in enumerate(losses)}

    def losses(self, batch: HeadBatch) -> list[Tensor]:
        """Returns the mean loss over the rows of each step of the chains, in nats."""
        probs, _ = read_target(self.texts.model, batch, self.token_ids)
        rows = chain_rows(self.module, batch, self.settings.chain)
        return [-(probs[target] * logits.log_softmax(-1)).sum(-1).mean() for logits, target in rows]

    @torch.no_grad()
    def agreement(self, texts: HeadTexts) -> list[float]:
        """Returns, for each token of a chain, in which share of the positions the head's likeliest token is the
        target's, given the text up to there."""
        hits, total = torch.zeros(2, self.settings.chain, dtype=torch.long)
        for request_id in texts.request_ids:
            batch = texts.batch([request_id])
            _, best = read_target(self.texts.model, batch, self.token_ids)
            for k, (logits, target) in enumerate(chain_rows(self.module, batch, self.settings.chain)):
                hits[k] += int((logits.argmax(-1) == best[target]).sum())
                total[k] += len(target)
        return [round(share, 4) for share in (hits / total).tolist()]


def train_head(
    training: HeadTraining, held_out: HeadTexts, out: Path, save: Callable[[Path], object], progress: bool
) -> dict[str, Json]:
    """Runs a training to its end, and writes the head to the folder `out`, and about.json. Returns what that holds.

    save: writes the head to a folder.
    about.json: model_name, weights_sha256 (of the target), training (the settings), num_texts, held_out_agreement and
    untrained_agreement (see `HeadTraining.agreement`), and cpu_seconds of the steps.
    """
    loop, model = training.loop, training.texts.model
    if not loop.notes:
        loop.notes["untrained_agreement"] = list(training.agreement(held_out))
    training.run(progress=progress)
    about: dict[str, Json] = {
        "model_name": model.name,
        "weights_sha256": str(model.fingerprint()["weights_sha256"]),
        "training": training.settings.as_dict(),
        "num_texts": len(training.texts.request_ids),
        "held_out_agreement": list(training.agreement(held_out)),
        **loop.notes,
        "cpu_seconds": round(loop.cpu_seconds, 1),
    }
    save(out)
    write_json(out / ABOUT, about)
    rmtree(out / CHECKPOINTS)
    return about


def checkpoint_folder(out: Path) -> Path:
    """Returns the folder of the checkpoint of a head that is trained in `out`. Raises: ValueError if `out` holds a
    finished head, or something else."""
    if out.exists() and not (out / CHECKPOINTS).is_dir():
        raise ValueError(f"{out} exists; choose another folder")
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    return out / CHECKPOINTS
