"""Lays the Python of a wheel of vLLM over the CPU build that this interpreter sees, for `make test-vllm-next`."""

import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def lay_over(wheel: Path, folder: Path) -> None:
    """Unpack a wheel without its binaries into `folder`, and link those of the installed package there.

    Its version gets the suffix by which vLLM knows a CPU build.
    """
    below = find_spec("vllm")
    assert below is not None, "there is no vLLM to lay it over"
    (package,) = below.submodule_search_locations or ()
    with ZipFile(wheel) as unpacked:
        kept = [name for name in unpacked.namelist() if name.endswith((".py", ".json", ".jinja", "METADATA", ".txt"))]
        unpacked.extractall(folder, kept)
    for binary in Path(package).glob("*.so"):
        (folder / "vllm" / binary.name).symlink_to(binary)
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    metadata.write_text(re.sub("(?m)^Version: .*", r"\g<0>+cpu", metadata.read_text(), count=1))


if __name__ == "__main__":
    lay_over(Path(sys.argv[1]), Path(sysconfig.get_path("purelib")))
