"""Commands of the server and the laboratory are found by entry point, or say what to install."""

import pytest

from chunkweave.cli import app
from tests.integration.command_line import invoke


@pytest.fixture(autouse=True)
def looked_up_anew():
    app._command_elsewhere.cache_clear()
    yield
    app._command_elsewhere.cache_clear()


@pytest.mark.parametrize(("name", "extra"), [("serve", "server"), ("vllm-serve", "server")])
def test_a_command_whose_package_is_missing_says_which_extra_brings_it(monkeypatch, name, extra):
    monkeypatch.setattr(app, "entry_points", lambda **_: ())
    done = invoke(name, "--whatever", "1")
    assert done.exit_code == 2
    assert f"`chunkweave {name}` is not installed" in done.output
    assert f"'.[{extra}]'" in done.output


def test_a_missing_package_leaves_the_help_of_the_others(monkeypatch):
    monkeypatch.setattr(app, "entry_points", lambda **_: ())
    done = invoke("--help")
    assert done.exit_code == 0
    assert "calibrate" in done.output
    assert "not installed" in done.output
