"""Implements `cacheprobe import`: saves another program's generation as a run. Heavy imports are made when the command
runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from cacheprobe.cli.flags import SEVERAL, with_flags
from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.trace.recording.to_disk import ImportOutput
    from cacheprobe.trace.trace import Trace

imports = App(name="import", help="Make a run of what another program kept.", help_format="plaintext")


@dataclass(frozen=True)
class ImportFlags:
    """Holds the flags of `cacheprobe import` about the model that generated; the docstrings of the fields are the
    flags' help."""

    model: str | None = None
    """Name or directory of the model that generated; it reads every text, and its states are compared with all imported
    ones."""
    dtype: str = "auto"
    """dtype of that model: auto (that of its files), float32, bfloat16, float16 or float64."""
    tokenizer: str | None = None
    """Name or directory of a tokenizer, for texts without a model."""
    name: str | None = None
    """Name of the model to store in the run."""


@imports.command
@with_flags
def generate(
    file: Path,
    *,
    out: Path,
    overwrite: bool = False,
    memory_budget: str | None = None,
    stop: Annotated[tuple[int, ...] | None, SEVERAL] = None,
    origin: ImportFlags,
) -> None:
    """Save what Hugging Face's generate returned with hidden states as a run.

    Parameters
    ----------
    file
        safetensors file with sequences, hidden_states.PASS.BLOCK and, if kept, logits.PASS and attention_mask.
    out
        Directory for the trace.
    overwrite
        Replace the run that --out holds, and remove its report.html. The old run stays until the new one is complete.
    memory_budget
        Most memory for what is not written yet, such as 2GB; by default a quarter of what is free.
    stop
        Id of a token that ended a sequence, or several.
    """
    import cacheprobe as cp
    from cacheprobe.trace.places import require_free

    require_free(out, overwrite)
    to: ImportOutput = {"out": out, "overwrite": overwrite, "memory_budget": memory_budget}
    _report(cp.import_generate(file, stop_token_ids=stop, **_keywords(origin), **to), out)


@imports.command
@with_flags
def vllm(
    files: Annotated[tuple[Path, ...], Parameter(negative="")],
    /,
    *,
    layers: Annotated[tuple[str, ...] | None, SEVERAL] = None,
    out: Path,
    overwrite: bool = False,
    memory_budget: str | None = None,
    num_prompt_tokens: int | None = None,
    origin: ImportFlags,
) -> None:
    """Save hidden states that vLLM's ExampleHiddenStatesConnector wrote as a run.

    Parameters
    ----------
    files
        The .safetensors files, one a request, or folders of them.
    layers
        The setting eagle_aux_hidden_state_layer_ids, as in 1,2,3,4 or 1 2 3 4. Files of cacheprobe export need none.
    out
        Directory for the trace.
    overwrite
        Replace the run that --out holds, and remove its report.html. The old run stays until the new one is complete.
    memory_budget
        Most memory for what is not written yet, such as 2GB; by default a quarter of what is free.
    num_prompt_tokens
        Number of prompt tokens in each file; all by default.
    """
    import cacheprobe as cp
    from cacheprobe.trace.places import require_free

    try:
        ids = None if layers is None else [int(part) for given in layers for part in given.split(",")]
    except ValueError:
        raise ValueError(f"--layers {' '.join(layers or ())!r} is no list of numbers, as in 1,2,3,4") from None
    require_free(out, overwrite)
    to: ImportOutput = {"out": out, "overwrite": overwrite, "memory_budget": memory_budget}
    _report(cp.import_vllm(files, ids, num_prompt_tokens=num_prompt_tokens, **_keywords(origin), **to), out)


def _keywords(origin: ImportFlags) -> JsonDict:
    """Returns keywords for an import: the model's name, and the loaded model, or else the tokenizer, if given."""
    import cacheprobe as cp
    from cacheprobe.models.known import require_known

    given: JsonDict = {"name": origin.name or origin.model}
    if (source := origin.model or origin.tokenizer) is not None:
        require_known(source)
    if origin.model is not None:
        given["model"] = cp.load_model(origin.model, dtype=origin.dtype)
    elif origin.tokenizer is not None:
        from transformers import AutoTokenizer

        given["tokenizer"] = AutoTokenizer.from_pretrained(origin.tokenizer, trust_remote_code=False)
    return given


def _report(trace: "Trace", out: Path) -> None:
    """Prints what the run in `out` holds, and what it lacks."""
    print(f"{trace!r}\nstates: S of layers {', '.join(map(str, trace.store.layers))}")
    for what, why in trace.missing.items():
        print(f"missing: {what}: {why}")
    print(f"run: {out}")
