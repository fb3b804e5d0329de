"""Gives Triton a backend named `cpu`, which vLLM requires for Model Runner V2 on a CPU.

Python imports this module at start-up if its folder is in PYTHONPATH, so it is active in vLLM's processes too. Triton's
interpreter runs the kernels, so the backend never compiles anything. `torch.compile` generates C++, as without Triton.
"""

import os
from types import SimpleNamespace


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True

    def __init__(self) -> None:
        raise RuntimeError("Triton's interpreter has no driver")


if os.environ.get("TRITON_INTERPRET") == "1":
    os.environ["TORCHINDUCTOR_TRITON_DISABLE_DEVICE_DETECTION"] = "1"

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
