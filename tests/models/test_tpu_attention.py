"""models/tpu_attention.py: the shapes that it is used for, and its parts."""

import pytest

from domino_jax.models.tpu_attention import applies, part_size
from tests.helpers.attention import shapes


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ((1, 32, 8, 17, 1_024), True),
        ((1, 32, 8, 17, 512), False),  # few scores
        ((8, 32, 8, 17, 21 * 128), True),  # one part
        ((8, 32, 8, 17, 37 * 128), False),  # parts of 128
        ((32, 32, 8, 17, 256), True),  # a small cache is one part
        ((8, 32, 8, 17, 4_096 + 64), False),  # no part divides the slots
        ((8, 32, 8, 17, 4_096, 64), False),  # heads that do not fill the lanes
        ((1, 32, 1, 17, 4_096), False),  # 544 rows of one head
    ],
)
def test_shapes_that_it_does_not_pay_for_or_cannot_compute_stay_plain(shape, used):
    q, k, *_ = shapes(*shape)
    assert applies(q, k) is used


@pytest.mark.parametrize(
    ("rows", "slots", "size"),
    [(68, 4_096, 2_048), (68, 2_688, 2_688), (68, 37 * 128, 128), (4, 32_768, 4_096), (512, 4_096, 512)],
)
def test_a_part_is_the_largest_multiple_of_128_that_divides_the_cache_within_the_limits(rows, slots, size):
    assert part_size(rows, slots) == size
