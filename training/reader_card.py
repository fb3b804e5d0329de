"""The model card that goes with an exported reader."""

import json
from pathlib import Path

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [llama, rag, kv-cache, synthetic]
---

# chunkweave reader

A {parameters:.1f} M parameter Llama-architecture model that answers questions over *worlds*: generated
encyclopaedia-like passages about invented places and people. It exists to measure what reusing KV caches does to
answers, and to make the first run of chunkweave need no download. It knows nothing about the real world and is no
general assistant.

- **Data**: passages and questions streamed from `training/worlds` (training split), and random tokens to copy.
  No other text. Names, combinations of names and some wordings are held out for testing.
- **Prompt**: `<s>`, instruction (or none), passages each followed by a blank line, `Question: ...\\nAnswer:`; the parts
  are tokenized apart. 1 to 12 passages in random order. From some training questions that take two passages the
  earlier one was hidden, so that later passages learn to carry what they share with earlier ones.
- **Start**: planted copying heads (`training/reader_start.py`), everything else random.
- **Steps**: {step} of {steps}, {tokens:.1f} M tokens, {hours:.2f} hours on {hardware}; seed {seed}.
- **Command**: `python training/train_reader.py train --checkpoint FOLDER --steps {steps} --seed {seed}`, repeated until
  the steps are done, then `export`.{notes}

## Configuration

```json
{config}
```

## Held-out F1 by kind of question

Test worlds, {tested} in random order, greedy decoding; `full-reuse` lets no passage see another.

{table}
"""


def write_card(path: Path, preset: dict[str, object], seed: int, progress: dict[str, object], parameters: int) -> None:
    """Write the card of a run to `path`."""
    text = _CARD.format(
        parameters=parameters / 1e6,
        step=progress["step"],
        steps=preset["steps"],
        tokens=float(str(progress["tokens"])) / 1e6,
        hours=float(str(progress["seconds"])) / 3600,
        hardware=", ".join(progress["hardware"]),  # type: ignore[arg-type]
        seed=seed,
        notes="".join(f"\n- **Note**: {note}" for note in progress.get("notes", [])),  # type: ignore[attr-defined]
        config=json.dumps(preset, indent=1),
        tested=progress.get("tested", "no questions yet"),
        table=_table(progress["results"]),  # type: ignore[arg-type]
    )
    path.write_text(text, "utf-8")


def _table(results: dict[str, dict[str, float]]) -> str:
    kinds = sorted({kind for scores in results.values() for kind in scores})
    lines = ["| kind | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    lines += [
        f"| {kind} | " + " | ".join(f"{scores.get(kind, 0):.3f}" for scores in results.values()) + " |"
        for kind in kinds
    ]
    return "\n".join(lines)
