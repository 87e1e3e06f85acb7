"""Makes one row of the table of families: builds the tiny model, loads it, and measures every column."""

import copy
import re
from dataclasses import dataclass, field

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheprobe.models.base import ModelError
from cacheprobe.models.loaders import load_model
from cacheprobe.models.plain.files import refuse_unknown_memory
from cacheprobe.models.plain.lm import PlainLM
from tests.field.columns import COLUMNS, TinySubject
from tests.field.tiny_family import NotBuilt, families, tiny_family
from tests.field.variants import VARIANTS
from tests.quantised.writers import load_quantised

LOADS = "loads"
_LONGEST_REASON = 160


@dataclass
class Row:
    """Holds what was measured of one family, or of one variant of a family."""

    name: str
    class_name: str
    cells: dict[str, bool] = field(default_factory=dict)
    """Column -> whether the family passes; a column after a refusal is absent."""
    reasons: list[str] = field(default_factory=list)
    """Why each failed column fails, or why the family is refused."""
    is_crash: bool = False
    """Whether loading raised an error that is no refusal, or the process ended or took too long."""

    @property
    def is_green(self) -> bool:
        """Whether the family passes all columns."""
        return len(self.cells) == len(COLUMNS) + 1 and all(self.cells.values())

    @property
    def is_refused(self) -> bool:
        """Whether the family was refused by name, or not built, before anything was computed."""
        return not self.cells.get(LOADS, False) and not self.is_crash


def measure(name: str) -> Row:
    """Returns the Row of a family, such as "llama", or of a variant, such as "ALiBi". Nothing that the family does
    raises an error: an unexpected one becomes the reason of its cell.

    Raises: KeyError for an unknown name.
    """
    variant = VARIANTS.get(name)
    family, fields = (variant.family, variant.fields) if variant else (name, {})
    row = Row(name, families()[family])
    transformers.logging.set_verbosity_error()
    try:
        live = tiny_family(family, fields)
    except NotBuilt as error:
        row.cells[LOADS] = False
        row.reasons.append(_short(_unbuilt(family, row.class_name, error)))
        return row
    original = copy.deepcopy(live)
    try:
        if variant is not None and variant.quantised:
            model, original = load_quantised(variant.quantised, live)
        else:
            model = load_model(live, products="torch")
    except Exception as error:
        row.cells[LOADS] = False
        text = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        row.reasons.append(_short(text))
        row.is_crash = not isinstance(error, ModelError)
        return row
    row.cells[LOADS] = True
    assert isinstance(model, PlainLM)
    subject = TinySubject(original, list(model.blocks), model)
    for column, function in COLUMNS.items():
        try:
            reason = function(subject)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        row.cells[column] = not reason
        if reason:
            row.reasons.append(_short(f"{column}: {reason}"))
    return row


def _unbuilt(family: str, class_name: str, error: Exception) -> str:
    """Returns why a family that was not built would be refused; if its usual config does not say it, the error."""
    try:
        refuse_unknown_memory(CONFIG_MAPPING[family](), class_name)
    except ModelError as refusal:
        return str(refusal)
    except Exception:  # its config class needs arguments
        pass
    return f"not built: {error}"


def _short(reason: str) -> str:
    one_line = re.sub(r"\s+", " ", reason).strip()
    return one_line if len(one_line) <= _LONGEST_REASON else one_line[: _LONGEST_REASON - 3] + "..."
