"""Reads YAML files of plain values in which no key is given twice; the yaml package alone would silently keep the last
of two equal keys."""

from collections.abc import Hashable
from pathlib import Path

import yaml


class StrictLoader(yaml.SafeLoader):
    """Loads YAML of plain values, without tags that build Python objects, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Returns one mapping of the file as a dict. Raises: yaml.constructor.ConstructorError if a key is given
        twice."""
        keys = [self.construct_object(key) for key, _ in node.value]
        if repeated := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"{repeated[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, StrictLoader.construct_mapping)


def read_yaml(path: Path, kind: str) -> object:
    """Returns the content of a YAML file of settings, usually a dict. kind: a word for the file in messages, such as
    "sweep".

    Raises: ValueError if the file is absent, is not UTF-8 or valid YAML, or gives a key twice.
    """
    if not path.is_file():
        raise ValueError(f"there is no {kind} file {path}; give a YAML file of settings")
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not readable as YAML ({reason}); write a line `name: value` for each") from error
