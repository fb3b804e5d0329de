"""What every test of the laboratory starts from: as those of the product."""

from tests.conftest import _no_log_level  # noqa: F401
