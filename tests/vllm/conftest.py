"""Tests that start real vLLM processes: `make test-vllm`; a part on Model Runner V2: `make test-vllm-v2`.

Without vLLM the folder is left out.
"""

import os
from importlib.util import find_spec

import pytest

VLLM = find_spec("vllm") is not None
collect_ignore_glob = [] if VLLM else ["*.py"]

if VLLM:
    from tests.vllm.environment import ENVIRONMENT, RUNNER_V2
    from tests.vllm.forked import fork_instead_of_spawning

    os.environ.update(ENVIRONMENT)  # some of it is read when vLLM is imported
    if not RUNNER_V2:  # Triton's interpreter is not tried behind a fork
        fork_instead_of_spawning()


def pytest_configure(config: pytest.Config) -> None:
    if VLLM:  # its warnings are not ours to fix
        config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Makes each tiny checkpoint once: `checkpoint("llama")` is its folder."""
    from tests.vllm.checkpoints import make_checkpoint

    made = {}

    def folder(family, **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return folder


SLICED = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
"""Prompts are longer than a step: vLLM cuts their prefill into slices."""


@pytest.fixture(scope="session")
def sliced(checkpoint):
    """The server that most tests share."""
    from tests.vllm.serving import serving

    with serving(checkpoint("llama"), **SLICED) as served:
        yield served


@pytest.fixture(scope="session")
def front_folder(tmp_path_factory):
    """Where the front that most tests share keeps KV (`kv`), documents (`data`) and what it says (`front.log`)."""
    return tmp_path_factory.mktemp("front")


@pytest.fixture(scope="session")
def front(front_folder):
    """The front that most tests share; they tell theirs apart by salt, or by texts that no other test sends (`told`).

    Its usual method reads attention profiles, so that chunks are captured while they are computed.
    """
    from tests.vllm.fronts import TWO_SMALL_CONTEXTS, front_process

    options = ("--cache-dir", str(front_folder / "kv"), "--data-dir", str(front_folder / "data"))
    options += ("--host-budget", "256MiB", "--policy", "pgdsf", "--method", "cachecraft")
    options += ("--replica-env", "0:VLLM_SERVER_DEV_MODE=1")  # has /reset_prefix_cache
    with front_process(front_folder, *options, first=TWO_SMALL_CONTEXTS) as running:
        yield running


@pytest.fixture(scope="module")
def client(front):
    """OpenAI's client of a module's front."""
    return front.client


@pytest.fixture(scope="session")
def reference(checkpoint):
    from tests.vllm.reference import Reference

    return Reference(checkpoint("llama"))
