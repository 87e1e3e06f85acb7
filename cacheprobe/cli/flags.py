"""Gives a command one flag for each field of its settings dataclasses, with the field's docstring as help, and reads
settings of a command from a YAML file; flags override them.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import App, ArgumentCollection, Parameter

from cacheprobe.core.files import read_yaml
from cacheprobe.core.values import nearest_or_all

FLAG = "config"

SEVERAL = Parameter(negative="", consume_multiple=1, show_default=False)
"""cyclopts parameter of a flag that takes one or more values: --layer 3 5 and --layer 3 --layer 5 are equal."""


def fill(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Adds the settings of a command's --config file to its arguments; flags override them. cyclopts calls this
    function before the command.

    Raises: ValueError, for example for invalid YAML and for a setting that the command does not have.
    """
    from cyclopts import Token
    from cyclopts.config import Dict

    given = next(argument for argument in arguments if argument.field_info.name == FLAG)
    if not given.tokens:
        return
    path = Path(given.tokens[-1].value)
    known = [argument.field_info.name for argument in arguments if argument.field_info.name != FLAG]
    settings = read(path, known)
    for argument in arguments:
        # an argument without a flag is filled here, since cyclopts fills flags only
        name, has_no_flag = argument.field_info.name, argument.field_info.kind is inspect.Parameter.VAR_POSITIONAL
        if has_no_flag and name in settings:
            value = settings.pop(name)
            words = value if isinstance(value, list) else [value]
            if not argument.tokens:
                for index, word in enumerate(words):
                    argument.append(Token(value=str(word), source=str(path), index=index))
    Dict(settings, use_commands_as_keys=False, source=str(path))(app, commands, arguments)


def read(path: Path, known: Sequence[str]) -> dict[str, object]:
    """Returns the settings of a YAML file as a dict, with _ in the names.

    known: names of the command's flags. In the file, - and _ in names are equal. A setting of null is left out.
    Raises: ValueError for an absent or empty file, for invalid YAML, and for an unknown name.
    """
    content = read_yaml(path, "config")
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds no settings; write a line such as `seed: 3` for each")
    settings: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"unknown setting {str(key)!r} in {path}; {nearest_or_all(name, known)}")
        if value is not None:  # null means the default
            settings[name] = value
    return settings


Command = Callable[..., Any]


def with_flags(command: Command) -> Command:
    """Decorates a command: every parameter that is a settings dataclass becomes one flag for each field.

    The field's docstring is the flag's help. `NO_FLAG` and `as_flag` of core/values.py say in a field's metadata that
    it is no flag and keeps its default, or that its flag has another name or type. A parameter of the type
    Annotated[JsonDict, settings dataclass] is a dict of the flags that were given.
    """
    parameters = inspect.signature(command).parameters
    groups = {name: group for name, one in parameters.items() if (group := _group_of(one.annotation)) is not None}
    flags = [flag for name, one in parameters.items() for flag in (_flags(*groups[name]) if name in groups else [one])]

    @wraps(command)
    def run(*args: Any, **values: Any) -> Any:
        """Makes the settings dataclasses from the flags in `values`, and runs the command with them."""
        for name, (settings, is_dict) in groups.items():
            names = {flag_name(field): field.name for field in flagged(settings)}
            given = {names[flag]: values.pop(flag) for flag in [*values] if flag in names}
            values[name] = given if is_dict else settings(**given)
        return command(*args, **values)

    vars(run)["__signature__"] = inspect.Signature(flags)  # read by cyclopts, and by inspect.signature
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


def _group_of(annotation: Any) -> tuple[type, bool] | None:
    """Returns (settings dataclass, whether the parameter is a dict of it) of an annotation; None without a
    dataclass."""
    is_dict = get_origin(annotation) is Annotated
    settings = get_args(annotation)[1] if is_dict else annotation
    return (settings, is_dict) if isinstance(settings, type) and is_dataclass(settings) else None


def flagged(settings: Any) -> list[Field]:
    """Returns the fields of a settings dataclass that are flags, as a list: all but those with `NO_FLAG`."""
    return [field for field in fields(settings) if field.metadata.get("flag", True)]


def flag_name(field: Field) -> str:
    """Returns the name of a field's flag, with _ for -."""
    return field.metadata.get("name") or field.name


def given_flags(*groups: Any) -> dict[str, Any]:
    """Returns the flags of these settings that have a value, by the names of the flags; those of the last win."""
    values = {flag_name(field): getattr(group, field.name) for group in groups for field in flagged(group)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def _flags(settings: type, is_dict: bool) -> Iterator[inspect.Parameter]:
    """Yields a keyword parameter for each flag of a settings dataclass. is_dict: a flag without a value is None."""
    kinds, docs = get_type_hints(settings), attribute_docs(settings)
    for field in flagged(settings):
        kind = field.metadata.get("kind", kinds[field.name])
        several = (SEVERAL,) if tuple in {get_origin(one) for one in (kind, *get_args(kind))} else ()
        yield inspect.Parameter(
            flag_name(field),
            inspect.Parameter.KEYWORD_ONLY,
            default=None if is_dict else field.default,
            annotation=Annotated[kind | None if is_dict else kind, *several, Parameter(help=docs.get(field.name))],
        )


def attribute_docs(settings: type) -> dict[str, str]:
    """Returns a dict from field name to the docstring below the field of a class or of a base class, read from the
    source; {} without a source file."""
    if settings is object:
        return {}
    docs = {name: doc for base in reversed(settings.__bases__) for name, doc in attribute_docs(base).items()}
    try:
        source = inspect.getsource(settings)
    except OSError:
        return docs
    (class_node,) = ast.parse(dedent(source)).body
    assert isinstance(class_node, ast.ClassDef)
    for field, doc in zip(class_node.body, class_node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs
