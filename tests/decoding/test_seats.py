"""Which prompt has which row of a batch."""

from domino_jax.decoding.seats import Row, Seats


def indices(seats):
    return [row and row.index for row in seats.rows]


def test_prompts_take_free_rows_in_their_order_and_several_together():
    seats = Seats([None] * 3, range(8))
    assert seats.fill([7, 5, 6, 1, 2, 3, 4, 9]) == [0, 1, 2]
    assert indices(seats) == [0, 1, 2] and seats.longest() == 7 and list(seats.waiting) == [3, 4, 5, 6, 7]
    seats.rows[1] = None
    assert seats.fill([1] * 8, together=2) == []
    seats.rows[2] = None
    assert seats.fill([1] * 8, together=2) == [1, 2] and indices(seats) == [0, 3, 4]
    seats.rows = [None] * 3
    assert seats.fill([1] * 8, together=2) == [0, 1] and list(seats.waiting) == [7]
    assert seats.unfinished().keys() == {0, 1}


def test_the_rows_that_answer_stay_when_the_batch_shrinks():
    row = Row(index=0, length=5)
    for rows, kept in (([None, row, None, row], [1, 3]), ([None, None, None, row], [3, 0])):
        seats = Seats(rows)
        assert seats.keep(2) == kept and seats.rows == [rows[slot] for slot in kept]
    assert Seats([None, row]).keep(2) == [0, 1] == Seats([None, row]).keep(8)
