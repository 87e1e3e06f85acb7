"""The checker behind `--jaxtyping-packages`: beartype, for which an int is a float too, as the type system has it.

A function whose annotations name no shape is checked by beartype alone: jaxtyping binds all arguments by name for each
call, which takes most of a test's time where functions are small.
"""

import dataclasses
import inspect
import typing
from functools import partial
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))
with_shapes = jaxtyping.jaxtyped


def names_shape(hint: object) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(names_shape(part) for part in typing.get_args(hint))


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    if function is None:
        return partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and "__init__" in vars(function):
            function.__init__ = jaxtyped(function.__init__, typechecker=typechecker)
        return function
    if inspect.isfunction(function):
        try:
            if not any(names_shape(hint) for hint in typing.get_type_hints(function).values()):
                return checked(function)
        except Exception:  # a name for type checkers alone, a type that names itself: jaxtyping leaves it out
            pass
    return with_shapes(function, typechecker=typechecker)


jaxtyping.jaxtyped = jaxtyped
