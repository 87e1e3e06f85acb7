"""Makes the TransformerBridge of a plain model when it is asked for, and chooses which of the two runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cacheprobe.core.hook_names import is_hook_point
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import agrees, check_model, probe_ids
from cacheprobe.models.hf.shared import (
    SharedWeights,
    bridge_around,
    require_no_other_bridge,
    sharing_copy,
    user_hooks,
)
from cacheprobe.models.plain.sites import PlainSites
from cacheprobe.models.settings import one_at_a_time
from cacheprobe.models.weights import checksum_of

if TYPE_CHECKING:  # it takes seconds to load
    from cacheprobe.models.hf.bridge import BridgeLM


def bridge_of(live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str) -> "BridgeLM":
    """Returns an unchecked BridgeLM around a transformers model, which TransformerLens wraps in place. Raises:
    ModelError if TransformerLens is not installed, or does not take the model."""
    try:
        from cacheprobe.models.hf.bridge import BridgeLM
    except ImportError as absent:
        raise ModelError("a TransformerBridge needs transformer-lens; pip install transformer-lens") from absent
    return BridgeLM.wrap(live, tokenizer, name, note)


class WithBridge(PlainSites):
    """Makes the TransformerBridge of a plain model, around a copy that shares its tensors. Base class of PlainLM."""

    weights: SharedWeights
    has_own_hooks = False
    """Whether the user had PyTorch hooks on the transformers model when the present run began."""
    _bridged: "BridgeLM | ModelError | None" = None
    """The BridgeLM, or why there is none; None before it is asked for."""
    _shared: object = None
    """The list of tensors that the bridge was made of."""
    _bridge_at_first: tuple[object, ...] = ()
    """`_state_of_bridge` when the bridge was made, or given."""

    def on_path(self, path: str, heads: Sequence[str], modules: Sequence[str] = ()) -> "tuple[BridgeLM | None, str]":
        """Returns (the BridgeLM of the same weights if that is to run, else None; reason), as `choose_path` says of
        `path`, `heads` and `modules`. Raises: ModelError with the reason if the asked path is impossible."""
        require_no_other_bridge(self.live, self.name)  # whose hooks would not act
        self.weights.follow(self.name)
        if self._shared is not self.weights.taken:
            self._bridged = None  # a bridge of tensors that were replaced
        own_hook = "" if bridge_around(self.live) is not None else self.weights.mirror_hooks()
        self.has_own_hooks = bool(own_hook)
        if path == "bridge" and own_hook:
            raise ModelError(
                f"{self.name}: {own_hook} acts on the plain model alone; set it on model.bridge, or use path='auto'"
            )
        if path == "bridge":
            return self.bridged(), "bridge: as asked"
        lacking = self.lacking(heads)
        points = [name for name in modules if is_hook_point(name)]
        why = self._why_bridge() or (f"{points[0]} is a hook point of TransformerLens" if points else lacking)
        if not why:
            return None, f"plain: {own_hook} acts" if own_hook else "plain: no hook is set"
        if path == "plain":
            raise ModelError(f"{self.name} cannot run without its bridge: {why}; use path='auto' or 'bridge'")
        try:
            return self.bridged(), f"bridge: {why}"
        except ModelError as no_bridge:
            if why == lacking:  # perhaps not in the layers that are asked for
                return None, f"plain: {no_bridge}"
            raise ModelError(f"{why}; but {no_bridge}") from no_bridge

    def _why_bridge(self) -> str:
        """Returns text that says what was done to the bridge and acts there alone; "" if nothing was."""
        bridge = bridge_around(self.live)
        if bridge is None and self._bridged is not None and not isinstance(self._bridged, ModelError):
            bridge = self._bridged.bridge
        if bridge is None:
            return ""
        if (hook := next(user_hooks(bridge.original_model), None)) is not None:
            return f"{hook} may edit the model, and acts on the bridge alone"
        edited = self._state_of_bridge(bridge) != self._bridge_at_first
        return "weights of the bridge were edited that it does not share" if edited else ""

    def _state_of_bridge(self, bridge: LiveModule) -> tuple[object, ...]:
        """Returns what shows an edit of the bridge that the plain model does not see: which parameters it has, if it is
        around a copy, and the bytes of those that it does not share."""
        own = (
            [] if bridge.original_model is self.live else [id(weight) for weight in bridge.original_model.parameters()]
        )
        return own, checksum_of(self.weights.apart(bridge.original_model))

    @one_at_a_time()
    @torch.inference_mode(False)
    def bridged(self) -> "BridgeLM":
        """Returns the BridgeLM of the same weights. When it is first asked for, TransformerLens wraps a copy of the
        transformers model that shares its tensors, and the bridge is checked. Raises: ModelError if TransformerLens is
        not installed, or its bridge cannot run the model."""
        if self._bridged is None:
            try:
                self._bridged = self._made_bridge()
            except ModelError as refusal:
                self._bridged = refusal
        if isinstance(self._bridged, ModelError):
            raise self._bridged
        made = self._bridged
        made.tokenizer, made.prepend_bos, made.adapter = self.tokenizer, self.prepend_bos, self.adapter
        made.stop_token_ids, made.stop_source = self.stop_token_ids, self.stop_source
        made.operations = self.operations
        return made

    def _made_bridge(self) -> "BridgeLM":
        self._shared, is_the_users = self.weights.taken, bridge_around(self.live) is not None
        live = self.live if is_the_users else sharing_copy(self.live)
        made = bridge_of(live, self.tokenizer, self.name, self.weights_note)
        made.plain = self
        self._bridge_at_first = self._state_of_bridge(made.bridge)
        check_model(made)
        if not self.has_own_hooks and next(user_hooks(live), None) is None:
            ids = probe_ids(made)
            ours, theirs = (model.whole_logits(ids)[0].float() for model in (self, made))
            if not agrees(theirs, ours, self.dtype):
                raise ModelError(f"{self.name}: TransformerLens' bridge gives other logits than the transformers model")
        return made

    @property
    def bridge(self) -> LiveModule:
        """TransformerLens' TransformerBridge around the model's weights, made as `bridged` says. Hooks on it act in
        runs, which then take the path "bridge"."""
        return self.bridged().bridge

    @property
    def hooked_module(self) -> LiveModule:
        """The module that an ActivationCache of TransformerLens belongs to: the bridge, or the transformers model if
        none can be made."""
        try:
            return self.bridge
        except ModelError:
            return self.live
