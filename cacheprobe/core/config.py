"""Defines the settings of a run (`EngineConfig`, `CaptureConfig`) as frozen dataclasses that check their own values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypedDict

from cacheprobe.core.hook_names import (
    ALL_SITES,
    HEAD_SITES,
    SITES,
    captured_letters,
    module_name,
    site_advice,
    site_named,
)
from cacheprobe.core.other_names import dtype_name
from cacheprobe.core.values import (
    NO_FLAG,
    JsonDict,
    KnownKeywords,
    as_flag,
    flag,
    is_flag,
    listed,
    number,
    require_one_of,
    whole_number,
)

PHASES = ("prefill", "decode", "verify")
"""Kinds of forward pass."""
STATUSES = ("committed", "superseded", "rolled_back", "abandoned")
"""Statuses of a row (one token of one pass)."""
ACCEPTANCES = ("equality", "rejection")
DETERMINISMS = ("verify", "invariant")
RUN_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*RUN_DTYPES, "float64")
"""dtypes of a model's weights."""
AUTO = "auto"
"""In place of a dtype: that of the model's files."""
KEPT_DTYPES = (*DTYPES, "int8")
"""dtypes of kept states. float64 serves as the reference that shows how exact the other dtypes are; it takes twice the
bytes of float32. int8 rounds each vector with a scale of its own (`ops.state_codec`) and takes m + 4 bytes."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Describes one token of one pass, before the pass runs, to a predicate `CaptureConfig.keep`."""

    request_id: int
    step: int
    phase: str
    """prefill, decode or verify."""
    position: int
    """Absolute position of the token."""
    token_id: int
    is_draft: bool
    """Whether the token is a draft token without a verdict."""
    num_prompt_tokens: int
    """Number of tokens of the request's prompt: positions below it are the prompt's."""


class EngineOptions(TypedDict, total=False):
    """Declares the types of the optional keywords of `run`, `reference` and `stream` that set how passes are computed.
    EngineConfig says what each does; None and a keyword that is left out mean its default."""

    window: int | None
    group: int | None
    capacity: int | None
    prefill_chunk: int | None
    prefill_group: int | None
    max_batch: int
    max_kv_tokens: int | None
    draft_length: "int | str | None"
    acceptance: str
    pad_prefill: bool | None
    determinism: str
    layers: "str | int | Iterable[int]"
    """Layers to keep states of: "all", a number or a list. Must be left out if the CaptureConfig sets layers."""
    path: str
    """"plain" (the transformers model), "bridge" (TransformerLens), or "auto": the plain model, unless the user set a
    hook or edited the bridge's weights, or the captured heads need the bridge."""


