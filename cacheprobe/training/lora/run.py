"""Runs a whole LoRA training: from a model's name to a folder for `load_model(adapter=...)`."""

import json
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import save

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.values import Json
from cacheprobe.models.hf.adapters import CONFIG, TRAINING, WEIGHTS, base_sha256, file_sha256
from cacheprobe.models.loaders import plain_model
from cacheprobe.tasks.people import HELD_OUT_NAMES
from cacheprobe.training.checkpoint import other_settings
from cacheprobe.training.lora.settings import LoraSettings
from cacheprobe.training.lora.train import LoraTrainer
from cacheprobe.training.progress import TrainingProgress

LARGEST_ADAPTER = 5_000_000
"""In bytes."""

SUPERVISION = (
    "the answer's word after the question (cross-entropy over the vocabulary), and, weighted by running_weight, the "
    "state after each person on the token that completes that person's words (heads against tails alone)"
)


class LoraState(TypedDict):
    """The notes of an unfinished training, stored in its checkpoint."""

    curve: list[dict[str, Json]]
    """One entry for each checkpoint: step, losses and accuracies."""
    seconds: float
    cpu_seconds: float
    tokens: int
    starts: int
    """How often the training was started or resumed."""
    base: str
    base_weights_sha256: str
    base_weights_note: str


class LoraRecord(LoraState):
    """The content of training.json, which marks a training as finished."""

    adapter_sha256: str
    adapter_bytes: int
    trained_numbers: int
    questions: int
    command: str
    supervision: str
    held_out_names: list[str]
    settings: dict[str, object]
    threads: int
    cpu_capability: str
    torch: str
    transformers: str
    peft: str


def train_lora(settings: LoraSettings, out: Path, *, progress: bool = True, checkpoint_every: int = 20) -> LoraRecord:
    """Trains an adapter, or resumes an interrupted training with the same settings and folder. Returns training.json's
    content.

    out: receives adapter_model.safetensors (float16), adapter_config.json and training.json, beside the checkpoint.
    checkpoint_every: steps between checkpoints, and between evaluations on held-out names.
    Raises: ValueError if `out` holds a training with other settings, or the adapter would be too large; ModelError for
    a model that cannot be trained.
    """
    if (out / TRAINING).is_file():
        return _finished(settings, out)
    model, tokenizer, note = plain_model(settings.model, "float32", progress=progress)
    base_sha = base_sha256(model)
    trainer = LoraTrainer(model, tokenizer, settings, out)
    _refuse_large(2 * trainer.num_trained)
    empty: LoraState = {
        "curve": [], "seconds": 0.0, "cpu_seconds": 0.0, "tokens": 0, "starts": 0,
        "base": settings.model, "base_weights_sha256": base_sha, "base_weights_note": note,
    }  # fmt: skip
    state: LoraState = trainer.loop.notes.setdefault("state", empty)
    if state["base_weights_sha256"] != base_sha:
        raise ValueError(f"{out} holds a training of other weights of {settings.model}; give another --out")
    state["starts"] += 1
    first = trainer.loop.step
    with TrainingProgress(settings.steps, first, progress) as show:
        show.say(f"{_size(trainer)}, {torch.get_num_threads()} threads, from step {first}")
        _loop(trainer, state, show, checkpoint_every)
    return save_adapter(trainer, out, state)


def _loop(trainer: LoraTrainer, state: LoraState, show: TrainingProgress, checkpoint_every: int) -> None:
    settings = trainer.settings
    wall, cpu = time.monotonic() - state["seconds"], time.process_time() - state["cpu_seconds"]
    since: list[dict[str, float]] = []
    for at in trainer.run(checkpoint_every):
        since.append(at.losses)
        if at.step % checkpoint_every == 0 or at.step == settings.steps:  # the loop saves the notes next
            means = {name: round(sum(step[name] for step in since) / len(since), 4) for name in since[0]}
            state["seconds"] = round(time.monotonic() - wall, 1)
            state["cpu_seconds"] = round(time.process_time() - cpu, 1)
            state["tokens"] += int(sum(step["tokens"] for step in since))
            people = settings.people_at(at.step - 1)
            point: dict[str, Json] = {"step": at.step, "most_people": people, "seconds": state["seconds"], **means}
            point["held_out"] = {**trainer.held_out_shares()}
            state["curve"].append(point)
            since = []
            show.say(_words(state["curve"][-1]))
        show(at.step, f"loss {since[-1]['answer_loss_nats']:.3f} nats" if since else "saved")


def save_adapter(trainer: LoraTrainer, out: Path, state: LoraState) -> LoraRecord:
    """Writes the adapter in peft's format, in float16, and training.json last, which marks the folder as finished.

    Raises: ValueError for weights that are not finite in float16, and for a file above LARGEST_ADAPTER bytes.
    """
    from peft import get_peft_model_state_dict

    tensors = {
        name: weight.detach().half().contiguous()
        for name, weight in sorted(get_peft_model_state_dict(trainer.peft_model).items())
    }
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise ValueError("the adapter's weights are not finite in float16; train with a lower learning rate")
    stored = save(tensors, {"format": "pt"})
    _refuse_large(len(stored))
    write_whole(out / WEIGHTS, lambda path: path.write_bytes(stored))
    config = trainer.config.to_dict() | {
        "base_model_name_or_path": trainer.settings.model,
        "target_modules": sorted(trainer.config.target_modules or ()),
        "inference_mode": True,
    }
    write_json(out / CONFIG, config, sort_keys=True)
    record: LoraRecord = {
        **state,
        "adapter_sha256": file_sha256(out / WEIGHTS),
        "adapter_bytes": (out / WEIGHTS).stat().st_size,
        "trained_numbers": trainer.num_trained,
        "questions": trainer.loop.step * trainer.settings.batch,
        "command": trainer.settings.command(),
        "supervision": SUPERVISION,
        "held_out_names": list(HELD_OUT_NAMES),
        "settings": trainer.settings.as_dict(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "peft": version("peft"),
    }
    write_json(out / TRAINING, record, sort_keys=True)
    return record


def _refuse_large(num_bytes: int) -> None:
    if num_bytes > LARGEST_ADAPTER:
        raise ValueError(
            f"the adapter has {num_bytes} bytes in float16, {LARGEST_ADAPTER} at most; lower rank, or raise first_layer"
        )


def _finished(settings: LoraSettings, out: Path) -> LoraRecord:
    record = json.loads((out / TRAINING).read_text(encoding="utf-8"))
    if differing := other_settings(record["settings"], settings.as_dict()):
        raise ValueError(f"{out} holds a finished training with other settings ({differing}); give another --out")
    return record


def _size(trainer: LoraTrainer) -> str:
    return f"{trainer.num_trained} numbers are trained, {trainer.num_trained * 2 / 1e6:.1f} MB in float16"


def _words(point: Mapping[str, Json]) -> str:
    shares = point["held_out"]
    assert isinstance(shares, dict)
    held_out = ", ".join(f"{people}: {share:.2f}" for people, share in shares.items())
    return (
        f"step {point['step']}: up to {point['most_people']} people, answers {point['answers_right']:.2f} right at "
        f"{point['answer_loss_nats']:.3f} nats, running states {point['states_right']:.2f}; held-out names, by people: "
        f"{held_out}"
    )
