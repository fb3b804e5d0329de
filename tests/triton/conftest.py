"""The kernels run in Triton's interpreter, on the CPU: `make test-triton` has what that needs."""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_current_numpy(tensor, *args):
        """NumPy 2.4 no longer makes an integer of an array of one element, which is what the interpreter's loops do."""
        result = _patch(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        return result

    interpreter._patch_lang_tensor = _patch_for_current_numpy


@pytest.fixture(autouse=True)
def _numpy_overflow_is_no_error():
    """The interpreter computes with NumPy, whose warnings about 0 * inf in masked lanes mean nothing."""
    import numpy as np

    with np.errstate(all="ignore"):
        yield
