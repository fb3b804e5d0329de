"""`chunkweave bench`, with its four benchmarks."""

from chunkweave_lab.cli.bench import app as bench
from chunkweave_lab.cli.fidelity import fidelity
from chunkweave_lab.cli.quality import quality

bench.command()(quality)
bench.command()(fidelity)
