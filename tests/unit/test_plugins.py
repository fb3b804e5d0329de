"""Folders of plug-ins: which modules count, and what is said of one that lacks something."""

import sys
from importlib import import_module
from types import ModuleType

import pytest

from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.plugins import plugin, plugin_names


@pytest.fixture
def package(tmp_path, monkeypatch) -> ModuleType:
    folder = tmp_path / "some_plugins"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "large_first.py").write_text("POLICY = list\n")
    (folder / "unfinished.py").touch()
    (folder / "_shared.py").write_text("POLICY = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("some_plugins", "some_plugins.large_first", "some_plugins.unfinished"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module("some_plugins")


def test_modules_are_plugins_but_for_those_that_several_share(package):
    assert plugin_names(package) == ("large-first", "unfinished")
    assert plugin(package, "large-first", "policy", "POLICY") is list
    with pytest.raises(UnknownMethodError, match="unknown policy '-shared'; there are: large-first, unfinished"):
        plugin(package, "-shared", "policy", "POLICY")


def test_a_module_without_its_constant_is_told_what_it_lacks(package):
    with pytest.raises(UsageError, match="unfinished has no POLICY"):
        plugin(package, "unfinished", "policy", "POLICY")
