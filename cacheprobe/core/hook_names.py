"""The one table of hook names: TransformerLens' names for the sites that cacheprobe reads."""

SITES = ("S", "T", "C")
"""S: residual stream after a block; T: attention output; C: MLP output."""

SITE_HOOKS = {"S": "hook_resid_post", "T": "hook_attn_out", "C": "hook_mlp_out"}
RESID_PRE = "hook_resid_pre"
HEADS = "z"
"""Site of what each head gives to T: the weighted sum of its values, before the output projection."""
PATTERN = "pattern"
"""Site of the weights that each head gives to the positions up to its own."""
HEAD_SITES = ("q", "k", "v", HEADS, PATTERN)
"""Of attention heads. q and k: as they leave the projection, before any norm of theirs and before the rotation."""
_HOOKS = {**SITE_HOOKS, "pre": RESID_PRE, **{site: f"attn.hook_{site}" for site in HEAD_SITES}}
ROTATED = ("hook_rot_q", "hook_rot_k")
"""Queries and keys after the rotary embedding."""

INPUT_POINT, OUTPUT_POINT = "hook_in", "hook_out"
"""The last part of a canonical name: where at a component of TransformerLens' bridge the hook sits."""


def hook_name(site: str, layer: int) -> str:
    """Full TransformerLens name of a site at a layer, such as the residual stream after block 3; "pre" enters it."""
    return f"blocks.{layer}.{_HOOKS[site]}"


def resid_pre_name(layer: int) -> str:
    """Full TransformerLens name of the residual stream that enters a block."""
    return f"blocks.{layer}.{RESID_PRE}"
