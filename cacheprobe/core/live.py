"""Names types of objects of transformers and TransformerLens that these libraries leave untyped; to Python each name is
Any. Defines ModelError, without importing torch, so that model names can be checked before it is loaded."""

from typing import Any, TypeAlias

LiveModule: TypeAlias = Any
"""A module of a loaded model of transformers or TransformerLens. torch types a module's attributes as Tensor | Module,
so a type checker cannot follow `layer.self_attn.q_proj`. Each function that takes one checks the module's family first.
"""

LiveConfig: TypeAlias = Any
"""A transformers config: the fields depend on the architecture."""

LiveTokenizer: TypeAlias = Any
"""A tokenizer of transformers, or None: its encodings and decoded texts are unions that depend on the arguments."""

ModuleValue: TypeAlias = Any
"""An argument or the output of a module's forward, as PyTorch's hooks pass them: a tensor, a tuple that begins with
one, or another object, depending on the module."""


class ModelError(ValueError):
    """Signals that a model cannot be loaded or used as requested; the message says why."""
