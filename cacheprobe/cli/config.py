"""Settings of a command from a YAML file, below those given as flags; and flags that take several values."""

import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cyclopts import Parameter

FLAG = "config"

SEVERAL = Parameter(negative="", consume_multiple=1, show_default=False)
"""Of a flag that takes one value or more: --layer 3 5, and --layer 3 --layer 5 alike."""


def fill(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
    """Give a command the settings of the file that its --config names, apart from those that flags give.

    A source of arguments, in cyclopts' words.
    Raises: ValueError for a file that cannot be read as settings, and for a name that the command has not.
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
        # what has no flag is given in its order; cyclopts fills flags alone
        name, listed = argument.field_info.name, argument.field_info.kind is inspect.Parameter.VAR_POSITIONAL
        if listed and name in settings:
            value = settings.pop(name)
            words = value if isinstance(value, list) else [value]
            if not argument.tokens:
                for index, word in enumerate(words):
                    argument.append(Token(value=str(word), source=str(path), index=index))
    Dict(settings, use_commands_as_keys=False, source=str(path))(app, commands, arguments)


def read(path: Path, known: list[str]) -> dict[str, Any]:
    """The settings of a YAML file: a mapping from names as in the flags, with - or _, to values."""
    import yaml

    from cacheprobe.core.strict_yaml import strict_loader

    if not path.is_file():
        raise ValueError(f"there is no config file {path}; give the YAML file of a command's settings")
    try:
        held = yaml.load(path.read_text(encoding="utf-8"), Loader=strict_loader())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} is not readable as YAML ({said}); write a line `name: value` for each") from error
    if not isinstance(held, dict) or not held:
        what = "nothing" if held is None or held == {} else f"a {type(held).__name__}"
        raise ValueError(f"{path} holds {what} instead of settings; write a line such as `seed: 3` for each")
    settings: dict[str, Any] = {}
    for key, value in held.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"unknown setting {str(key)!r} in {path}; {remedy}")
        if name in settings:
            raise ValueError(f"{path} gives {name} twice; leave one")
        if isinstance(value, dict):
            raise ValueError(f"{name} in {path} is a mapping; write a value as on the command line, NAME:key=value,...")
        if value is not None:  # nothing said, so the default
            settings[name] = value
    return settings
