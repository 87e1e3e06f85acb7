"""Lists the TransformerLens hook names of the sites that cacheprobe reads; the other files take the names from this
one."""

SITES = ("S", "T", "C")
"""S: residual stream after a block; T: attention output; C: MLP output."""

SITE_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output"}
"""Dict from site letter to name, for the three sites at which a block's states [m] are captured."""

SITE_HOOKS = {"S": "hook_resid_post", "T": "hook_attn_out", "C": "hook_mlp_out"}
RESID_PRE = "hook_resid_pre"
HEADS = "z"
"""Site of each head's output before the output projection: its weighted sum of values."""
PATTERN = "pattern"
"""Site of each head's attention weights over the positions up to the query's own."""
HEAD_SITES = ("q", "k", "v", HEADS, PATTERN)
"""Sites of attention heads. q and k are taken right after their projection: before any q/k norm, before the rotation.
"""
_HOOKS = {**SITE_HOOKS, "pre": RESID_PRE, **{site: f"attn.hook_{site}" for site in HEAD_SITES}}
ROTATED = ("hook_rot_q", "hook_rot_k")
"""Queries and keys after the rotary embedding."""

INPUT_POINT, OUTPUT_POINT = "hook_in", "hook_out"
"""Last part of a canonical hook name of TransformerBridge: the hook is at the input or at the output of a component."""


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
