"""The strongest test of an export: a server accepts every block of a drafter that knows its rows by heart."""

import pytest

from tests.helpers.answering import assert_full_blocks, overfit
from tests.helpers.serving import listening, tiny_engine


@pytest.mark.slow(minutes=4)
def test_an_overfitted_drafter_has_every_block_accepted_whole(tmp_path):
    engine = tiny_engine(f"--config.drafter.path={overfit(tmp_path)}")
    with listening(engine) as port:
        assert_full_blocks(port)
