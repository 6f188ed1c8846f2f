"""The draft vocabulary that training rows suggest."""

import numpy as np

from domino_jax.data import token_counts
from domino_jax.data.chat import TrainingRow
from domino_jax.data.token_counts import frequent_tokens


def rows(*pairs):
    """(id, row) of token ids and masks, as TrainingRows gives them."""
    return [
        (number, TrainingRow(np.array(ids), np.array(mask, np.float32))) for number, (ids, mask) in enumerate(pairs)
    ]


def test_only_supervised_tokens_count_and_ties_go_to_the_lower_id():
    found = frequent_tokens(rows(([5, 5, 5, 2, 7], [0, 0, 0, 1, 1]), ([7, 3, 3], [1, 1, 1])), vocab=9, count=3)
    assert found.tolist() == [2, 3, 7]


def test_tokens_that_no_answer_has_fill_up_the_vocabulary():
    assert frequent_tokens(rows(([8], [1])), vocab=9, count=3).tolist() == [0, 1, 8]


def test_of_many_rows_some_are_counted_first_and_last_among_them(monkeypatch):
    monkeypatch.setattr(token_counts, "COUNTED_ROWS", 3)
    several = rows(*(([number], [1]) for number in range(7)))
    assert frequent_tokens(several, vocab=9, count=3).tolist() == [0, 3, 6]
