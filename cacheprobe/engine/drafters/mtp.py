"""Defines MTP, a drafter that runs the multi-token-prediction module of the model's own checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.engine.drafters.chain import ChainDrafter
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.models.heads.load_mtp import load_mtp
from cacheprobe.models.settings import live_model


@register("drafters", "mtp")
@dataclass(frozen=True, eq=False)
class MTP(ChainDrafter):
    """Drafts with the multi-token-prediction (MTP) module of the model's checkpoint: one more decoder layer, trained
    with the model, that predicts the token after the next from the model's last state and the next token.

    Its first draft token follows from the model's state, each further one from the module's own output. transformers
    drops the module's tensors at load, so they are read from the model's files: DeepSeek-V3 and R1, GLM-4.5 and later,
    Qwen3-Next, Qwen3.5 and later, and MiMo have one.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2. Twin: transformers' `generate(use_mtp=True)`, the same drafts.
    """

    model: CachedLM | None = None
    """The verified model, or None for that of the run. Given, a model without such a module is refused at once."""
    folder: "str | Path | None" = None
    """Folder of a module that `cacheprobe train mtp` wrote, or None for the module in the model's own files."""
    name: ClassVar[str] = "mtp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            if not hasattr(self.model, "new_cache"):
                raise ValueError(f"MTP needs a model from cp.load_model(...), got a {type(self.model).__name__}")
            self.head(self.model)

    def bind(self, model: CachedLM) -> DraftHeadLM:
        """Returns the module of this model, from its files.

        Raises: ModelError as `load_mtp`; ValueError if the drafter was given another model.
        """
        if self.model is None or self.model is model:
            return load_mtp(model, self.folder)
        if live_model(self.model) is not live_model(model):
            raise ValueError(
                f"MTP holds the module of {self.model.name}, and the run is of {model.name}; leave out model="
            )
        return self.head(self.model)
