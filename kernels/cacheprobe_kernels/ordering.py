"""Numbers as integers of the same order, and a list of the largest so far."""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**31))
"""Below every number's key."""
NOBODY = tl.constexpr(2**31 - 1)
"""Above every token id, and above every number's key."""


@triton.jit
def to_key(values):
    """int32 keys in the order of float32 numbers; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_value(keys):
    """The number of a key."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def put_in(top_keys, top_ids, keys, ids):
    """The best of top_keys [n k] and keys [n v], with their ids; all ids of the list are below those that come.

    Of equal keys the lower id is better, so one that comes has to be larger than the list's last to get in. Most tiles
    hold none: a tile is read again only as often as the row with most admitted has some.
    """
    largest, last = tl.max(keys, 1), tl.min(top_keys, 1)
    while tl.max((largest > last).to(tl.int32), 0) > 0:
        comes = largest > last
        token_id = tl.min(tl.where(keys == largest[:, None], ids, NOBODY), 1)
        goes = tl.max(tl.where(top_keys == last[:, None], top_ids, -1), 1)
        place = comes[:, None] & (top_keys == last[:, None]) & (top_ids == goes[:, None])
        top_keys = tl.where(place, largest[:, None], top_keys)
        top_ids = tl.where(place, token_id[:, None], top_ids)
        keys = tl.where(comes[:, None] & (ids == token_id[:, None]), NOTHING, keys)
        largest, last = tl.max(keys, 1), tl.min(top_keys, 1)
    return top_keys, top_ids
