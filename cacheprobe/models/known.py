"""Answers questions about a model from its name alone, before torch is imported or weights are read."""

import json
import socket
import threading
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from cacheprobe.core.values import Json
from cacheprobe.models.errors import ModelError

SMOLLM2 = "smollm2-135m"
SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SECONDS_TO_CONNECT = 2.0
"""A hub that needs more seconds to accept a connection counts as unreachable; the hub's own client waits half a
minute."""

_NAMES_OF_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "data", _PACKAGE.parent / "data")
"""The wheel's folder comes first: a folder named data beside an installed package may belong to someone else."""


def require_known(name: str) -> None:
    """Checks that a model of this name can exist: shipped, in a directory, downloaded before, or on the hub.

    Raises: ModelError naming the most similar known name, within a few seconds.
    """
    if not name.strip():
        raise ModelError("the model's name is empty; give a name, a directory or a model")
    if name in shipped() or Path(name).is_dir():
        return
    near = _nearest(name)
    meant = f"; did you mean {near}?" if near else ";"
    if is_path(name):
        raise ModelError(f"there is no directory {name}{meant} give an existing one, or a hub name such as 'gpt2'")
    if _in_hub_cache(name, "config.json") is not None:
        return
    if near and "/" not in name:
        raise ModelError(f"unknown model {name!r}{meant} {_choice()}")
    if why := why_no_hub():
        raise ModelError(f"unknown model {name!r}{meant} it is not on this machine and {why}; {_choice()}")


def shipped() -> list[str]:
    """Returns the names of the models that come with the package, or with a package that cacheprobe names."""
    return [SMOLLM2, *shipped_names("checkpoints")]


def is_path(name: str) -> bool:
    """Returns whether a name can only be a directory: hub names never have this form."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def why_no_hub() -> str:
    """Returns why the Hugging Face hub cannot be reached, as text; "" if the hub accepts a connection."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"
    address = getproxies().get(urlsplit(constants.ENDPOINT).scheme) or constants.ENDPOINT
    found = urlsplit(address if "//" in address else f"//{address}")
    where = (found.hostname or "", found.port or (80 if found.scheme == "http" else 443))
    connected: list[bool] = []

    def connect() -> None:
        """Tries one TCP connection; appends True to the list of successes if it is accepted."""
        try:
            socket.create_connection(where, SECONDS_TO_CONNECT).close()
        except OSError:
            return
        connected.append(True)

    asking = threading.Thread(target=connect, daemon=True)  # looking up an address has no time limit of its own
    asking.start()
    asking.join(SECONDS_TO_CONNECT)
    return "" if connected else f"{where[0]} cannot be reached"


def num_layers(name: str) -> int | None:
    """Returns a model's number of blocks from its config file; None if there is no such file on this machine."""
    folder = shipped_folder("checkpoints", name) if "/" not in name else None
    path = (folder or Path(name)) / "config.json"
    if name == SMOLLM2:
        path = _smollm2_config()
    elif folder is None and not Path(name).is_dir():
        path = _in_hub_cache(name, "config.json")
    try:
        held = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        return _depth(held)
    except (OSError, ValueError, AttributeError):
        return None


def _depth(held: Json) -> int | None:
    """Returns the number of blocks that a config file's content names, also in a part of it."""
    if not isinstance(held, dict):
        return None
    for config in (held, held.get("text_config"), held.get("config")):
        for key in _NAMES_OF_DEPTH:
            if isinstance(config, dict) and isinstance(found := config.get(key), int) and type(found) is int:
                return found
    return None


def _smollm2_config() -> Path | None:
    from cacheprobe.models.smollm2 import smollm2_if_converted

    directory = smollm2_if_converted()
    return directory / "config.json" if directory is not None else _in_hub_cache(SMOLLM2_ON_HUB, "config.json")


def _in_hub_cache(name: str, file: str) -> Path | None:
    """Returns the path of a file of a hub model if it was downloaded before, else None. Uses no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file)
    except ValueError:  # the hub has no such names
        return None
    return Path(found) if isinstance(found, str) else None


def _nearest(name: str) -> str:
    """Returns the most similar name among shipped models and local model directories; "" if none is similar."""
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
    """Returns the folder of a shipped item, such as ("checkpoints", "coinflip-thinking"); None if there is none."""
    found = (place / kind / name for place in _PLACES)
    return next((folder for folder in found if folder.is_dir()), None)


def shipped_names(kind: str) -> list[str]:
    """Returns the sorted names of the shipped items of one kind, such as "checkpoints"."""
    return sorted(
        {p.name for place in _PLACES if (place / kind).is_dir() for p in (place / kind).iterdir() if p.is_dir()}
    )
