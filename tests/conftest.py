"""What every test starts from."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """The command line sets the library's log level for its process; here that is all tests' process."""
    logger = logging.getLogger("chunkweave")
    level = logger.level
    yield
    logger.setLevel(level)
