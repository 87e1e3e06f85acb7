"""Makes the lenses and interventions that the settings of a sweep describe as texts."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cacheprobe.core.registry import find, parse_options
from cacheprobe.core.registry import names as plug_in_names
from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from torch import Tensor

    from cacheprobe.edits.interventions.base import Intervention
    from cacheprobe.lenses.base import Lens
    from cacheprobe.models.base import CachedLM

MADE_HERE = ("zero", "add", "mean", "resample")
NEEDS_STATES = ("mean", "resample")
_WHOLE = ((int,), "a whole number")
_NUMBERS = {"layer": _WHOLE, "head": _WHOLE, "seed": _WHOLE, "value": ((int, float), "a number")}
"""Options of an intervention that are numbers: (allowed types, words for the error message) by name."""


class Change(NamedTuple):
    """Holds an intervention as the settings of a sweep describe it, for every request of a cell (run of
    a sweep)."""

    name: str
    where: JsonDict
    """Fields of `Intervention`: site, layer, positions, head, phases."""
    options: JsonDict
    """Further arguments: value for add, seed for resample."""


def parse_change(text: str) -> Change:
    """Parses the text of an intervention, such as zero:site=T,layer=3,positions=4-9; returns a Change.

    Raises: ValueError for an unknown intervention or option, or a combination that a sweep cannot run.
    """
    from cacheprobe.core.hook_names import SITES
    from cacheprobe.core.records import PHASES
    from cacheprobe.edits.interventions.base import EDITED_SITES, SITES_OF_HEADS

    name, _, listed = text.partition(":")
    if name not in MADE_HERE:
        raise ValueError(
            f"intervention {text!r}: a sweep knows {', '.join(MADE_HERE)}; swap and replace need states of their own, "
            "use cp.run for them"
        )
    options = parse_options(listed, "interventions")
    own = {"add": ("value",), "resample": ("seed",)}.get(name, ())
    known = ("site", "layer", "positions", "head", "phases", *own)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"intervention {text!r}: unknown option {unknown[0]!r}; there are {', '.join(known)}")
    if missing := [key for key in ("site", "layer", *(("value",) if name == "add" else ())) if key not in options]:
        raise ValueError(f"intervention {text!r} says no {missing[0]}; write it as in zero:site=T,layer=3")
    for key, (kinds, wanted) in _NUMBERS.items():
        if key in options and type(options[key]) not in kinds:
            raise ValueError(f"intervention {text!r}: {key} must be {wanted}, got {options[key]!r}")
    if options["site"] not in EDITED_SITES:
        raise ValueError(f"intervention {text!r}: unknown site; sites to change are {', '.join(EDITED_SITES)}")
    if "head" in options and options["site"] not in SITES_OF_HEADS:
        raise ValueError(
            f"intervention {text!r}: only sites {' and '.join(SITES_OF_HEADS)} have heads; leave out head="
        )
    if name in NEEDS_STATES and (options["site"] not in SITES or "head" in options):
        raise ValueError(f"intervention {text!r}: {name} takes states of a plain run, which keeps S, T and C")
    if "phases" in options:
        options["phases"] = tuple(str(options["phases"]).split("+"))
        if set(options["phases"]) - set(PHASES):
            raise ValueError(f"intervention {text!r}: unknown phase; phases are {', '.join(PHASES)}, joined by +")
    if "positions" in options:
        options["positions"] = _parse_positions(str(options["positions"]), text)
    own_options = {key: options.pop(key) for key in own if key in options}
    return Change(name, options, own_options)


def _parse_positions(listed: str, text: str) -> tuple[int, ...]:
    """Parses a number or a range as a tuple of int: "4" gives (4,), "4-6" gives (4, 5, 6). text: the whole
    intervention, for the error message."""
    first, dash, last = listed.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
        raise ValueError(f"intervention {text!r}: positions are a number or a range such as 4-9, got {listed!r}")
    return tuple(range(int(first), int(last or first) + 1))


def make_changes(change: Change, request_ids: Iterable[int], states: "Tensor | None" = None) -> "list[Intervention]":
    """Returns a list with an Intervention for each request.

    states: [n, m] activations of a run without interventions; only mean and resample need them.
    """
    import torch

    from cacheprobe.edits import interventions

    make, options = getattr(interventions, change.name), dict(change.options)
    first = [] if states is None else [states]
    if "value" in options:
        first = [torch.full((1, 1), float(options.pop("value")))]
    if change.name == "resample":
        options.setdefault("seed", 0)
    return [make(*first, **change.where, **options, request_id=i, own_fingerprint=True) for i in request_ids]


def lens_folder(text: str) -> Path | None:
    """Returns the directory in the text of a lens, such as tuned:lenses/smollm2; None for "logit".

    Raises: ValueError for an unknown lens, for "later", for a lens that is not stored in a directory, for a directory
    after "logit", and for no directory after another name. Does not check that the directory exists.
    """
    name, _, folder = text.partition(":")
    if name == "later":
        raise ValueError("lens 'later': a sweep reads Z during each run, for its table by layer; write logit")
    if name not in (known := plug_in_names("lenses")):
        raise ValueError(f"unknown lens {name!r}; there are {', '.join(known)}")
    if name == "logit":
        if folder:
            raise ValueError(f"lens {text!r}: the logit lens has no directory; write logit")
        return None
    if not hasattr(find("lenses", name), "load"):
        raise ValueError(f"lens {text!r}: a {name} lens is not stored in a directory; use cp.run with the object")
    if not folder:
        raise ValueError(f"lens {text!r}: say where it is, as in {name}:lenses/smollm2")
    return Path(folder)


def make_lens(text: str, model: "CachedLM") -> "Lens":
    """Returns the Lens that a text such as logit or tuned:lenses/smollm2 describes, loaded for `model`."""
    folder, kind = lens_folder(text), find("lenses", text.partition(":")[0])
    return kind() if folder is None else kind.load(folder, model)
