"""Which tokens the answers of training rows use most, and the draft vocabulary that they suggest."""

import json

import numpy as np

from domino_jax.data.chat import TrainingRow
from domino_jax.data.token_counts import frequent_tokens, order_of_rows, order_of_rows_in


def rows(*pairs):
    """(id, row) of token ids and masks, as TrainingRows gives them."""
    return [
        (number, TrainingRow(np.array(ids), np.array(mask, np.float32))) for number, (ids, mask) in enumerate(pairs)
    ]


def test_only_supervised_tokens_count_and_ties_go_to_the_lower_id(tmp_path):
    pairs = ([5, 5, 5, 2, 7], [0, 0, 0, 1, 1]), ([7, 3, 3], [1, 1, 1])
    assert order_of_rows(rows(*pairs), vocab=9).tolist() == [3, 7, 2]
    lines = [json.dumps({"token_ids": ids, "loss_mask": mask}) for ids, mask in pairs]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert order_of_rows_in(str(tmp_path / "rows.jsonl"), None, vocab=9).tolist() == [3, 7, 2]


def test_tokens_that_no_answer_has_fill_up_the_vocabulary_and_some_are_always_in_it():
    order = np.array([8, 5])
    assert frequent_tokens(order, vocab=9, count=4).tolist() == [0, 1, 5, 8]
    assert frequent_tokens(order, vocab=9, count=2, always=(3,)).tolist() == [3, 8]
