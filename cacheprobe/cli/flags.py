"""Gives a command one flag for each field of its settings dataclasses, with the field's docstring as help."""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from textwrap import dedent
from typing import Annotated, Any, get_origin, get_type_hints

from cyclopts import Parameter

from cacheprobe.cli.config import SEVERAL

Command = Callable[..., Any]


def with_flags(command: Command) -> Command:
    """Decorates a command: every parameter that is a settings dataclass becomes one flag for each field.

    The field's docstring is the flag's help. A field with metadata {"flag": False} is no flag and keeps its default.
    """
    given = inspect.signature(command).parameters
    groups: dict[str, type] = {
        name: one.annotation
        for name, one in given.items()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }
    flags = [flag for name, one in given.items() for flag in (_flags(groups[name]) if name in groups else [one])]

    @wraps(command)
    def run(*args: Any, **values: Any) -> Any:
        """Makes the settings dataclasses from the flags in `values`, and runs the command with them."""
        for name, settings in groups.items():
            named = {field.name: values.pop(field.name) for field in flagged(settings) if field.name in values}
            values[name] = settings(**named)
        return command(*args, **values)

    vars(run)["__signature__"] = inspect.Signature(flags)  # read by cyclopts, and by inspect.signature
    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return run


def flagged(settings: type) -> list[Field]:
    """Returns the fields of a settings dataclass that are flags, as a list: all but those with metadata {"flag":
    False}."""
    return [field for field in fields(settings) if field.metadata.get("flag", True)]


def _flags(settings: type) -> Iterator[inspect.Parameter]:
    kinds, docs = get_type_hints(settings), attribute_docs(settings)
    for field in flagged(settings):
        kind = kinds[field.name]
        several = (SEVERAL,) if get_origin(kind) is tuple else ()
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, *several, Parameter(help=docs.get(field.name))],
        )


def attribute_docs(settings: type) -> dict[str, str]:
    """Returns a dict from field name to the docstring below the field of a class, read from the source; {} without a
    source file."""
    try:
        source = inspect.getsource(settings)
    except OSError:
        return {}
    (class_node,) = ast.parse(dedent(source)).body
    assert isinstance(class_node, ast.ClassDef)
    docs = {}
    for field, doc in zip(class_node.body, class_node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            docs[ast.unparse(field.target)] = inspect.cleandoc(str(doc.value.value))
    return docs
