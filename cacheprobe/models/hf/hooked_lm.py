"""Implements the parts of CachedLM that all models with TransformerLens' hook points share: capture and edits."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import starmap

from torch import Tensor
from torch.nn import Parameter

from cacheprobe.core.hook_names import hook_name, resid_pre_name
from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.experts.find import MixtureLayer
from cacheprobe.models.experts.sites import capturing_routing, editing_routers, split
from cacheprobe.models.facts import HashedWeights
from cacheprobe.models.hf.hooked import ActivationCache, HookPoint
from cacheprobe.models.hf.text import TokenText
from cacheprobe.models.output_parts import OutputParts
from cacheprobe.models.turns import computing, live_model


class HookedLM(TokenText, HashedWeights):
    """Captures and edits activations at TransformerLens' hook points. Base class of BridgeLM and ThinkingLM."""

    hooked_module: LiveModule
    """The TransformerBridge or HookedRootModule that has the hook points."""
    n_layers: int
    injected_layers: tuple[int, ...] = ()
    mixtures: Mapping[int, MixtureLayer] = {}
    """Mixtures of experts by layer."""

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
        with computing, self.hooked_module.hooks(fwd_hooks=hooks):
            yield

    def _check_sites(self, sites: Sequence[tuple[str, int]]) -> None:
        points = self.hooked_module.hook_dict  # the bridge makes it anew at every access
        if missing := [name for name in starmap(hook_name, sites) if name not in points]:
            raise ModelError(f"{self.name} has no hook {missing[0]}")

    @abstractmethod
    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts: final norm, unembedding matrix
        [v, m], bias, and the architecture's softcap or scale."""

    @property
    def unembedding(self) -> Tensor:
        """Unembedding matrix [v, m], which maps the normalised residual stream to logits. The tensor is the model's
        own, not a copy."""
        return self.output_parts().weight

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> ActivationCache:
        """Returns the given states as TransformerLens' ActivationCache. states: (site, layer) -> tensor [p, m] of p
        positions. The residual stream after a block (site S) also appears as the input of the next block, unless the
        model adds something there."""
        named = {hook_name(site, layer): value[None] for (site, layer), value in states.items()}
        for (site, layer), value in states.items():
            if site == "S" and layer + 1 < self.n_layers and layer + 1 not in self.injected_layers:
                named[resid_pre_name(layer + 1)] = value[None]  # what leaves a block enters the next
        return ActivationCache(named, self.hooked_module, has_batch_dim=True)

    def _named_weights(self) -> list[tuple[str, Parameter]]:
        return sorted(live_model(self).named_parameters(), key=lambda item: item[0])


def _edit_at(edit: StateEdit, site: str, layer: int, value: Tensor, hook: HookPoint) -> Tensor | None:
    return edit(site, layer, value)
