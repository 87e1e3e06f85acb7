"""Runs a whole LoRA training: loads a model by name, trains, and writes a folder for `load_model(adapter=...)`."""

import json
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.values import JsonDict
from cacheprobe.models.hf.adapters import CONFIG, TRAINING, WEIGHTS, base_sha256, file_sha256
from cacheprobe.models.loaders import plain_model
from cacheprobe.tasks.drawing import HELD_OUT_NAMES
from cacheprobe.training.loop import TrainingProgress, other_settings
from cacheprobe.training.lora.train import LoraTrainer
from cacheprobe.training.settings import LoraSettings

SUPERVISION = (
    "the answer's word after the question (cross-entropy over the vocabulary), and, weighted by running_weight, the "
    "state after each person on the token that completes that person's words (heads against tails alone)"
)


def train_lora(settings: LoraSettings, out: Path, *, progress: bool = True, checkpoint_every: int = 20) -> JsonDict:
    """Trains a LoRA adapter on coin-flip questions, or resumes an interrupted training in the folder `out`. Returns the
    content of training.json.

    If the training in `out` is finished, returns its record and trains no step.
    out: receives adapter_model.safetensors (float16), adapter_config.json and training.json, beside the checkpoint.
    checkpoint_every: steps between checkpoints, and between evaluations on held-out names.
    Raises: ValueError if `out` holds a training with other settings or base weights, or the adapter is not finite;
    FloatingPointError for a loss that is not finite; ModelError for a model that cannot be trained.
    """
    if (out / TRAINING).is_file():
        record = json.loads((out / TRAINING).read_text(encoding="utf-8"))
        if differing := other_settings(record["settings"], settings.as_dict()):
            raise ValueError(f"{out} holds a finished training with other settings ({differing}); give another --out")
        return record
    model, tokenizer, note = plain_model(settings.model, "float32", progress=progress)
    base_sha = base_sha256(model)
    trainer = LoraTrainer(model, tokenizer, settings, out)
    empty: JsonDict = {
        "curve": [], "seconds": 0.0, "cpu_seconds": 0.0, "tokens": 0, "starts": 0,
        "base": settings.model, "base_weights_sha256": base_sha, "base_weights_note": note,
    }  # fmt: skip
    state = trainer.loop.notes.setdefault("state", empty)
    if state["base_weights_sha256"] != base_sha:
        raise ValueError(f"{out} holds a training of other weights of {settings.model}; give another --out")
    state["starts"] += 1
    first = trainer.loop.step
    with TrainingProgress(settings.steps, first, progress) as show:
        show.say(
            f"{trainer.num_trained} numbers are trained, {trainer.num_trained * 2 / 1e6:.1f} MB in float16, "
            f"{torch.get_num_threads()} threads, from step {first}"
        )
        _run_steps(trainer, state, show, checkpoint_every)
    return save_adapter(trainer, out, state)


def _run_steps(trainer: LoraTrainer, state: JsonDict, show: TrainingProgress, checkpoint_every: int) -> None:
    """Runs the steps that are left. Before each checkpoint, updates `state` in place and adds a point to its curve."""
    settings = trainer.settings
    wall, cpu = time.monotonic() - state["seconds"], time.process_time() - state["cpu_seconds"]
    new_losses: list[dict[str, float]] = []  # of the steps since the last point of the curve
    for at in trainer.run(checkpoint_every):
        new_losses.append(at.losses)
        if at.step % checkpoint_every == 0 or at.step == settings.steps:  # the loop saves the notes next
            means = {name: round(sum(step[name] for step in new_losses) / len(new_losses), 4) for name in new_losses[0]}
            state["seconds"] = round(time.monotonic() - wall, 1)
            state["cpu_seconds"] = round(time.process_time() - cpu, 1)
            state["tokens"] += int(sum(step["tokens"] for step in new_losses))
            people = settings.people_at(at.step - 1)
            point: JsonDict = {"step": at.step, "most_people": people, "seconds": state["seconds"], **means}
            point["held_out"] = trainer.held_out_shares()
            state["curve"].append(point)
            new_losses = []
            show.say(_point_text(point))
        show(at.step, f"loss {new_losses[-1]['answer_loss_nats']:.3f} nats" if new_losses else "saved")


def save_adapter(trainer: LoraTrainer, out: Path, state: JsonDict) -> JsonDict:
    """Writes a trained LoRA adapter to the folder `out` in peft's format and float16, then training.json. Returns the
    content of training.json.

    Raises: ValueError for weights that are not finite in float16.
    """
    from peft import get_peft_model_state_dict

    tensors = {
        name: weight.detach().half().contiguous()
        for name, weight in sorted(get_peft_model_state_dict(trainer.peft_model).items())
    }
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise ValueError("the adapter's weights are not finite in float16; train with a lower learning rate")
    stored = save(tensors, {"format": "pt"})
    write_whole(out / WEIGHTS, lambda path: path.write_bytes(stored))
    config = trainer.config.to_dict() | {
        "base_model_name_or_path": trainer.settings.model,
        "target_modules": sorted(trainer.config.target_modules or ()),
        "inference_mode": True,
    }
    write_json(out / CONFIG, config, sort_keys=True)
    record: JsonDict = {
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


def _point_text(point: JsonDict) -> str:
    """Returns one point of the training curve as a line of text."""
    held_out = ", ".join(f"{people}: {share:.2f}" for people, share in point["held_out"].items())
    return (
        f"step {point['step']}: up to {point['most_people']} people, answers {point['answers_right']:.2f} right at "
        f"{point['answer_loss_nats']:.3f} nats, running states {point['states_right']:.2f}; held-out names, by people: "
        f"{held_out}"
    )
