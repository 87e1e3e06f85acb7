"""Reads settings of a command from a YAML file; flags override them. Also defines the parameter for flags that take
several values."""

import inspect
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, ArgumentCollection, Parameter

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
    Raises: ValueError for an absent or empty file, for invalid YAML, an unknown name, a name given twice, and a value
    that is a mapping.
    """
    from cacheprobe.core.files import read_yaml

    content = read_yaml(path, "config")
    if not isinstance(content, dict) or not content:
        what = "nothing" if content is None or content == {} else f"a {type(content).__name__}"
        raise ValueError(f"{path} holds {what} instead of settings; write a line such as `seed: 3` for each")
    settings: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"unknown setting {str(key)!r} in {path}; {nearest_or_all(name, known)}")
        if name in settings:
            raise ValueError(f"{path} gives {name} twice; leave one")
        if isinstance(value, dict):
            raise ValueError(f"{name} in {path} is a mapping; write a value as on the command line, NAME:key=value,...")
        if value is not None:  # null means the default
            settings[name] = value
    return settings
