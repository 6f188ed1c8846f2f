"""Rows that are left out of training, so that their prompts can evaluate the drafter.

The choice depends on the prompts alone: every process and every start makes the same one, in any order of the files.
All rows that share a chosen prompt are left out.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

COUNT = 64  # prompts that are held out of a run
SHARE = 20  # at most one prompt in this many is held out
BYTES = 8
SHORTEST = 16  # tokens that tell the beginnings of two conversations apart; chat templates begin all of them alike


def prompt_of(loss_mask: np.ndarray) -> int:
    """Tokens before the first supervised one; all of them when none is supervised. loss_mask: float32 [T]."""
    supervised = loss_mask > 0.5
    return int(supervised.argmax()) if supervised.any() else len(supervised)


def prompt_hash(token_ids: np.ndarray) -> int:
    """A number below 2^63 from the ids int32 [T] of a prompt."""
    [number] = beginning_hashes(token_ids, [len(token_ids)])
    return number


def beginning_hashes(token_ids: np.ndarray, lengths: Iterable[int]) -> Iterator[int]:
    """prompt_hash of the first n ids for each n of rising `lengths` that is not above their number."""
    digest, start = hashlib.blake2b(digest_size=BYTES), 0
    for length in lengths:
        if length <= len(token_ids):
            digest.update(np.ascontiguousarray(token_ids[start:length], "<i4").tobytes())
            start = length
            yield int.from_bytes(digest.digest(), "little") >> 1


def hold_out(
    prompts: np.ndarray, hashes: np.ndarray, usable: np.ndarray, count: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `count` prompts of the smallest hashes, at most 1 of SHARE.

    Args:
        prompts: int32 [N], tokens of each row's prompt.  longest: most tokens of a held-out prompt (at least 1).
        hashes: int64 [N] (`prompt_hash`).  usable: bool [N], rows that could be trained on.
    Returns (bool [N]: rows to leave out of training, int64 [P]: for each held-out prompt its first row)
    """
    fitting = np.flatnonzero(usable & (prompts > 0) & (prompts <= longest))
    different, first = np.unique(hashes[fitting], return_index=True)  # sorted
    chosen = min(count, len(different) // SHARE)
    return usable & np.isin(hashes, different[:chosen]), fitting[first[:chosen]]
