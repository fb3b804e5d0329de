"""A process that forks writers of a corpus to be killed: `python -m tests.integration.corpus_writer FOLDER`.

For every line with a seed on stdin it forks a writer and answers `pid N`; `wait` reaps it and answers `dead`. A writer
opens the corpus, then adds, updates and removes documents until it is killed. It reports each change once the call has
returned, one line each: `have ID DIGEST` and `gone ID`; before a change of a document it says `maybe ID`.
"""

import os
import random
import sys
from pathlib import Path

from chunkweave.retrieval.corpus import Corpus
from tests.unit.retrieval_fakes import SUBJECTS, document, opened


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def change(corpus: Corpus, draw: random.Random) -> None:
    """One random call, reported before and after."""
    numbers = draw.sample(range(40), draw.randint(1, 6))
    if draw.random() < 0.3:
        here = [f"d{number}" for number in numbers if f"d{number}" in corpus]
        for one in here:
            say(f"maybe {one}")
        corpus.remove(here)
        for one in here:
            say(f"gone {one}")
        return
    documents = [document(number, draw.choice(SUBJECTS)) for number in numbers]
    for one in documents:
        say(f"maybe {one.id}")
    corpus.update(documents)
    for one in documents:
        say(f"have {one.id} {one.digest}")


def main() -> None:
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        if line.strip() == "wait":
            os.wait()
            say("dead")
            continue
        child = os.fork()
        if child == 0:
            corpus, draw = opened(folder), random.Random(int(line))
            while True:
                change(corpus, draw)
        say(f"pid {child}")


if __name__ == "__main__":
    main()
