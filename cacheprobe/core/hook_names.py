"""Lists the TransformerLens hook names of the sites that cacheprobe reads; the other files take the names from this
one."""

import re
from collections.abc import Iterable

SITES = ("S", "T", "C")
"""S: residual stream after a block; T: attention output; C: MLP output."""

LENS_SITE = "Z"
"""Site of the lens readings, which are no states."""
ALL_SITES = "".join((*SITES, LENS_SITE))
"""What a run captures unless it is told otherwise."""

SITE_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output"}
"""Dict from site letter to name, for the three sites at which a block's states [m] are captured."""

CONVENTION = "S of a layer is the residual stream that leaves this block; blocks are counted from 0"
"""Written into the metadata of exported files, beside the layers."""

SITE_HOOKS = {"S": "hook_resid_post", "T": "hook_attn_out", "C": "hook_mlp_out"}
RESID_PRE = "hook_resid_pre"
HEADS = "z"
"""Site of each head's output before the output projection: its weighted sum of values."""
PATTERN = "pattern"
"""Site of each head's attention weights over the positions up to the query's own."""
ROUTER = "router"
"""Site of a mixture of experts: for each token, the ids and weights of the experts that compute it, by rank. An
intervention there changes the logits of the router."""
RECURRENT = "recurrent"
"""Site of a recurrent layer: its state after each token."""
HEAD_SHAPES = {"q": ("queries", "key"), "k": ("keys", "key"), "v": ("keys", "value"), HEADS: ("queries", "value")}
"""Sites at which an attention head has one vector for each token: whether there is one for each head of the queries or
of the keys, and whether it is as wide as a key or as a value. q and k are taken right after their projection: before
any q/k norm, before the rotation."""
ATTENTION_SITES = (*HEAD_SHAPES, PATTERN)
"""Sites of attention heads."""
HEAD_SITES = (*ATTENTION_SITES, ROUTER, RECURRENT)
"""Sites at which a row keeps several vectors: one for each attention head, expert of the row, or head of a recurrent
layer."""
_HOOKS = {
    **SITE_HOOKS,
    "pre": RESID_PRE,
    **{site: f"attn.hook_{site}" for site in ATTENTION_SITES},
    ROUTER: "mlp.router",
    RECURRENT: "attn.recurrent_state",
}
ROTATED = ("hook_rot_q", "hook_rot_k")
"""Queries and keys after the rotary embedding."""

INPUT_POINT, OUTPUT_POINT = "hook_in", "hook_out"
"""Last part of a canonical hook name of TransformerBridge: the hook is at the input or at the output of a component."""


def shape_of_heads(site: str, query_heads: int, key_heads: int, key_width: int, value_width: int) -> tuple[int, int]:
    """Returns (number of heads, width of a head's vector) of a site of HEAD_SHAPES in a layer of these sizes."""
    heads, width = HEAD_SHAPES[site]
    return query_heads if heads == "queries" else key_heads, key_width if width == "key" else value_width


def site_label(site: str) -> str:
    """Returns the name of a site as it is shown to a person, such as "T (attention output)"; other sites as they are,
    such as "thought"."""
    return f"{site} ({SITE_NAMES[site]})" if site in SITE_NAMES else site


def hook_name(site: str, layer: int) -> str:
    """Returns the full TransformerLens hook name of a site at a layer, such as "blocks.3.hook_resid_post" for S. Site
    "pre" is the residual stream before the block."""
    return f"blocks.{layer}.{_HOOKS[site]}"


def resid_pre_name(layer: int) -> str:
    """Returns the full TransformerLens hook name of the residual stream that enters block `layer`."""
    return f"blocks.{layer}.{RESID_PRE}"


_SITE_OF_HOOK = {hook: site for site, hook in _HOOKS.items()}
_SITE_OF_WORD = {hook.rpartition("hook_")[2]: site for hook, site in _SITE_OF_HOOK.items()}
_SITE_OF_WORD |= {"hidden_states": "S", "attentions": PATTERN}
"""Names that TransformerLens (without "hook_") and transformers give to sites, without a layer."""
_BLOCK_HOOK = re.compile(r"blocks\.(\d{1,6})\.([\w.]{1,60})")


