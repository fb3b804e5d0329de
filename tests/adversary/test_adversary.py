"""Three tenants, random requests and faults, over HTTP: nobody notices the others, and nothing that counts is lost."""

from pathlib import Path

import pytest

from tests.adversary.arena import Arena
from tests.adversary.attack import SECONDS, attack
from tests.adversary.backends import EngineArena, FrontArena

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [EngineArena, FrontArena], ids=["engine", "vllm"])
def test_nobody_notices_the_others(tmp_path: Path, kind: type[Arena]) -> None:
    with kind(tmp_path, SECONDS) as arena:
        attack(arena)
