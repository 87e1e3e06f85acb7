"""Reads YAML that holds plain values only and names every key once; plain YAML would silently keep the last of two."""

from collections.abc import Hashable

import yaml


def strict_loader() -> type[yaml.SafeLoader]:
    """Returns a loader class for `yaml.load` that refuses a key which is given twice."""

    class Strict(yaml.SafeLoader):
        """Loads plain values, without tags that build Python objects."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Hashable, object]:
        """Returns the mapping. Raises: yaml.constructor.ConstructorError if it holds a key twice."""
        keys = [loader.construct_object(key) for key, _ in node.value]
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Strict
