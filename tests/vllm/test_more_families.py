"""The same of families whose layers have the steps of others in other combinations, with fewer cases."""

import pytest

from tests.vllm.test_families import agree, agree_exactly, served_and_known

MORE_FAMILIES = (
    "arcee",
    "cwm",
    "ernie4_5",
    "glm4_moe",
    "granite",
    "granitemoe",
    "helium",
    "jais2",
    "seed_oss",
    "starcoder2",
)


@pytest.fixture(scope="module", params=MORE_FAMILIES)
def family(request, tmp_path_factory):
    with served_and_known(tmp_path_factory.mktemp("family"), request.param) as three:
        yield three


@pytest.mark.parametrize("case", ["nothing", "some", "all"])
def test_first_tokens_and_chosen_positions(family, case):
    agree(*family, case)


def test_plain_requests_and_exact_prefixes(family):
    agree_exactly(*family)
