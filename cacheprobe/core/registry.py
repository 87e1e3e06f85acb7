"""Finds plug-ins (drafters, lenses, tasks, kernels), which are one file each, by importing their folder.

A kind of plug-in is a folder of cacheprobe, or a package beside it. A file in it marks a class or function with
`@register("drafters", "early_exit")`. The folder's files are imported when a name of that kind is first looked up. The
folder's package may define a mapping INSTEAD: for a name known from elsewhere, what to write here.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

P = TypeVar("P")
Plugin: TypeAlias = Any
"""A registered class or function. Its kind fixes its type; the registry serves all kinds."""

BESIDE = {"kernels": "cacheprobe_kernels"}
"""Kinds that are a package of their own: cacheprobe runs without what they need."""

_ONE_OF = {"lenses": "lens"}
"""Singular of the kinds whose plural is not formed with an s."""

_plugins: dict[str, dict[str, Plugin]] = {}
_scanned: set[str] = set()


def register(kind: str, name: str) -> Callable[[P], P]:
    """Returns a decorator that registers a class or function as `name`. Raises: ValueError if the name is taken."""

    def keep(plugin: P) -> P:
        """Registers the plug-in and returns it unchanged."""
        known = _plugins.setdefault(kind, {})
        if name in known and _origin(known[name]) != _origin(plugin):  # equal origins: its file was reloaded
            raise ValueError(f"two {kind} are named {name!r}: {_origin(known[name])} and {_origin(plugin)}; rename one")
        known[name] = plugin
        return plugin

    return keep


def available(kind: str) -> MappingProxyType[str, Plugin]:
    """Returns every plug-in of a kind by name, in alphabetical order."""
    _scan(kind)
    return MappingProxyType(dict(sorted(_plugins.get(kind, {}).items())))


def names(kind: str) -> tuple[str, ...]:
    """Returns the sorted names of the plug-ins of a kind."""
    return tuple(available(kind))


def find(kind: str, name: str) -> Plugin:
    """Returns the plug-in of that kind and name; - and _ count as equal. Raises: ValueError for an unknown name."""
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
    """Returns the entry of `among` that equals `name`, with - and _ taken as equal; None if there is none."""
    known = list(among)
    same = (other for other in known if other.replace("-", "_") == name.replace("-", "_"))
    return name if name in known else next(same, None)


def make(kind: str, text: str, **options: object) -> Plugin:
    """Returns the object that the plug-in makes for NAME or NAME:key=value,...

    Raises: ValueError if the settings do not fit.
    """
    name, _, listed = text.partition(":")
    options |= parse_options(listed, kind)
    plugin = find(kind, name)
    _require_settings(plugin, f"{_ONE_OF.get(kind, kind.removesuffix('s'))} {name!r}", options)
    try:
        return plugin(**options)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r} cannot be made from {options}: {error}") from error


def _require_settings(plugin: Plugin, what: str, options: Mapping[str, object]) -> None:
    """Checks the names of the settings. Raises: ValueError for an unknown setting and for a missing one."""
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


def parse_options(listed: str, what: str) -> dict[str, object]:
    """Returns key=value,... as a mapping; a value that reads as a number, true or false becomes one."""
    options: dict[str, object] = {}
    for item in filter(None, listed.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{what} option {item!r} is not key=value, as in early_exit:layer=20")
        options[key] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _scan(kind: str) -> None:
    """Imports the files of the kind's package, once; an error of an import is passed on."""
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


def _origin(plugin: object) -> str:
    return f"{plugin.__module__}.{getattr(plugin, '__qualname__', '')}"
