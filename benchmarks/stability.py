"""Does a memory train as it comes? Every member of the ATLAS family at its default settings, on the quickstart's text.

    python benchmarks/stability.py --json benchmarks/results/stability.json

The text, its tokenizer, the training (AdamW through transformers' `Trainer`, cosine schedule, weight decay 0.1) and the
loss on held-out plays are those of `examples/quickstart.py`; the models are small (`SHAPE`), everything else about them
is their config's default. Of each: whether all weights and losses are finite after the training (a weight that was once
NaN stays so), and whether the held-out loss is below that of the tokens' frequencies, as both must be.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import quickstart
import torch
from record import about, table, write_json
from torch import Tensor
from transformers import PreTrainedConfig

import memzoo

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MEMBERS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "titans": (memzoo.TitansConfig, {}),
    "omeganet": (memzoo.OmegaNetConfig, {}),
    "atlas": (memzoo.AtlasConfig, {}),
    "atlas++": (memzoo.AtlasConfig, {"memory": "gated_mlp"}),
    "dla": (memzoo.DLAConfig, {}),
    "deep_transformer": (memzoo.DeepTransformerConfig, {}),
    "swdt": (memzoo.SWDTConfig, {}),
    "dot": (memzoo.DotConfig, {}),
}


def measure(name: str, rows: Tensor, held_out: Tensor, args: quickstart.Arguments) -> dict[str, Any]:
    """Train one member and judge it."""
    kind, options = MEMBERS[name]
    begin = time.process_time()
    model, history = quickstart.train(kind(vocab_size=args.vocab_size, **SHAPE, **options), rows, args, name)
    loss = quickstart.losses(model, held_out, name).mean().item()
    finite = math.isfinite(loss) and all(bool(weight.isfinite().all()) for weight in model.parameters())
    return {
        "model": name,
        "parameters": model.num_parameters(),
        "training_losses": history,
        "held_out_loss": loss,
        "finite": finite,
        "cpu_seconds": time.process_time() - begin,
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MEMBERS), help="comma-separated; default all")
    parser.add_argument("--text", nargs="+", help="text files instead of the plays; the last is held out")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=2, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="tokens in a window")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args(argv)
    if unknown := set(given.models.split(",")) - set(MEMBERS):
        parser.error(f"unknown {sorted(unknown)}; expected some of {sorted(MEMBERS)}")
    torch.set_num_threads(1)
    train_texts, held_out_texts = quickstart.read_files(given.text) if given.text else quickstart.read_plays()
    with tempfile.TemporaryDirectory() as folder:
        args = quickstart.Arguments(
            output=folder,
            steps=given.steps,
            batch=given.batch,
            context=given.context,
            learning_rate=given.learning_rate,
        )
        tokenizer = quickstart.train_tokenizer(train_texts, args.vocab_size)
        args.vocab_size = len(tokenizer)
        train_ids, held_out_ids = (quickstart.encode(tokenizer, texts) for texts in (train_texts, held_out_texts))
        rows = quickstart.windows(train_ids, args.context, args.context, "training", 2 * args.batch)
        held_out = quickstart.windows(held_out_ids, args.context + 1, args.context, "held-out", 2)[:32]
        unigram = math.log(quickstart.unigram_perplexity(train_ids, held_out, len(tokenizer)))
        settings = {
            **SHAPE,
            "vocab_size": len(tokenizer),
            "steps": args.steps,
            "batch": args.batch,
            "context": args.context,
            "learning_rate": args.learning_rate,
            "dtype": "float32",
            "threads": 1,
        }
        found: list[dict[str, Any]] = []
        content = {**about("stability.py", argv, settings), "unigram_loss": unigram, "rows": found}
        for name in given.models.split(","):
            row = measure(name, rows, held_out, args)
            found.append({**row, "holds": row["finite"] and row["held_out_loss"] < unigram})
            if given.json:
                write_json(given.json, content)
    columns = [
        ("model", lambda row: row["model"]),
        ("parameters", lambda row: f"{row['parameters']:,}"),
        ("training loss", lambda row: f"{row['training_losses'][0]:.2f} -> {row['training_losses'][-1]:.2f}"),
        ("held-out loss", lambda row: f"{row['held_out_loss']:.3f}"),
        ("finite and below unigram", lambda row: "holds" if row["holds"] else "MISSED"),
    ]
    print(f"\nHeld-out loss of the tokens' frequencies: {unigram:.3f}\n{table(columns, found)}")
    return 0 if all(row["holds"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
