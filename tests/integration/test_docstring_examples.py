"""Every public name has an example in its docstring, and the examples do what they say."""

from doctest import DocTestFinder, DocTestRunner

import pytest

import chunkweave

NAMES = sorted(set(chunkweave.__all__) - {"__version__"})


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_runs(name):
    (test,) = DocTestFinder(recurse=False).find(getattr(chunkweave, name), name, globs={})
    assert test.examples, "no example"
    said: list[str] = []
    DocTestRunner().run(test, out=said.append)
    assert said == []
