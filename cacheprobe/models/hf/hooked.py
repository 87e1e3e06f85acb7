"""Captures and edits activations at TransformerLens' hook points. In cacheprobe, only this file and bridge.py import
TransformerLens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import starmap

from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

from cacheprobe.core.hook_names import hook_name
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.experts.sites import capturing_routing, editing_routers, split
from cacheprobe.models.hf.lm import BaseLM
from cacheprobe.models.settings import model_lock

__all__ = ["ActivationCache", "HookPoint", "HookedRootModule", "HookedSites"]


class HookedSites(BaseLM):
    """Captures and edits activations at the hook points of `hooked_module`, a TransformerBridge or HookedRootModule.
    Base class of BridgeLM and ThinkingLM."""

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `sink(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. At the end only these hooks are removed."""

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Calls the sink and returns None, so that the activation stays unchanged."""
            sink(site, layer, value)

        others, routers = split(sites)
        with self._hooked(others, keep), capturing_routing(self.name, self.mixtures, routers, sink):
            yield

    @contextmanager
    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `edit(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. A returned tensor replaces the activation; None leaves the
        activation unchanged."""
        others, routers = split(sites)
        with self._hooked(others, edit), editing_routers(self.name, self.mixtures, routers, edit):
            yield

    @contextmanager
    def _hooked(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        self._check_sites(sites)
        hooks = [(hook_name(*site), partial(_edit_at, edit, *site)) for site in sites]
        with model_lock, self.hooked_module.hooks(fwd_hooks=hooks):
            yield

    def _check_sites(self, sites: Sequence[tuple[str, int]]) -> None:
        points = self.hooked_module.hook_dict  # the bridge makes it anew at every access
        if missing := [name for name in starmap(hook_name, sites) if name not in points]:
            raise ModelError(f"{self.name} has no hook {missing[0]}")


def _edit_at(edit: StateEdit, site: str, layer: int, value: Tensor, hook: HookPoint) -> Tensor | None:
    return edit(site, layer, value)
