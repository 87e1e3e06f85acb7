"""The parts of TransformerLens that our own modules are built of. With bridge.py the only file that imports it."""

from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

__all__ = ["ActivationCache", "HookPoint", "HookedRootModule"]
