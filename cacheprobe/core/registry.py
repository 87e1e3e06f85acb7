"""Plug-ins: drafters, lenses, tasks and kernels, one file each, found by themselves.

A kind is a folder of cacheprobe, or a package beside it. A file in it marks what it offers with
`@register("drafters", "early_exit")`; the folder's files are imported at the first question about that kind. The
folder's package may say in a mapping INSTEAD what to write for names that are known elsewhere.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

P = TypeVar("P")

BESIDE = {"kernels": "cacheprobe_kernels"}
"""Kinds that are a package of their own: cacheprobe runs without what they need."""

_ONE_OF = {"lenses": "lens"}
"""What one plug-in is called, of kinds whose plural has more than an s."""

_plugins: dict[str, dict[str, Any]] = {}
_scanned: set[str] = set()


def register(kind: str, name: str) -> Callable[[P], P]:
    """Decorator: offer a class or function under `name`. A name belongs to one plug-in of its kind."""

    def keep(plugin: P) -> P:
        held = _plugins.setdefault(kind, {})
        if name in held and _origin(held[name]) != _origin(plugin):  # the same one again: its file was reloaded
            raise ValueError(f"two {kind} are named {name!r}: {_origin(held[name])} and {_origin(plugin)}; rename one")
        held[name] = plugin
        return plugin

    return keep


def available(kind: str) -> MappingProxyType[str, Any]:
    """Every plug-in of a kind by name, in alphabetical order."""
    _scan(kind)
    return MappingProxyType(dict(sorted(_plugins.get(kind, {}).items())))


def names(kind: str) -> tuple[str, ...]:
    """Sorted names of the plug-ins of a kind."""
    return tuple(available(kind))


def find(kind: str, name: str) -> Any:
    """The plug-in of that kind and name, with - or _ in it."""
    plugins = available(kind)
    if (found := same_name(name, plugins)) is None:
        instead: dict[str, str] = getattr(importlib.import_module(_package(kind)), "INSTEAD", {})
        choice = f"write {instead[name]} here" if name in instead else "choose one"
        raise ValueError(
            f"unknown name {name!r} among {kind}; there are {', '.join(plugins) or 'none'}; "
            f"{choice}, or add a file to {_package(kind).replace('.', '/')} that registers it"
        )
    return plugins[found]


def same_name(name: str, among: Iterable[str]) -> str | None:
    """The one of `among` that differs from `name` in - and _ at most; None where there is none."""
    known = list(among)
    same = (other for other in known if other.replace("-", "_") == name.replace("-", "_"))
    return name if name in known else next(same, None)


def make(kind: str, text: str, **options: Any) -> Any:
    """NAME or NAME:key=value,... to the plug-in's object. Raises: ValueError where it cannot be made of them."""
    name, _, listed = text.partition(":")
    options |= parse_options(listed, kind)
    plugin = find(kind, name)
    _require_settings(plugin, f"{_ONE_OF.get(kind, kind.removesuffix('s'))} {name!r}", options)
    try:
        return plugin(**options)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r} cannot be made from {options}: {error}") from error


def _require_settings(plugin: Any, what: str, options: dict[str, Any]) -> None:
    """Raises: ValueError for a setting that the plug-in does not have, and for one that it needs and is not given."""
    fields = inspect.signature(plugin).parameters
    known = [name for name, field in fields.items() if field.kind in (field.POSITIONAL_OR_KEYWORD, field.KEYWORD_ONLY)]
    needed = [name for name in known if fields[name].default is inspect.Parameter.empty and name not in options]
    takes_any = any(field.kind is field.VAR_KEYWORD for field in fields.values())
    unknown = [] if takes_any else [name for name in options if name not in known]
    has = f"it has {', '.join(known)}" if known else "it has none"
    if unknown:
        near = get_close_matches(unknown[0], known, 1, 0.5)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{what} has no setting {unknown[0]!r}; {meant}{has}")
    if needed:
        raise ValueError(f"{what} needs the setting {needed[0]!r}, as in NAME:{needed[0]}=...; {has}")


def parse_options(listed: str, what: str) -> dict[str, Any]:
    """key=value,... as a mapping; values are numbers, true or false where they read as such."""
    options = {}
    for item in filter(None, listed.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{what} option {item!r} is not key=value, as in early_exit:layer=20")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _scan(kind: str) -> None:
    """Import the files of the kind's package, once; a file that does not import says so itself."""
    if kind in _scanned:
        return
    package_name = _package(kind)
    try:
        package = importlib.import_module(package_name)
    except ModuleNotFoundError as missing:
        if missing.name != package_name or kind in BESIDE:
            raise
        raise ValueError(f"unknown kind of plug-in {kind!r}: there is no folder cacheprobe/{kind}") from None
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package_name}.{module.name}")
    _scanned.add(kind)


def _package(kind: str) -> str:
    return BESIDE.get(kind, f"cacheprobe.{kind}")


def _origin(plugin: Any) -> str:
    return f"{plugin.__module__}.{plugin.__qualname__}"
