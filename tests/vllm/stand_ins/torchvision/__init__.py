"""Stands in for torchvision where it is not installed: models with images import it, and text needs none of it."""

import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

__version__ = "0.0.0"


class _Anything(MagicMock):
    __path__: list[str] = []  # noqa: RUF012 - a module's


class _Finder:
    """Any module below this one has any name."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder, is_package=True) if name.startswith("torchvision.") else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> Any:
        return _Anything(name=spec.name)

    @staticmethod
    def exec_module(_module: Any) -> None:
        pass


sys.meta_path.append(_Finder)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name=name)
