"""Decoding in a process with nearly all the memory mappings that Linux allows it (test_generate.py).

It needs 22 programs of 30 to 120 mappings, and prints how many it holds at the end.
"""

import mmap
import pathlib

from tests.helpers.decoding_models import check_lossless, make_generator, random_models, random_prompts

LEFT = 400


def fill(left: int) -> list[mmap.mmap]:
    """Pages that no two neighbours can share a mapping of, until `left` mappings more are allowed."""
    limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    used = len(pathlib.Path("/proc/self/maps").read_bytes().splitlines())
    kinds = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
    return [mmap.mmap(-1, mmap.PAGESIZE, prot=kinds[index % 2]) for index in range(limit - used - left)]


def main() -> None:
    made = make_generator(random_models(), cache_length=512)
    made.generate([[1, 2, 3]], "domino")  # what jax needs once
    pages = fill(LEFT)
    assert pages
    for length in (8, 40, 100, 200, 400):
        check_lossless(made, random_prompts(1, length, length), ("autoregressive", "domino"))
    print(len(made.compiled))


if __name__ == "__main__":
    main()
