"""Write the bundled corpus: `python training/make_corpus.py [--out FOLDER]`. A function of the generator alone."""

import argparse
from pathlib import Path

from world_corpus import make_corpus, write_corpus

_ASSETS = Path(__file__).resolve().parents[1] / "src" / "chunkweave" / "assets" / "corpus"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=_ASSETS)
    folder = parser.parse_args().out
    corpus = make_corpus()
    write_corpus(corpus, folder)
    print(f"{len(corpus.passages)} passages, {len(corpus.questions)} questions -> {folder}")
