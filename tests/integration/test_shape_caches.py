"""What oneDNN and PyTorch keep for each number of tokens, on CPUs that multiply in bfloat16."""

import os
import subprocess
import sys

import pytest

from chunkweave.cli import app

_GROWN_MB = """
import sys
if sys.argv[1] == "command":
    from chunkweave.cli import app
    app.app = lambda: None
    app.main()
import torch

def memory_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

torch.set_num_threads(1)
weight = torch.ones(128, 256, dtype=torch.bfloat16)
torch.nn.functional.linear(torch.ones(4, 256, dtype=torch.bfloat16), weight)
before_mb = memory_mb()
for tokens in range(1, 800):
    torch.nn.functional.linear(torch.ones(tokens, 256, dtype=torch.bfloat16), weight)
print(memory_mb() - before_mb)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_prompts_of_all_lengths_leave_little_behind():
    environment = {name: value for name, value in os.environ.items() if name not in app._SHAPE_CACHES}

    def grown_mb(how: str) -> float:
        command = [sys.executable, "-c", _GROWN_MB, how]
        return float(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)

    freely_mb, bounded_mb = grown_mb("library"), grown_mb("command")
    if freely_mb < 150:
        pytest.skip(f"this machine keeps {freely_mb:.0f} MB only")
    assert bounded_mb < freely_mb / 2
