"""Drafters: plug-ins that propose tokens. One file each. The verifier trusts none of them."""

from cacheprobe.drafters.early_exit import EarlyExit
from cacheprobe.drafters.fast_path import FastPath
from cacheprobe.drafters.scripted import Scripted

__all__ = ["EarlyExit", "FastPath", "Scripted"]
