"""Implements `cacheprobe train`. Heavy imports are made when a command runs."""

from pathlib import Path

from cyclopts import App

from cacheprobe.cli.flags import fill, with_flags
from cacheprobe.training.settings import (
    DictionarySettings,
    Eagle3Settings,
    EvaluationSettings,
    LoraSettings,
    MtpSettings,
    TunedLensSettings,
)

train = App(name="train", help="Train a model for a task.", help_format="plaintext")


@train.command(config=fill)
@with_flags
def lora(
    *,
    config: Path | None = None,
    out: Path = Path("runs/lora-coin-flip"),
    settings: LoraSettings,
    evaluation: EvaluationSettings,
    progress: bool = True,
) -> None:
    """Train a LoRA adapter on a task's questions, or evaluate one. Continues a training that was stopped.

    Parameters
    ----------
    config
        A YAML file of settings, named as these flags are; flags override them.
    out
        Directory for the adapter and the checkpoint.
    progress
        Show progress.
    """
    if evaluation.evaluate is not None:
        from cacheprobe.training.lora.evaluate import evaluate_adapter

        evaluate_adapter(
            settings.model,
            evaluation.evaluate,
            evaluation.people,
            evaluation.flip_probability,
            evaluation.questions,
            evaluation.json,
            progress,
        )
        return
    from cacheprobe.training.lora.run import train_lora

    done = train_lora(settings, out, progress=progress)
    print(
        f"{done['settings']['steps']} steps, {done['questions']} questions: {done['seconds']:.0f} s, "
        f"{done['cpu_seconds']:.0f} s of processor time, {done['threads']} threads; {done['adapter_bytes']} bytes\n"
        f"adapter: {out}"
    )


@train.command(config=fill)
def thinking_states(
    *,
    config: Path | None = None,
    task: str = "coin-flip",
    preset: str = "tiny",
    arm: str = "thinking",
    form: str | None = None,
    seed: int = 0,
    out: Path = Path("runs/thinking-states"),
    progress: bool = True,
) -> None:
    """Train a Thinking States model, or a variant (arm) for comparison. Continues a training that was stopped.

    Parameters
    ----------
    config
        A YAML file of settings, named as these flags are; flags override them.
    task
        coin-flip, variables, s3 or s5 (of `cacheprobe run`: permutations:elements=3 or 5).
    preset
        Of coin-flip: tiny, small, position-jumps, attention-crowding, no-position-jumps, paper, bare-chain.
        Of s3: tiny, full, attention-crowding.
        Of s5: tiny.
        Of variables: tiny, attention-crowding.
        Bare-chain differs from tiny in what the arm chain_of_thought writes; its other arms are those of tiny.
        Position-jumps differs from tiny in the arms without fed-back thoughts: their position ids skip ahead too.
    arm
        thinking; plain (no thoughts); no_feedback (thoughts that change nothing); chain_of_thought.
    form
        Content of the thoughts, overrides the preset's: state (after each operation), restate (the state in every
        chunk), repeat (in every chunk, the task's thought about the last operation) or delta (only on a change).
    seed
        Seed of the weights, the texts and their order.
    out
        Directory for the model and its checkpoint.
    progress
        Show progress.
    """
    from cacheprobe.training.thinking.run import summary, train_thinking

    print(summary(train_thinking(task, preset, arm, seed, out, form=form, progress=progress), out))


@train.command(config=fill)
@with_flags
def tuned_lens(
    *,
    config: Path | None = None,
    model: str = "smollm2-135m",
    out: Path = Path("runs/tuned-lens"),
    settings: TunedLensSettings,
    progress: bool = True,
) -> None:
    """Train a tuned lens on the tasks' prompts and the model's own answers, and compare it with the logit lens.

    Parameters
    ----------
    config
        A YAML file of settings, named as these flags are; flags override them.
    model
        smollm2-135m, a hub name or a local directory; it is loaded in float32.
    out
        Directory for the lens, which cp.lenses.TunedLens.load reads.
    progress
        Show progress.
    """
    from cacheprobe.models.loaders import load_model
    from cacheprobe.training.tuned_lens import comparison, train_tuned_lens

    lens = train_tuned_lens(load_model(model, dtype="float32"), settings, out, progress=progress)
    print(comparison(lens.about))
    print(f"{lens.about['tokens']} tokens, {lens.about['seconds']:.0f} s, {lens.about['threads']} threads\nlens: {out}")


@train.command(config=fill)
@with_flags
def dictionary(
    run: Path,
    *,
    config: Path | None = None,
    out: Path = Path("runs/dictionary"),
    settings: DictionarySettings,
    progress: bool = True,
) -> None:
    """Train a topk dictionary (sparse autoencoder) on the states of a stored run, and write it in SAELens' format.

    Parameters
    ----------
    run
        Directory of a saved run that kept the states.
    config
        A YAML file of settings, named as these flags are; flags override them.
    out
        Directory for the dictionary, which cp.lenses.Dictionary.load reads.
    progress
        Show progress.
    """
    from cacheprobe.trace.trace import load_trace
    from cacheprobe.training.dictionary import train_dictionary

    about = train_dictionary(load_trace(run), settings, out, progress=progress).config.about
    print(
        f"{about['num_states']} states, without {about['num_left_out']} of special tokens and first positions; "
        f"{about['variance_explained']:.1%} of the variance is explained on held-out ones, "
        f"{about['active_features']} of {settings.features} features are active\ndictionary: {out}"
    )


@train.command(config=fill)
@with_flags
def eagle3(
    *,
    config: Path | None = None,
    run: Path | None = None,
    model: str = "smollm2-135m",
    out: Path = Path("runs/eagle3"),
    seeds: int = 1,
    settings: Eagle3Settings,
    progress: bool = True,
) -> None:
    """Train EAGLE-3 draft heads on states of the model, and compare their drafts with early exit and prompt lookup.

    Parameters
    ----------
    config
        A YAML file of settings, named as these flags are; flags override them.
    run
        Directory of a saved run that kept S of the head's layers and of the last one. By default the model answers the
        tasks' prompts, and the run is stored in out/run.
    model
        smollm2-135m, gemma-3-270m, a hub name or a local directory; it is loaded in float32, or in the run's dtype.
    out
        Directory for the run and the heads: out/seed-0, which cp.drafters.Eagle3 loads, and so on.
    seeds
        Number of heads, whose seeds count up from --seed.
    progress
        Show progress.
    """
    from cacheprobe.cli.train_heads import train_heads

    print(train_heads(run, model, out, seeds, settings, progress))


@train.command(config=fill)
@with_flags
def mtp(
    *,
    config: Path | None = None,
    run: Path | None = None,
    model: str = "smollm2-135m",
    out: Path = Path("runs/mtp"),
    seeds: int = 1,
    settings: MtpSettings,
    progress: bool = True,
) -> None:
    """Train modules for multi-token prediction (MTP) on states of the model, and compare their drafts with others'.

    Parameters
    ----------
    config
        A YAML file of settings, named as these flags are; flags override them.
    run
        Directory of a saved run that kept S of the last layer. By default the model answers the tasks' prompts, and
        the run is stored in out/run.
    model
        smollm2-135m, gemma-3-270m, a hub name or a local directory; it is loaded in float32.
    out
        Directory for the run and the modules: out/seed-0, which cp.drafters.MTP(folder=...) loads, and so on.
    seeds
        Number of modules, whose seeds count up from --seed.
    progress
        Show progress.
    """
    from cacheprobe.cli.train_heads import train_heads

    print(train_heads(run, model, out, seeds, settings, progress))
