"""Runs a whole training of a tuned lens: generates texts, trains, compares with the logit lens, and saves."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from cacheprobe.core.values import Json
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.tuned import TunedLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import choose_path
from cacheprobe.training.progress import TrainingProgress
from cacheprobe.training.tuned_lens.settings import TunedLensSettings
from cacheprobe.training.tuned_lens.text import write_texts
from cacheprobe.training.tuned_lens.train import TunedLensTrainer, divergences


def train_tuned_lens(
    model: CachedLM, settings: TunedLensSettings, out: Path | None = None, *, progress: bool = True
) -> TunedLens:
    """Trains a tuned lens for `model`, compares it with the logit lens on held-out text, and returns the tuned lens.

    out: folder in which the lens is saved; None saves no file.
    lens.about: settings, model, weights_note, tokens (used in training), held_out_tokens, kl_nats_logit and
    kl_nats_tuned (mean on the held-out text, for each layer but the last), seconds, cpu_seconds, threads. Two trainings
    with equal settings and threads on one machine give the same bits. An interrupted training leaves no files.
    Raises: LensError for a model that is not in float32, ValueError for a text length beyond the model's context.
    """
    began, began_cpu = time.monotonic(), time.process_time()
    trainer = TunedLensTrainer(model, settings)
    reader, _ = choose_path(model, "auto")
    trainer.model = reader
    texts = write_texts(
        reader, settings.steps * settings.texts, settings.length, settings.seed, "train", progress=progress
    )
    with TrainingProgress(settings.steps, 0, progress) as show:
        for at in trainer.run(texts):
            show(at.step, f"KL {at.losses['kl_nats']:.3f} nats, mean over layers")
    held_out = write_texts(reader, settings.held_out, settings.length, settings.seed, "held-out", progress=progress)
    lens = trainer.lens()
    about: dict[str, Json] = {
        "settings": settings.as_dict(),
        "model": model.name,
        "weights_note": model.weights_note,
        "tokens": texts.numel(),
        "held_out_tokens": held_out.numel(),
        "kl_nats_logit": [round(kl, 4) for kl in divergences(reader, LogitLens(), held_out).tolist()],
        "kl_nats_tuned": [round(kl, 4) for kl in divergences(reader, lens, held_out).tolist()],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - began_cpu, 1),
        "threads": torch.get_num_threads(),
    }
    lens = trainer.lens(about)
    if out is not None:
        lens.save(out)
    return lens


def comparison(about: Mapping[str, Json]) -> str:
    """Returns a text table of the KL divergences of logit lens and tuned lens on held-out text: one line for each layer
    but the last.

    about: metadata of a trained lens (`TunedLens.about`), with kl_nats_logit and kl_nats_tuned.
    """
    lines = ["layer  logit lens  tuned lens  (KL to the model's own output, nats, held-out text)"]
    logit_nats, tuned_nats = about["kl_nats_logit"], about["kl_nats_tuned"]
    assert isinstance(logit_nats, list) and isinstance(tuned_nats, list)
    pairs = zip(logit_nats, tuned_nats, strict=True)
    return "\n".join(lines + [f"{layer:5}  {logit:10.3f}  {tuned:10.3f}" for layer, (logit, tuned) in enumerate(pairs)])
