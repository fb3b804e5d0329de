"""What every test starts from."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_log_level() -> Iterator[None]:
    """The command line sets the library's log level for its process; here that is all tests' process."""
    logging.getLogger("chunkweave").setLevel(logging.NOTSET)
    yield
    logging.getLogger("chunkweave").setLevel(logging.NOTSET)
