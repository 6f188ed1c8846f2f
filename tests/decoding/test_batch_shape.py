"""The sizes of batch and caches follow the text: literal cases of the pure rule."""

import pytest

from domino_jax.decoding.batch_shape import BatchShape, ShapeLimits, next_shape, taken_over

LIMITS = ShapeLimits(batches=(1, 4, 16), least=256, most=4_096, block_rows=17)
MANY = ShapeLimits(batches=(1, 4, 16), least=256, most=4_096, block_rows=17, several=True)


@pytest.mark.parametrize(
    ("lengths", "waiting", "rows", "slots", "admitted"),
    [
        ([], [100], 1, 256, 1),  # one request alone
        ([], [239], 1, 256, 1),  # the last prompt that leaves room for a block
        ([], [240], 1, 512, 1),
        ([300], [], 1, 512, 0),  # a text that grows
        ([300, 20], [5], 4, 512, 1),
        ([20] * 4, [5], 16, 256, 1),
        ([20] * 5, [], 16, 256, 0),
        ([20] * 4, [], 4, 256, 0),  # the smaller batch holds all that are left
        ([20] * 16, [3_000] * 2, 16, 256, 0),  # no row is free, so a long prompt that waits needs no slots yet
        ([4_000], [], 1, 4_096, 0),
        ([4_090], [], 1, 4_096, 0),  # never more than the most
    ],
)
def test_the_smallest_sizes_that_hold_all_requests_and_a_block(lengths, waiting, rows, slots, admitted):
    now = BatchShape(16, 4_096)
    assert next_shape(now, lengths, waiting, LIMITS)[:3] == (rows, slots, admitted)


def test_an_eighth_of_the_rows_is_admitted_together_while_enough_wait():
    now = BatchShape(16, 256)
    assert next_shape(now, [9] * 13, [9] * 5, MANY) == (16, 256, 2, 2)  # the third free row waits for a second request
    assert next_shape(now, [9] * 15, [9], MANY) == (16, 256, 1, 1)
    assert next_shape(None, [], [9] * 99, MANY) == (16, 256, 16, 1)  # the first batch starts in one prefill


def test_the_largest_sizes_serve_any_requests():
    assert next_shape(None, [], [9], LIMITS.largest()) == (16, 4_096, 1, 1)
    assert next_shape(BatchShape(16, 4_096), [9] * 3, [], LIMITS.largest())[:2] == (16, 4_096)


def test_a_dispatch_ends_when_rows_can_be_given_away_or_a_smaller_batch_holds_the_rest():
    assert [LIMITS.idle(16, waiting) for waiting in (0, 1)] == [11, 0]  # 12 of 16 are done; one is
    assert (MANY.idle(16, 2), MANY.idle(16, 1), LIMITS.idle(1, 0)) == (1, 0, 0)
    assert LIMITS.largest().idle(16, 0) == 15


def test_rows_without_a_request_go_first():
    assert taken_over(["a", None, "b", None], 2) == [0, 2]
    assert taken_over([None, "a", None], 2) == [1, 0]
    assert taken_over(["a"], 4) == [0]
