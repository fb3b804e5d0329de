"""Write the bundled corpus: `python training/make_corpus.py [--out FOLDER]`. A function of the generator alone."""

import argparse
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "benchmarks"))

from world_corpus import make_corpus, write_corpus  # noqa: E402

_ASSETS = _ROOT / "src" / "chunkweave" / "assets" / "corpus"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=_ASSETS)
    folder = parser.parse_args().out
    corpus = make_corpus()
    write_corpus(corpus, folder)
    print(f"{len(corpus.passages)} passages, {len(corpus.questions)} questions -> {folder}")
