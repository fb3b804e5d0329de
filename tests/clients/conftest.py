"""Recipes of `examples/` against real servers, started as each of them says: `make test-clients`.

Without the clients the folder is left out, and without SmolLM2's weights its tests skip.
"""

import gc
import runpy
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from chunkweave.models.gguf import SMOLLM2, usual_model
from tests.server.processes import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLIENTS = all(map(find_spec, ("langchain_classic", "litellm", "llama_index")))
collect_ignore_glob = [] if CLIENTS else ["*.py"]

Server = Callable[[str], str]
"""The URL, with `/v1`, of the server that a recipe names."""


def pytest_configure(config: pytest.Config) -> None:
    if CLIENTS:  # their warnings are not ours to fix
        config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts each server once, with the flags that the recipe says."""
    if usual_model() != SMOLLM2:
        pytest.skip("SmolLM2's weights are not installed")
    with ExitStack() as stack:
        started: dict[str, ServerProcess] = {}

        def url(recipe: str) -> str:
            lines = (EXAMPLES / recipe).read_text(encoding="utf-8").splitlines()
            (flags,) = (line.partition("chunkweave serve ")[2] for line in lines if "chunkweave serve " in line)
            if flags not in started:
                started[flags] = stack.enter_context(ServerProcess(*shlex.split(flags)))
            return f"{started[flags].url}/v1"

        yield url


@dataclass(frozen=True)
class Ran:
    """A recipe that ran: its variables, and the lines that it printed."""

    variables: dict[str, Any]
    lines: list[str]


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., Ran]]:
    """Runs a recipe as it is written, once for each server."""

    @cache
    def recipe(name: str, url: str, model: str = SMOLLM2) -> Ran:
        patched.setenv("OPENAI_BASE_URL", url)
        patched.setenv("MODEL", model)
        with redirect_stdout(StringIO()) as printed:
            variables = runpy.run_path(str(EXAMPLES / name))
        return Ran(variables, printed.getvalue().splitlines())

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
        yield recipe
        recipe.cache_clear()
        gc.collect()  # what clients leave open warns here, not at the end, where warnings are errors