def site_of_hook(name: str) -> tuple[str, int] | None:
    """Returns (site, layer) of a full TransformerLens hook name: ("S", 3) for "blocks.3.hook_resid_post". Returns None
    for a hook at which cacheprobe keeps no states.

    The stream that enters a block is S of the block below, so its hook gives that site; before block 0 it is "pre".
    """
    match = _BLOCK_HOOK.fullmatch(name)
    site = _SITE_OF_HOOK.get(match[2]) if match else None
    if match is None or site is None:
        return None
    layer = int(match[1])
    return _entering(site, layer)


def site_named(name: str) -> str:
    """Returns the site that a name of TransformerLens or transformers means, such as "S" for "resid_post",
    "hook_resid_post" and "hidden_states", or "z" for "attn.hook_z". Other names are returned unchanged."""
    return _SITE_OF_WORD.get(name.removeprefix("attn.").removeprefix("hook_"), name)


def site_advice(name: str) -> str:
    """Returns the end of an error message for another library's name of a site, such as "; here it is 'S', with
    layer=3"; "" for other names."""
    site, layer = site_of_hook(name) or (site_named(name), None)
    return "" if site == name else f"; here it is {site!r}" + ("" if layer is None else f", with layer={layer}")


def captured_letters(sites: "str | Iterable[str]") -> str:
    """Returns the sites of `CaptureConfig` as letters: "ST" for "ST", for ["S", "T"] and for ["resid_post",
    "attn_out"]. Letters that are no site are returned too.

    Raises: ValueError for a name that means a head, the stream before a block, or one layer; the message says what to
    write instead.
    """
    letters = ""
    for name in [sites] if isinstance(sites, str) else sites:
        site, layer = site_of_hook(name) or (site_named(name), None)
        layers = "" if layer is None else f", layers={layer}"
        if site in HEAD_SITES:
            raise ValueError(f"{name!r} is of heads or experts; write CaptureConfig(heads=({site!r},){layers})")
        if site == "pre":
            raise ValueError(f"{name!r} enters a block; write CaptureConfig(sites='S'): S of the block below equals it")
        if layers:
            raise ValueError(f"{name!r} is one layer's; write CaptureConfig(sites={site!r}{layers})")
        letters += site
    return letters


_BLOCK_ENDS = {"hook_out": "S", "hook_in": "pre"}
"""Names that TransformerBridge gives the hooks at the ends of a block."""
_BLOCK = re.compile(r"(?:model\.)*(?:layers|transformer\.h|gpt_neox\.layers)\.(\d{1,6})")
"""A block of a Hugging Face model, as nnsight names it."""
_NUMBER = re.compile(r"\.(\d{1,6})(?:\.|$)")
_ENDING = re.compile(r"\.(output|input|query)(\.\d{1,2})?$")
"""End of a module's name that says which of its tensors is meant."""


def is_module(site: str) -> bool:
    """Returns whether a site is a module's name as `module_name` gives it, or a hook point of TransformerLens, and none
    of our sites."""
    return "." in site


def module_name(name: str) -> str:
    """Returns the name of a module's tensor as it is stored: "model.layers[3].mlp" as "model.layers.3.mlp", and
    "lm_head" as "lm_head.output". Raises: ValueError for a text that is no name."""
    plain = re.sub(r"\[(\d{1,6})\]", r".\1", name)
    if not re.fullmatch(r"\w+(\.(\w+|\*))*", plain):
        raise ValueError(f"{name!r:.80} names no module; write it as in named_modules(), such as model.layers.3.mlp")
    return plain if is_module(plain) else f"{plain}.output"


def is_hook_point(name: str) -> bool:
    """Returns whether a name is one that TransformerLens gives, and not one of the model's own modules."""
    return name.startswith("blocks.")


def number_in(name: str) -> int | None:
    """Returns the layer in the name of a module or hook point: its first number; None without one."""
    found = _NUMBER.search(_ENDING.sub("", name))
    return int(found[1]) if found else None