@dataclass(frozen=True)
class EngineConfig(KnownKeywords):
    """Declares the settings of the engine, such as the fixed shapes of passes and the limits of the cache: types,
    defaults, limits, and what each does, which is also the help of its command-line flag.

    `engine.shapes.choose_shapes` chooses window, group, capacity and the prefill settings where a run leaves them out.
    window, group, capacity, prefill_chunk, prefill_group, pad_prefill and determinism enter the schedule fingerprint.
    Raises: ValueError for a value of a wrong type or out of range, and for two settings that contradict each other;
    TypeError for an unknown setting.
    """

    window: int = 16
    """Token positions of a verify pass for each request (W), so at most W - 1 draft tokens are verified at once. By
    default 1 without a drafter on a CPU, otherwise 16; if the model refuses this, the first of 4, 8 and 16 that it
    accepts; at most the capacity. With window=1 no token is drafted: a verify pass is a decode of a fixed shape. If no
    group gives the same bits everywhere with a default window, 16, 8, 4, 2 and 1 are tried."""
    group: int = 4
    """Requests of a verify pass (G); dummy requests pad it to exactly G x W tokens. By default the first number for
    which every batch index gives the same bits on this machine."""
    capacity: int = 512
    """Cache slots of each request (C); prompt + max_new_tokens + window must fit. In passes of a fixed shape, attention
    runs over all C slots, masked. By default 512, or the first of 1,024, 2,048, ... that the longest request fits. Part
    of the schedule fingerprint, unless attention runs request by request: the bits are then the same for every multiple
    of 64."""
    prefill_chunk: int = field(default=32, metadata=NO_FLAG)
    """Prompt tokens of a verified request that one prefill pass takes; by default 128, or 32 if prompts are padded."""
    prefill_group: int = field(default=1, metadata=NO_FLAG)
    """Prompts of a prefill pass of verified requests; 1: each prompt alone. Dummy prompts pad a pass to exactly this
    many. By default a pass has several prompts if a trial finds that each has the bits of a pass by itself, otherwise
    one."""
    max_batch: int = 64
    """Requests in flight at once, by default 64; the others wait."""
    max_kv_tokens: int | None = None
    """Cache slots in use at once, over all requests; if the running requests need more, the newest is preempted and
    resumed later. No limit but max_batch x capacity by default."""
    draft_length: "int | str" = field(default="adaptive", metadata=as_flag(int | Literal["adaptive"]))
    """Draft tokens before each verification. "adaptive", the default: none while drafts take more time than they save;
    all that the window takes without a drafter, and for a drafter that always drafts. A number: that many, always."""
    acceptance: str = field(default="equality", metadata=NO_FLAG)
    """"equality": a draft token is accepted if the verifier chose the same token. "rejection": speculative sampling of
    requests that are not deterministic."""
    pad_prefill: bool = field(default=True, metadata=NO_FLAG)
    """Whether a prompt's last chunk is padded to the length of the others; by default only if prefill_group is above 1,
    because a pass has one shape. An unpadded chunk costs less, and its shape still depends on the prompt alone."""
    determinism: str = field(default="verify", metadata=as_flag(Literal["verify", "invariant"]))
    """How deterministic requests get their bits. "verify", the default: passes of one fixed shape, of group x window
    tokens, decide. "invariant": passes of any number of requests decide, without verifier and rollback; refused if a
    trial before the run finds that their bits depend on that number."""

    def __post_init__(self) -> None:
        counts = ("window", "group", "capacity", "prefill_chunk", "prefill_group", "max_batch")
        for name in (*counts, *(() if self.max_kv_tokens is None else ("max_kv_tokens",))):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least=1))
        if self.window > self.capacity:
            raise ValueError(f"window of {self.window} rows is larger than the capacity of {self.capacity}; lower it")
        object.__setattr__(self, "pad_prefill", flag("pad_prefill", self.pad_prefill))
        if self.prefill_group > 1 and not self.pad_prefill:
            raise ValueError(
                f"prefill passes of {self.prefill_group} prompts need one shape; set prefill_group=1, or leave "
                "pad_prefill=True"
            )
        if self.draft_length != "adaptive":
            whole_number('draft_length, if not "adaptive",', self.draft_length, at_least=1)
        require_one_of("acceptance", self.acceptance, ACCEPTANCES)
        require_one_of("determinism", self.determinism, DETERMINISMS)

    @property
    def is_invariant(self) -> bool:
        """Whether passes of any number of requests decide the tokens of deterministic requests."""
        return self.determinism == "invariant"

    def slots_needed(self, num_prompt_tokens: int, max_new_tokens: int, num_cached: int = 0) -> int:
        """Returns the largest number of cache slots that a request may write, pads included. Pads stand after the last
        token of a verify pass and of a padded prefill. The newest token is never fed, so the last pass begins at the
        token before it.

        num_cached: prompt tokens that are in the cache already; the chunks begin after them.
        """
        in_windows = num_prompt_tokens + max_new_tokens - 2 + self.window
        if not self.pad_prefill:
            return max(in_windows, num_prompt_tokens)
        num_chunks = -(-(num_prompt_tokens - num_cached) // self.prefill_chunk)  # rounded up: the last one is padded
        return max(in_windows, num_cached + num_chunks * self.prefill_chunk)


@dataclass(frozen=True)
class CaptureConfig(KnownKeywords):
    """Holds which states the recorder keeps of a run: their sites, heads and layers, of which rows, and in which dtype.

    A row (one token of one pass) keeps states if positions, every, phases, statuses and keep all allow it. Only kept
    rows are read by the lens. The tables of rows, events and ledger have every row.
    Raises: ValueError for an unknown, empty or out-of-range value; TypeError for an unknown setting.
    """

    sites: "str | None" = field(default=ALL_SITES, metadata=as_flag(str, "capture"))
    """Sites to keep: letters of S (residual stream), T (attention output), C (MLP output) and Z (lens readings at site
    S), or names such as "resid_post"; None for tokens and events alone."""
    heads: "str | Sequence[str]" = field(default=(), metadata=as_flag(tuple[str, ...]))
    """Head activations to keep: one or more of q, k, v, z and pattern; router, the experts of each token; and
    recurrent, the state of a recurrent layer after each token."""
    modules: "str | Sequence[str]" = field(default=(), metadata=as_flag(tuple[str, ...], "capture_modules"))
    """Modules of the model whose output to keep, by their names in `named_modules()`, with `*` for every kept layer:
    model.layers.*.self_attn.q_norm, lm_head. Endings: `.input`; `.query`, an attention's queries after the rotation;
    `.output[1]`, the second of several. Hook points of TransformerLens, blocks.3.attn.hook_rot_q, take the bridge."""
    layers: tuple[int, ...] | None = None
    """Layers to keep, such as 0 15 29; by default those of the run's argument `layers`, which are all."""
    positions: Sequence[int] | None = field(default=None, metadata=NO_FLAG)
    """Absolute positions to keep; None for all."""
    phases: Sequence[str] | None = field(default=None, metadata=NO_FLAG)
    """Phases to keep: one or more of prefill, decode, verify; None for all."""
    statuses: Sequence[str] | None = field(default=None, metadata=as_flag(tuple[str, ...] | None))
    """Statuses of the rows to keep, such as rolled_back (rejected draft tokens): one or more of committed, superseded,
    rolled_back, abandoned; None for all. States of a draft token are dropped at its verdict."""
    every: int = 1
    """Keep absolute positions that are multiples of this number. A draft token and the token committed in its place are
    then both kept, or neither."""
    keep: "Callable[[TokenRow], bool] | None" = field(default=None, metadata=NO_FLAG)
    """Predicate that says whether to keep a row, called before its pass, once for each row that the other settings
    allow. An error in it ends the run. Metadata store only its name."""
    dtype: str | None = field(default=None, metadata=as_flag(str | None, "capture_dtype"))
    """dtype of kept states: float32, bfloat16, float16, float64 or int8; None for the model's own. "int8" rounds each
    vector after the pass and the lens reading; states are then read as float32."""
    prompt_hypotheses: bool = field(default=False, metadata=NO_FLAG)
    """Whether Z also reads the prompt's positions before the last one."""
    top_k: int = field(default=5, metadata=NO_FLAG)
    """Tokens in a lens reading."""
    dictionary: object = field(default=None, metadata=NO_FLAG)
    """A `cp.lenses.Dictionary`: the largest features of each kept row are recorded, though its states are not kept
    unless `sites` says so. `trace.features()` gives them."""
    top_features: int = field(default=8, metadata=NO_FLAG)
    """Features of a row that are recorded, at most."""
    include_special: bool = field(default=False, metadata=NO_FLAG)
    """Whether to record features of special tokens and of the first position too; see `core.tokens.special`."""

    def __post_init__(self) -> None:
        try:
            sites = "" if self.sites is None else captured_letters(self.sites)
        except (TypeError, AttributeError):
            raise ValueError(f"capture must be a text of S, T, C and Z, or None, got {self.sites!r:.60}") from None
        if self.sites is not None and not sites and not listed(self.heads) and not listed(self.modules):
            raise ValueError("capture sites are empty: nothing would be kept; give some of S, T, C and Z, or None")
        for site in sites:
            require_one_of("site to capture", site, ALL_SITES)
        heads = [site_named(site) if isinstance(site, str) else site for site in listed(self.heads)]
        for site in heads:
            require_one_of("site of heads", site, HEAD_SITES, site_advice)
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        if dtype is not None:
            require_one_of("dtype for captured states", dtype, KEPT_DTYPES)
        kept: JsonDict = {"sites": sites, "dtype": dtype, "heads": tuple(site for site in HEAD_SITES if site in heads)}
        kept["modules"] = tuple(dict.fromkeys(map(module_name, listed(self.modules))))
        for name, known in (("phases", PHASES), ("statuses", STATUSES), ("layers", None), ("positions", None)):
            if (given := getattr(self, name)) is None:
                continue
            kept[name] = tuple(listed(given))
            if not kept[name]:
                raise ValueError(f"capture {name} is empty: nothing would be kept; use None for all")
            if known is None:
                least = 0 if name == "positions" else None
                kept[name] = tuple(whole_number(f"capture {name}: an entry", one, least) for one in kept[name])
            for one in kept[name] if known else ():
                require_one_of(f"entry of {name} to capture", one, known or ())
        kept |= {name: flag(name, getattr(self, name)) for name in ("prompt_hypotheses", "include_special")}
        kept |= {name: whole_number(name, getattr(self, name), 1) for name in ("top_k", "every", "top_features")}
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        if not (self.keep is None or callable(self.keep)):
            raise ValueError(f"capture keep must be a function of a TokenRow, or None, got {self.keep!r:.60}")

    @property
    def state_sites(self) -> tuple[str, ...]:
        """Sites at which states are kept, as a tuple in the order S, T, C."""
        return tuple(site for site in SITES if site in (self.sites or ""))

    @property
    def keeps_states(self) -> bool:
        """Whether the run keeps states, head activations, lens readings or features, and not only tokens and events."""
        return bool(self.sites or self.heads or self.modules or self.dictionary is not None)

    @property
    def reads_lens(self) -> bool:
        """Whether a lens reads the states (True if `sites` has the letter Z)."""
        return "Z" in (self.sites or "")

    def keeps_row(self, phase: str, position: int) -> bool:
        """Returns True if the states of a row of this phase and position are kept, as far as these two decide."""
        return (
            self.keeps_states
            and (self.phases is None or phase in self.phases)
            and (self.positions is None or position in self.positions)
            and position % self.every == 0
        )

    def keeps_status(self, status: str) -> bool:
        """Returns True if the states of a row of this status are kept, as far as `statuses` says."""
        return self.statuses is None or status in self.statuses

    @property
    def keep_name(self) -> str | None:
        """Name of the predicate `keep`, such as "probes.is_name"; None without one."""
        if self.keep is None:
            return None
        named = self.keep if hasattr(self.keep, "__qualname__") else type(self.keep)
        return f"{named.__module__}.{named.__qualname__}"

    def record(self) -> JsonDict:
        """Returns the settings as a dict to store with the run; of `keep`, its name; of `dictionary`, hook point, site,
        layer and SHA-256."""
        settings = {item.name: getattr(self, item.name) for item in fields(self)} | {"keep": self.keep_name}
        if self.dictionary is not None:
            names = ("hook", "site", "layer", "sha256")
            settings["dictionary"] = {name: getattr(self.dictionary, name, None) for name in names}
        return settings

    def reads_row(self, position: int, num_prompt_tokens: int) -> bool:
        """Returns True if a lens reads a kept row at this position: the row predicts a generated token, or readings of
        the prompt are wanted."""
        return self.reads_lens and (self.prompt_hypotheses or position >= num_prompt_tokens - 1)


def capture_module(*names: str) -> CaptureConfig:
    """Returns a CaptureConfig that keeps what these modules compute, and no site. names: as in
    `CaptureConfig.modules`. Raises: ValueError without a name."""
    if not names:
        raise ValueError("give the names of modules, as in named_modules(), such as model.layers.3.mlp")
    return CaptureConfig(None, modules=names)


def resolve_layers(layers: object, n_layers: int) -> tuple[int, ...]:
    """Returns, as a sorted tuple, the layer numbers that `layers` means: a number, a list of numbers, or "all" or None
    for every layer.

    Negative numbers count from the last layer. Raises: ValueError for a layer that the model does not have, an empty
    list, and anything else.
    """
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return tuple(range(n_layers))
    wanted = [whole_number("layers: a layer", layer) for layer in listed(layers)]
    if not wanted:
        raise ValueError("layers is empty: give at least one layer, or 'all'")
    for layer in wanted:
        if not -n_layers <= layer < n_layers:
            raise ValueError(f"unknown layer {layer}; the model has layers 0 to {n_layers - 1}")
    return tuple(sorted({layer % n_layers for layer in wanted}))


def captured_layers(capture: CaptureConfig, layers: object, n_layers: int) -> tuple[int, ...]:
    """Returns, as a sorted tuple, the layers whose states a run keeps: `capture.layers`, or the argument `layers` if
    `capture.layers` is None.

    Raises: ValueError if both name layers (None and "all" of the argument name none), and for layers that
    `resolve_layers` refuses.
    """
    if capture.layers is None:
        return resolve_layers(layers, n_layers)
    if not (layers is None or (isinstance(layers, str) and layers == "all")):
        raise ValueError(
            f"layers={layers!r:.60} and CaptureConfig(layers={capture.layers!r:.60}) both name layers to keep; give one"
        )
    return resolve_layers(capture.layers, n_layers)


def pick_deterministic(deterministic: object, n: int) -> frozenset[int]:
    """Returns the indices of the deterministic requests among the `n` requests of a run, as a frozenset.

    deterministic: True (all), False (none), a fraction (evenly spaced), a list of indices, or a list of n flags.
    Raises: ValueError for anything else.
    """
    if isinstance(deterministic, Iterable) and not isinstance(deterministic, str) and getattr(deterministic, "ndim", 1):
        entries = list(deterministic)
        if entries and all(is_flag(item) for item in entries):
            if len(entries) != n:
                raise ValueError(f"deterministic lists {len(entries)} flags for {n} requests; give one for each")
            return frozenset(i for i, flagged in enumerate(entries) if flagged)
        indices = [whole_number("deterministic: an index", item) for item in entries]
        if outside := [index for index in indices if not 0 <= index < n]:
            raise ValueError(f"deterministic names request {outside[0]}, but there are requests 0 to {n - 1}")
        return frozenset(indices)
    if is_flag(deterministic):
        return frozenset(range(n if deterministic else 0))
    share = number("deterministic, if neither a flag nor a list,", deterministic)
    if not 0 <= share <= 1:
        raise ValueError(f"deterministic as a fraction must lie between 0 and 1, got {share}")
    count = max(1, round(share * n)) if share else 0
    return frozenset(i * n // count for i in range(count))
