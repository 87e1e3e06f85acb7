"""Makes the lenses and interventions that the settings of a sweep describe as texts."""

from pathlib import Path
from typing import TYPE_CHECKING

from cacheprobe.core.registry import find, parse_options
from cacheprobe.core.values import JsonDict, number
from cacheprobe.sweeps.settings import span

if TYPE_CHECKING:
    from torch import Tensor

    from cacheprobe.edits.interventions.base import Intervention
    from cacheprobe.lenses.base import Lens
    from cacheprobe.models.base import CachedLM

MADE_HERE = ("zero", "add", "mean", "resample")
NEEDS_STATES = ("mean", "resample")


def make_change(text: str, states: "Tensor | None" = None) -> "Intervention":
    """Returns an Intervention on all requests, from a text such as zero:site=T,layer=3,positions=4-9.

    states: [n, m] activations of a run without interventions, for mean and resample; by default zeros.
    Raises: ValueError for an unknown intervention, option or value.
    """
    import torch

    from cacheprobe.edits import interventions

    name, _, listed = text.partition(":")
    if name not in MADE_HERE:
        raise ValueError(
            f"intervention {text!r}: a sweep knows {', '.join(MADE_HERE)}; swap and replace need states of their own, "
            "use cp.run for them"
        )
    try:
        options: JsonDict = dict(parse_options(listed, "interventions"))
        if "positions" in options:
            options["positions"] = span(str(options["positions"]))
        if "phases" in options:
            options["phases"] = str(options["phases"]).split("+")
        first = [torch.zeros(1, 1) if states is None else states] if name in NEEDS_STATES else []
        if name == "add":
            first = [torch.full((1, 1), number("value", options.pop("value", None)))]
        return getattr(interventions, name)(*first, **options, own_fingerprint=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"intervention {text!r}: {error}; write it as in zero:site=T,layer=3") from error


def lens_folder(text: str) -> Path | None:
    """Returns the directory in the text of a lens, such as tuned:lenses/smollm2; None for "logit". Raises: ValueError
    for a lens that is neither; does not check that the directory exists."""
    if text == "logit":
        return None
    name, _, folder = text.partition(":")
    if not folder or not hasattr(find("lenses", name), "load"):
        raise ValueError(f"lens {text!r}: a sweep takes logit, or a stored lens as in tuned:DIRECTORY; else use cp.run")
    return Path(folder)


def make_lens(text: str, model: "CachedLM") -> "Lens":
    """Returns the Lens that a text such as logit or tuned:lenses/smollm2 describes, loaded for `model`."""
    folder, kind = lens_folder(text), find("lenses", text.partition(":")[0])
    return kind() if folder is None else kind.load(folder, model)
