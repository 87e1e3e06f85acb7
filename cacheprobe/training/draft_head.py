"""Trains a DraftHead on the last layer's states of a trace."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cacheprobe.core.live import require_usable_process
from cacheprobe.core.noise import derive_seed
from cacheprobe.core.values import Json
from cacheprobe.engine.drafters.draft_head import DraftHead, next_states
from cacheprobe.lenses.base import unembedding_sha256
from cacheprobe.models.base import CachedLM
from cacheprobe.training.heads import held_out_prompts, model_of_trace
from cacheprobe.training.loop import Loop, TrainingProgress
from cacheprobe.training.settings import DraftHeadSettings

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


class Pairs(NamedTuple):
    """Holds n examples: the state at a token, the next token, and the state at that."""

    states: Tensor
    token_ids: Tensor
    next_states: Tensor


def train_draft_head(
    trace: "Trace", settings: DraftHeadSettings, out: Path | None = None, *, progress: bool = True
) -> DraftHead:
    """Trains a draft head on the canonical states S of a trace's last layer; returns it. Runs no pass of the model, but
    its unembedding.

    out: file in which the head is saved; None saves no file.
    head.about: model_name, training (the settings), num_states, held_out_acceptance (how often the predicted state's
    likeliest token is that of the model's own state, on held-out requests) and untrained_acceptance (the same before
    the first step).
    Raises: ValueError for a trace without its model or of another one, without these states, with fewer than two
    requests, and if `out` exists.
    """
    require_usable_process(is_computing=True)
    if out is not None and out.exists():
        raise ValueError(f"{out} exists; choose another file")
    model = model_of_trace(trace)
    generator = torch.Generator().manual_seed(settings.seed)
    trained, held = _split(trace, model, settings, generator)
    if len(trained.states) < settings.batch:
        raise ValueError(
            f"a step draws {settings.batch} tokens, the trace has {len(trained.states)} to train on; make a longer "
            "run, or lower batch"
        )
    fixed = {"mean": trained.states.mean(0), "scale": trained.states.std().clamp(min=1e-6)}
    learnt = _initial(trained.states.shape[1], settings, generator)
    before = _agreement(model, {**learnt, **fixed}, held)
    embedding = model.unembedding.detach().float().cpu()
    loop = Loop(learnt, torch.optim.Adam(learnt.values(), lr=settings.learning_rate), settings)

    def gradients_of(step: int) -> dict[str, float]:
        """Computes the gradients of one step, of the head's weights alone; returns the losses."""
        draws = torch.Generator().manual_seed(derive_seed(settings.seed, step) % 2**63)
        some = torch.randint(len(trained.states), (settings.batch,), generator=draws)
        states, wanted = trained.states[some], trained.next_states[some]
        noise = (2 * torch.rand(states.shape, generator=draws) - 1) * settings.noise * fixed["scale"]
        guessed = next_states({**learnt, **fixed}, states + noise, embedding[trained.token_ids[some]])
        of_states = nn.functional.smooth_l1_loss(guessed / fixed["scale"], wanted / fixed["scale"])
        logits = model.read_out_with_gradients(guessed.to(model.device, model.dtype)).float()
        probs = model.read_out(wanted.to(model.device, model.dtype)).float().softmax(-1).clone()
        of_tokens = -(probs * logits.log_softmax(-1)).sum(-1).mean()
        loss = of_states + settings.token_weight * of_tokens
        for weight, gradient in zip(learnt.values(), torch.autograd.grad(loss, list(learnt.values())), strict=True):
            weight.grad = gradient
        return {"states": float(of_states.detach()), "tokens": float(of_tokens.detach())}

    with TrainingProgress(settings.steps, 0, progress) as show:
        for at in loop.run(gradients_of):
            show(at.step, f"loss of states {at.losses['states']:.3f}, of tokens {at.losses['tokens']:.3f}")
    weights = {name: weight.detach().clone() for name, weight in {**learnt, **fixed}.items()}
    about: dict[str, Json] = {
        "model_name": str(trace.fingerprint["model"]),
        "training": settings.as_dict(),
        "num_states": len(trained.states) + len(held.states),
        "held_out_acceptance": round(_agreement(model, weights, held), 4),
        "untrained_acceptance": round(before, 4),
    }
    head = DraftHead(weights, unembedding_sha256(model), about)
    if out is not None:
        head.save(out)
    return head


def _split(
    trace: "Trace", model: CachedLM, settings: DraftHeadSettings, generator: torch.Generator
) -> tuple[Pairs, Pairs]:
    """Returns the pairs of (training, held-out) requests. Requests of equal prompts are on one side."""
    held = held_out_prompts(trace, settings.held_out, generator)
    sides: tuple[list[Pairs], list[Pairs]] = ([], [])
    last = model.n_layers - 1
    for request in trace.requests:
        try:
            states = trace.states("S", last, request.request_id).float().cpu()
        except ValueError as error:
            raise ValueError(
                f"a draft head needs S of the last layer: {error}; run with capture='S', or "
                f"CaptureConfig(sites='S', layers=({last},))"
            ) from error
        text = [*request.prompt_token_ids, *trace.committed(request.request_id)]
        first = len(text) - 1 - len(states)  # above 0 if the request began from a KVSnapshot
        token_ids = torch.tensor(text[first + 1 : -1], dtype=torch.long)
        sides[request.prompt_token_ids in held].append(Pairs(states[:-1], token_ids, states[1:]))
    trained, held_out = (Pairs(*map(torch.cat, zip(*side, strict=True))) for side in sides)
    return trained, held_out


def _initial(width: int, settings: DraftHeadSettings, generator: torch.Generator) -> dict[str, nn.Parameter]:
    """Returns the trained weights at step 0: small random numbers, and zeros for what leaves the MLP block."""
    made = {
        "joint": torch.randn(2 * width, width, generator=generator) * (2 * width) ** -0.5,
        "joint_bias": torch.zeros(width),
        "up": torch.randn(width, settings.hidden, generator=generator) * width**-0.5,
        "down": torch.zeros(settings.hidden, width),
    }
    return {name: nn.Parameter(one) for name, one in made.items()}


def _agreement(model: CachedLM, weights: "dict[str, Tensor]", pairs: Pairs) -> float:
    """Returns the share of pairs whose predicted state has the likeliest token of the model's own state."""
    with torch.no_grad():
        guessed = next_states(weights, pairs.states, model.unembedding.detach().float().cpu()[pairs.token_ids])
        mine, theirs = (
            model.read_out(states.to(model.device, model.dtype)).argmax(-1) for states in (guessed, pairs.next_states)
        )
    return float((mine == theirs).float().mean())
