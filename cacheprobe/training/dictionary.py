"""Trains a topk dictionary on the captured states of a trace, and saves it in SAELens' format."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor, nn

from cacheprobe.core.hook_names import hook_name
from cacheprobe.core.noise import derive_seed
from cacheprobe.core.process import require_usable_process
from cacheprobe.core.values import Json
from cacheprobe.lenses.dictionaries import Dictionary, DictionaryConfig
from cacheprobe.lenses.dictionaries.formats import CONFIG
from cacheprobe.training.loop import Loop, TrainingProgress
from cacheprobe.training.settings import DictionarySettings

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def train_dictionary(
    trace: "Trace", settings: DictionarySettings, out: Path | None = None, *, progress: bool = True
) -> Dictionary:
    """Trains a topk dictionary on a trace's states at one site and layer, of rows of every status; returns it. Special
    tokens and the first position are left out, unless the settings include them.

    out: folder in which the dictionary is saved; None saves no file.
    dictionary.config.about: model_name, training (the settings), num_states, num_left_out (states of special tokens
    and first positions), variance_explained and active_features (how many were active at all), both on held-out states.
    Equal settings and states give the same bits on one machine with one number of threads.
    Raises: ValueError if the states were not captured, or are fewer than a step draws, and if `out` holds a dictionary.
    """
    require_usable_process(is_computing=True)
    if out is not None and (out / CONFIG).exists():
        raise ValueError(f"{out} holds a dictionary; choose another folder")
    rows, num_left_out = _rows(trace, settings)
    states = trace.vectors(settings.site, settings.layer, rows).float()
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(states), generator=generator)
    states, is_held = states[order], _is_held(trace, rows, settings.held_out, generator)[order]
    held, trained = states[is_held], states[~is_held]
    if len(trained) < settings.batch:
        raise ValueError(
            f"a step draws {settings.batch} states, the trace has {len(trained)} to train on at site "
            f"{settings.site} of layer {settings.layer}; make a longer run, or lower batch"
        )
    weights = initial_weights(trained, settings, generator)
    loop = Loop(weights, torch.optim.Adam(weights.values(), lr=settings.learning_rate), settings)
    config = _config(trace, settings, trained.shape[1], {})
    variance = trained.var(0).sum()

    def gradients_of(step: int) -> dict[str, float]:
        """Computes the gradients of one step; returns the share of variance that is not explained."""
        draws = torch.Generator().manual_seed(derive_seed(settings.seed, step) % 2**63)
        batch = trained[torch.randint(len(trained), (settings.batch,), generator=draws)]
        products = (batch - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
        values, features = products.topk(settings.k, dim=-1)
        kept = torch.zeros_like(products).scatter(-1, features, values.relu())
        loss = (kept @ weights["W_dec"] + weights["b_dec"] - batch).square().sum(-1).mean() / variance
        loss.backward()
        return {"unexplained": float(loss.detach())}

    with TrainingProgress(settings.steps, 0, progress) as show:
        for at in loop.run(gradients_of):
            show(at.step, f"unexplained variance {at.losses['unexplained']:.3f}")
    tensors = {name: weight.detach().clone() for name, weight in weights.items()}
    dictionary = Dictionary(config, tensors)
    features = dictionary.encode(held)
    error = (dictionary.decode(features) - held).square().sum()
    about: dict[str, Json] = {
        "num_states": len(states),
        "num_left_out": num_left_out,
        "variance_explained": round(1 - float(error / (held - trained.mean(0)).square().sum()), 4),
        "active_features": int((features > 0).any(0).sum()),
    }
    dictionary = Dictionary(_config(trace, settings, trained.shape[1], about), tensors)
    if out is not None:
        dictionary.save(out)
    return dictionary


def initial_weights(
    states: Tensor, settings: DictionarySettings, generator: torch.Generator
) -> dict[str, nn.Parameter]:
    """Returns the weights at step 0: random decoder rows of norm 1, the encoder their transpose, and the mean state as
    the decoder's bias."""
    rows = torch.randn(settings.features, states.shape[1], generator=generator)
    rows = rows / rows.norm(dim=-1, keepdim=True)
    zeros = torch.zeros(settings.features)
    made = {"W_enc": rows.T.contiguous(), "b_enc": zeros, "W_dec": rows, "b_dec": states.mean(0)}
    return {name: nn.Parameter(one.clone()) for name, one in made.items()}


def _rows(trace: "Trace", settings: DictionarySettings) -> tuple[pd.DataFrame, int]:
    """Returns (the rows whose states are trained on or held out, number of rows that were left out). Of rows that share
    a state, one is there."""
    rows = trace.row_table
    rows = rows[(rows.state_index >= 0) & (rows.num_layers > settings.layer)].drop_duplicates("state_index")
    is_left_out = trace.is_special(rows) & (not settings.include_special)
    return rows[~is_left_out], int(is_left_out.sum())


def _is_held(trace: "Trace", rows: pd.DataFrame, share: float, generator: torch.Generator) -> Tensor:
    """Returns for each row whether it is held out, [n]. All rows at one position of equal prompts are on one side:
    their states, such as those of a draft and of its verification, are nearly the same."""
    prompts = {request.request_id: request.prompt_token_ids for request in trace.requests}
    places = [(prompts[r], p) for r, p in zip(rows.request_id.tolist(), rows.position.tolist(), strict=True)]
    known = list(dict.fromkeys(places))
    count = max(1, round(share * len(known)))
    held = {known[i] for i in torch.randperm(len(known), generator=generator)[:count].tolist()}
    return torch.tensor([place in held for place in places])


def _config(trace: "Trace", settings: DictionarySettings, width: int, about: dict[str, Json]) -> DictionaryConfig:
    """Returns the config of the dictionary. about: results of the training."""
    named: dict[str, Json] = {"model_name": str(trace.fingerprint["model"]), "training": settings.as_dict(), **about}
    return DictionaryConfig(
        architecture="topk",
        d_in=width,
        d_sae=settings.features,
        d_out=width,
        hook=hook_name(settings.site, settings.layer),
        k=settings.k,
        about=named,
    )
