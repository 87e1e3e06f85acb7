"""Re-exports TransformerLens' ActivationCache, HookedRootModule and HookPoint. In cacheprobe, only this file and
bridge.py import TransformerLens."""

from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

__all__ = ["ActivationCache", "HookPoint", "HookedRootModule"]
