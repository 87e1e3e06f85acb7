"""Finds plug-ins (drafters, lenses, tasks, kernels) by importing every file of their folder.

A kind of plug-in is a folder of cacheprobe, such as drafters, or a separate package. A file in it marks a class or
function with `@register("drafters", "early_exit")`. The folder's files are imported when a name of that kind is first
looked up.

An installed package adds plug-ins by entry points of the group "cacheprobe.KIND", such as
[project.entry-points."cacheprobe.drafters"] repeat_last = "my_package:RepeatLast".
"""

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from cacheprobe.core.values import hint

P = TypeVar("P")
Plugin: TypeAlias = Any
"""A registered class or function. Its kind fixes its type; the registry serves all kinds."""

SEPARATE_PACKAGES = {"kernels": "cacheprobe_kernels", "findings": "cacheprobe_analyses.findings"}
"""Packages of the kinds of plug-ins that are not a folder of cacheprobe. cacheprobe runs without the packages that they
need."""

_FOLDERS = {"drafters": "cacheprobe.engine.drafters"}
"""Packages of the kinds of plug-ins whose folder is inside another."""

_plugins: dict[str, dict[str, Plugin]] = {}
_scanned: set[str] = set()


def register(kind: str, name: str) -> Callable[[P], P]:
    """Returns a decorator that registers a class or function as plug-in `name` of `kind`. The decorator raises
    ValueError if another class or function of this kind has that name; a file that is loaded again may register its own
    again."""

    def keep(plugin: P) -> P:
        """Registers a class or function as plug-in `name` of `kind`, and returns it unchanged."""
        known = _plugins.setdefault(kind, {})
        if name in known and _origin(known[name]) != _origin(plugin):  # equal origins: its file was reloaded
            raise ValueError(f"two {kind} are named {name!r}: {_origin(known[name])} and {_origin(plugin)}; rename one")
        known[name] = plugin
        return plugin

    return keep


def available(kind: str) -> MappingProxyType[str, Plugin]:
    """Returns all plug-ins of a kind, such as "drafters", as a read-only mapping from name to class or function, in
    alphabetical order. Raises: ValueError for an unknown kind."""
    _scan(kind)
    return MappingProxyType(dict(sorted(_plugins.get(kind, {}).items())))


def names(kind: str) -> tuple[str, ...]:
    """Returns the names of all plug-ins of a kind, such as "drafters", as a sorted tuple. Raises: ValueError for an
    unknown kind."""
    return tuple(available(kind))


def find(kind: str, name: str) -> Plugin:
    """Returns the class or function registered under that kind and name; - and _ in names count as equal. Raises:
    ValueError for an unknown name or kind."""
    plugins = available(kind)
    if (registered := same_name(name, plugins)) is None:
        raise ValueError(
            f"unknown name {name!r} among {kind}; there are {', '.join(plugins) or 'none'}; choose one, or add a file "
            f"to {_package(kind).replace('.', '/')} that registers it"
        )
    return plugins[registered]


def same_name(name: str, among: Iterable[str]) -> str | None:
    """Returns the entry of `among` that equals `name`, with - and _ counted as equal; None if no entry does."""
    known = list(among)
    same = (other for other in known if other.replace("-", "_") == name.replace("-", "_"))
    return name if name in known else next(same, None)


def make(kind: str, text: str, **options: object) -> Plugin:
    """Calls the plug-in named in `text`, NAME or NAME:key=value,..., with those settings and `options`, and returns the
    new object.

    Raises: ValueError for an unknown name or kind, an item without "=", an unknown or missing setting, and settings for
    which the plug-in raises TypeError.
    """
    name, _, listed = text.partition(":")
    options |= parse_options(listed, kind)
    plugin = find(kind, name)
    known = list(inspect.signature(plugin).parameters)
    try:
        return plugin(**options)
    except TypeError as error:
        near = "".join(hint(option, known) for option in options if option not in known)
        has = f"its settings are {', '.join(known) or 'none'}"
        raise ValueError(f"{kind} {name!r} cannot be made from {options}: {error}{near}; {has}") from error


def parse_options(listed: str, what: str) -> dict[str, object]:
    """Returns the text key=value,... as a dict; values that read as a number, true or false are converted. Raises:
    ValueError for an item without "="."""
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
    """Imports every file in the folder of a kind of plug-ins, once. Raises: ValueError for an unknown kind."""
    if kind in _scanned:
        return
    package_name = _package(kind)
    try:
        package = importlib.import_module(package_name)
    except ModuleNotFoundError as missing:
        if missing.name != package_name or kind in SEPARATE_PACKAGES:
            raise
        raise ValueError(f"unknown kind of plug-in {kind!r}: there is no folder cacheprobe/{kind}") from None
    for module in pkgutil.iter_modules(vars(package).get("__path__", ())):  # one file may hold a whole kind
        importlib.import_module(f"{package_name}.{module.name}")
    _scanned.add(kind)
    for entry in entry_points(group=f"cacheprobe.{kind}"):
        _load(kind, entry.name, entry.load, entry.dist.name if entry.dist is not None else entry.value)


def _load(kind: str, name: str, load: Callable[[], Plugin], package: str) -> None:
    """Registers what `load` returns, a plug-in of an installed package. One that cannot be loaded is left out with a
    warning, so that the others work."""
    try:
        register(kind, name)(load())
    except Exception as error:  # code of another package
        warnings.warn(
            f"the plug-in {name!r} among {kind}, of the package {package}, is left out: "
            f"{type(error).__name__}: {error!s:.200}; mend or uninstall that package",
            stacklevel=2,
        )


def _package(kind: str) -> str:
    return {**SEPARATE_PACKAGES, **_FOLDERS}.get(kind, f"cacheprobe.{kind}")


def _origin(plugin: object) -> str:
    return f"{plugin.__module__}.{getattr(plugin, '__qualname__', '')}"
