"""Defines DictionaryConfig, what a dictionary's formulas need beside its weights, and reads it from SAELens'
cfg.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheprobe.core.hook_names import site_of_hook
from cacheprobe.core.values import Json, whole_number

STANDARD, GATED, TOPK, JUMPRELU = "standard", "gated", "topk", "jumprelu"
TRANSCODERS = {
    "transcoder": STANDARD,
    "skip_transcoder": STANDARD,
    "jumprelu_transcoder": JUMPRELU,
    "jumprelu_skip_transcoder": JUMPRELU,
}
"""SAELens' names of transcoders, with the activation that each has."""
ARCHITECTURES = (STANDARD, GATED, TOPK, JUMPRELU, *TRANSCODERS)
NORMALISATIONS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")
"""SAELens' names. `expected_average_only_in` is a factor that is folded into the weights, so nothing is left to do."""
WIDEST = 2**26
"""Largest number of inputs or features that a config may name."""


class DictionaryError(ValueError):
    """Raised if a dictionary cannot be read, or does not fit a model or the given states."""


@dataclass(frozen=True, kw_only=True)
class DictionaryConfig:
    """Holds the settings of a dictionary, by SAELens' names. Raises: DictionaryError for values that SAELens lacks."""

    architecture: str
    d_in: int
    """Width of the states that are encoded."""
    d_sae: int
    """Number of features."""
    d_out: int
    """Width of the decoded states; that of `d_in` for all but transcoders."""
    hook: str | None = None
    """TransformerLens' name of the hook point whose states are encoded; None if the files do not name it."""
    hook_out: str | None = None
    """The hook point that a transcoder predicts; None for other dictionaries."""
    apply_b_dec_to_input: bool = True
    """Whether the decoder's bias is subtracted from the states before the encoder."""
    normalize_activations: str = "none"
    """How states are scaled before the encoder; see `NORMALISATIONS`."""
    reshape_activations: str = "none"
    """"hook_z" if the states are those of all heads, [h, d], joined."""
    k: int | None = None
    """For topk: how many features of a state are kept."""
    rescale_acts_by_decoder_norm: bool = False
    """For topk: whether activations are multiplied by the norm of their feature's decoder row."""
    about: Mapping[str, Json] = field(default_factory=dict, repr=False)
    """Further entries of the file's config, such as the model's name."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise DictionaryError(
                f"unknown architecture {self.architecture!r:.60}; cacheprobe reads {', '.join(ARCHITECTURES)}"
            )
        for name in ("d_in", "d_sae", "d_out"):
            if not 1 <= _whole(name, getattr(self, name)) <= WIDEST:
                raise DictionaryError(f"{name} is {getattr(self, name)!r:.60}; it must be 1 to {WIDEST}")
        if self.normalize_activations not in NORMALISATIONS:
            raise DictionaryError(
                f"unknown normalize_activations {self.normalize_activations!r:.60}; cacheprobe reads "
                f"{', '.join(NORMALISATIONS)}"
            )
        if self.reshape_activations not in ("none", "hook_z"):
            raise DictionaryError(f"unknown reshape_activations {self.reshape_activations!r:.60}; it is none or hook_z")
        if self.architecture == TOPK and not 1 <= _whole("k", self.k) <= self.d_sae:
            raise DictionaryError(f"k is {self.k!r:.60}; a topk dictionary keeps 1 to {self.d_sae} features")
        if self.is_transcoder and self.apply_b_dec_to_input:
            raise DictionaryError("apply_b_dec_to_input must be false for a transcoder, whose bias is of its output")
        if not self.is_transcoder and self.d_out != self.d_in:
            raise DictionaryError(f"d_out is {self.d_out} and d_in {self.d_in}; only a transcoder has two widths")

    @property
    def activation(self) -> str:
        """One of standard, gated, topk and jumprelu; for a transcoder, that of its encoder."""
        return TRANSCODERS.get(self.architecture, self.architecture)

    @property
    def is_transcoder(self) -> bool:
        """True if the decoder predicts another hook point than the one that is encoded."""
        return self.architecture in TRANSCODERS

    @property
    def has_skip(self) -> bool:
        """True for a transcoder that also adds a linear map of its input."""
        return "skip" in self.architecture

    @property
    def place(self) -> tuple[str, int] | None:
        """(site, layer) of the states that are encoded, as in a trace; None if a trace has no such site."""
        return site_of_hook(self.hook) if self.hook else None

    @property
    def place_out(self) -> tuple[str, int] | None:
        """(site, layer) of the states that the decoder gives; None if a trace has no such site."""
        return site_of_hook(self.hook_out) if self.hook_out else None if self.is_transcoder else self.place


def config_of_saelens(stored: Mapping[str, Json], hook: str | None = None) -> DictionaryConfig:
    """Returns the DictionaryConfig of a SAELens cfg.json, of version 6 or of an earlier one.

    hook: replaces the hook point that the file names.
    Source: SAELens 6.54, `handle_pre_6_0_config`, and the config classes in saes/.
    Raises: DictionaryError for missing entries and for values that SAELens does not have.
    """
    metadata = stored.get("metadata")
    about: dict[str, Json] = dict(metadata) if isinstance(metadata, dict) else dict(stored)
    activation, given = stored.get("activation_fn", stored.get("activation_fn_str")), stored.get("activation_fn_kwargs")
    kwargs = given if isinstance(given, dict) else {}
    architecture = str(stored.get("architecture", STANDARD))
    if activation == TOPK and kwargs.get("k") is not None:
        architecture = TOPK
    if architecture == TOPK and stored.get("k", kwargs.get("k")) is None and metadata is None:
        raise DictionaryError("a topk dictionary must name k")
    named = hook or _text("hook_name", about.get("hook_name", stored.get("hook_name", stored.get("hook_point"))))
    is_transcoder = architecture in TRANSCODERS
    normalisation = stored.get("normalize_activations")
    if isinstance(normalisation, bool) or normalisation is None:  # how versions below 6 said it
        normalisation = "expected_average_only_in" if normalisation else "none"
    d_in = _whole("d_in", stored.get("d_in"))
    return DictionaryConfig(
        architecture=architecture,
        d_in=d_in,
        d_sae=_whole("d_sae", stored.get("d_sae")),
        d_out=_whole("d_out", stored.get("d_out", 768)) if is_transcoder else d_in,  # 768 is SAELens' default
        hook=named,
        hook_out=_text("hook_name_out", about.get("hook_name_out")) if is_transcoder else None,
        apply_b_dec_to_input=_flag(stored, "apply_b_dec_to_input", not is_transcoder),
        normalize_activations=str(normalisation),
        reshape_activations=str(
            stored.get("reshape_activations", "hook_z" if metadata is None and "hook_z" in (named or "") else "none")
        ),
        k=_whole("k", stored.get("k", kwargs.get("k", 100))) if architecture == TOPK else None,
        rescale_acts_by_decoder_norm=_flag(stored, "rescale_acts_by_decoder_norm", False),
        about=about,
    )


def _whole(name: str, value: object) -> int:
    """Returns a whole number. Raises: DictionaryError that names `name` for anything else."""
    try:
        return whole_number(name, value)
    except ValueError as error:
        raise DictionaryError(str(error)) from None


def _text(name: str, value: object) -> str | None:
    """Returns a text of at most 200 characters, or None. Raises: DictionaryError for anything else."""
    if value is None or (isinstance(value, str) and len(value) <= 200):
        return value
    raise DictionaryError(f"{name} must be a short text, got {value!r:.60}")


def _flag(stored: Mapping[str, Json], name: str, default: bool) -> bool:
    """Returns an entry that is true or false. Raises: DictionaryError for anything else."""
    value = stored.get(name, default)
    if not isinstance(value, bool):
        raise DictionaryError(f"{name} must be true or false, got {value!r:.60}")
    return value
