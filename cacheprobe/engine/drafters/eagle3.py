"""Defines Eagle3, a drafter with an EAGLE-3 head in one of its published layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import folder as checked_folder
from cacheprobe.core.values import listed, whole_number
from cacheprobe.engine.drafters.chain import ChainDrafter
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.convention import check_convention
from cacheprobe.models.heads.eagle3_files import load_eagle3
from cacheprobe.models.heads.lm import HeadLM


@register("drafters", "eagle3")
@dataclass(frozen=True, eq=False)
class Eagle3(ChainDrafter):
    """Drafts with an EAGLE-3 head, token by token: a block or two over the model's states at three layers.

    Published heads also draft trees of tokens; here each step has one token, as in vLLM.
    Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840).
    """

    folder: "str | Path"
    """Folder of the head, in the layout of speculators, or of SafeAILab, vLLM and SGLang."""
    layer_ids: "Sequence[int] | int | str | None" = None
    """Layers of the model that the head reads, if not those that the folder names; on a command line 2+15+27."""
    layers_are: str | None = None
    """"inputs" if a layer id is the block that a state enters, "outputs" if it is the block that the state leaves; None
    as the folder's layout has it, which is then checked by the head's own predictions."""
    verifier: str | None = None
    """The name that the head stores for its model, if the model has another name here."""
    name: ClassVar[str] = "eagle3"

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.layer_ids
        if isinstance(ids, str):  # of a command line, where commas separate options
            ids = [int(one) if one.isdecimal() else one for one in ids.split("+")]
        if ids is not None:
            ids = tuple(whole_number("a layer id of Eagle3", one) for one in listed(ids))
            object.__setattr__(self, "layer_ids", ids)

    def bind(self, model: CachedLM) -> HeadLM:
        """Returns the head in the folder. Raises: ValueError as `load_eagle3`; as `check_convention` unless the layers
        are given."""
        head = load_eagle3(
            checked_folder("folder of Eagle3", self.folder),
            model,
            layer_ids=None if self.layer_ids is None else listed(self.layer_ids),
            layers_are=self.layers_are,
            verifier=self.verifier,
        )
        if self.layer_ids is None and self.layers_are is None:
            check_convention(head, model)
        return head