def place_of(site: str, layer: int | None) -> tuple[str, int]:
    """Returns (site, layer) of a site as a user names it: a letter with a layer, a hook point of another library, or a
    module's name, in which "*" stands for the layer.

    Hook points: TransformerLens's ("blocks.3.hook_resid_post", "blocks.3.hook_attn_out"), with the layer in the name,
    or without it ("resid_post", see `site_named`); and a block's output as nnsight names it
    ("model.layers[3].output[0]", "transformer.h.3"), which is site S.
    A module outside of the blocks gets layer 0, until `models.feeding.located` asks the model.
    Raises: ValueError for a name without a layer, or with two different layers.
    """
    known = site_named(site)
    if known in ATTENTION_SITES:
        raise ValueError(_advice_on_heads(site, known, layer))
    if known in (*_HOOKS, LENS_SITE) or (layer is not None and "." not in known):
        if layer is None:
            raise ValueError(f"site {site} needs layer=")
        return known, layer
    if "*" in site and layer is None:
        raise ValueError(f"{site!r} is of every layer; say of which with layer= or layers=")
    name = module_name(site.replace("*", str(layer)))
    match = _BLOCK_HOOK.fullmatch(name)
    module = _BLOCK.fullmatch(re.sub(r"\.(output(\.0)?|input)$", "", name))
    found = site_of_hook(name)
    if match and match[2] in _BLOCK_ENDS:
        found = _entering(_BLOCK_ENDS[match[2]], int(match[1]))
    elif module:
        found = _entering("pre" if name.endswith(".input") else "S", int(module[1]))
    if found is not None and found[0] in ATTENTION_SITES:
        raise ValueError(_advice_on_heads(site, *found))
    if found is None:
        found = name, number_in(name) or 0
    if layer is not None and layer != found[1]:
        raise ValueError(f"{site!r} is at layer {found[1]}, and layer={layer} was given; leave out layer=")
    return found


def _advice_on_heads(name: str, site: str, layer: int | None) -> str:
    """Returns the error message for a site of attention heads, which is no place of an intervention."""
    if site == HEADS:
        number = "" if layer is None else layer
        return f"{name!r} is of attention heads; say site='T' with layer={number} and head="
    module = f"model.layers.{'*' if layer is None else layer}.self_attn"
    if site == PATTERN:
        return (
            f"{name!r} is of attention weights, which cannot be changed; hook the attention's output, such as {module}"
        )
    rotated = f", or {module}.query for queries after the rotation" if site == "q" else ""
    return f"{name!r} is of attention heads; name the module that computes it, such as {module}.{site}_proj{rotated}"


def _entering(site: str, layer: int) -> tuple[str, int]:
    """Returns the place of a hook; the stream that enters a block is S of the block below."""
    return ("S", layer - 1) if site == "pre" and layer else (site, layer)


def gemma_scope_hooks(path: str) -> tuple[str, str | None] | None:
    """Returns (hook that a Gemma Scope dictionary reads, hook that it writes, or None for the same), worked out from
    the names of its folders; None if they do not say it.

    Source: SAELens 6.54, loading/pretrained_sae_loaders.py, the configs of Gemma Scope for Gemma 2 and Gemma 3.
    """
    folders = re.split(r"[/\\]", path)[-_SCOPE_FOLDERS:]
    layers = re.findall(r"layer_(\d{1,6})", "/".join(folders))
    if not layers:
        return None
    block = f"blocks.{layers[-1]}."
    for folder in reversed(folders):  # what is nearest to the file says it
        for pattern, read, written in _GEMMA_SCOPE:
            if re.search(pattern, folder):
                return block + read, block + written if written else None
    return None


_SCOPE_FOLDERS = 5
"""Names at the end of a path that say what a dictionary is: collection, site, layer, width, file."""


_GEMMA_SCOPE = (
    (r"gemma-scope-[\w.-]*transcoder", "ln2.hook_normalized", "hook_mlp_out"),
    (r"transcoder", "hook_mlp_in", "hook_mlp_out"),
    (r"resid_post|gemma-scope-[\w.]+-[pi]t-res", "hook_resid_post", None),
    (r"attn_out|gemma-scope-[\w.]+-[pi]t-att", "attn.hook_z", None),
    (r"mlp_out|gemma-scope-[\w.]+-[pi]t-mlp", "hook_mlp_out", None),
)
"""Parts of a path, as a pattern, and the hooks that such a dictionary reads and writes."""
