"""The parts of CachedLM that are the same for every module with TransformerLens' hook points."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import starmap

from torch import Tensor
from torch.nn import Parameter

from cacheprobe.core.hook_names import hook_name, resid_pre_name
from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.facts import checksum_of, sha256_of
from cacheprobe.models.hf.hooked import ActivationCache, HookPoint
from cacheprobe.models.hf.text import TokenText
from cacheprobe.models.output_parts import OutputParts
from cacheprobe.models.turns import computing, live_model


class HookedLM(TokenText, ABC):
    """Captures and edits activations at hook points, names them for TransformerLens, and hashes the weights."""

    hooked_module: LiveModule
    """The TransformerBridge or HookedRootModule that has the hook points."""
    n_layers: int
    injected_layers: tuple[int, ...] = ()
    _hashed = "", ""
    """The weights' checksum, and their hash at that time."""

    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> AbstractContextManager[None]:
        """Calls `sink` with activations inside the `with`, as CachedLM.capturing describes; then removes only the hooks
        added here."""

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Passes the activation to the sink, and ignores what it returns."""
            sink(site, layer, value)

        return self._hooked(sites, keep)

    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> AbstractContextManager[None]:
        """Lets `edit` replace activations inside the `with`, as CachedLM.editing describes."""
        return self._hooked(sites, edit)

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
        """Returns the final norm, the unembedding and its bias separately."""

    @property
    def unembedding(self) -> Tensor:
        """The matrix [v, m] that maps the normalised residual stream to logits."""
        return self.output_parts().weight

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> ActivationCache:
        """Returns TransformerLens' ActivationCache of states [p, m], keyed by (site, layer)."""
        named = {hook_name(site, layer): value[None] for (site, layer), value in states.items()}
        for (site, layer), value in states.items():
            if site == "S" and layer + 1 < self.n_layers and layer + 1 not in self.injected_layers:
                named[resid_pre_name(layer + 1)] = value[None]  # what leaves a block enters the next
        return ActivationCache(named, self.hooked_module, has_batch_dim=True)

    @property
    def weights_checksum(self) -> str:
        """Checksum of the parameters; changes after any edit of any parameter."""
        return checksum_of(self._named_weights())

    @property
    def weights_sha256(self) -> str:
        """Hash of every parameter's bytes, in the order of their names; recomputed after any edit."""
        if self._hashed[0] != (checksum := self.weights_checksum):
            self._hashed = checksum, sha256_of(self._named_weights())
        return self._hashed[1]

    def _named_weights(self) -> list[tuple[str, Parameter]]:
        return sorted(live_model(self).named_parameters(), key=lambda item: item[0])


def _edit_at(edit: StateEdit, site: str, layer: int, value: Tensor, hook: HookPoint) -> Tensor | None:
    return edit(site, layer, value)
