"""One server with the tiny pair for all tests of this folder."""

import pytest

from tests.helpers.serving import listening, tiny_engine


@pytest.fixture(scope="session")
def engine():
    return tiny_engine()


@pytest.fixture(scope="session")
def port(engine):
    with listening(engine) as port:
        yield port
