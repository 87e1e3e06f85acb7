"""Exports the drafters as `cp.drafters.NAME`. base.py says what a drafter is, and how to add one."""

from cacheprobe.drafters.base import Drafter
from cacheprobe.drafters.draft_head import DraftHead
from cacheprobe.drafters.early_exit import EarlyExit
from cacheprobe.drafters.fast_path import FastPath
from cacheprobe.drafters.model import DraftModel
from cacheprobe.drafters.ngram import NGram
from cacheprobe.drafters.replayed import Replayed
from cacheprobe.drafters.scripted import Scripted

__all__ = ["DraftHead", "DraftModel", "Drafter", "EarlyExit", "FastPath", "NGram", "Replayed", "Scripted"]
