"""What a managed memory costs beside its backbone alone: the 2.7M model of `managed_train.py`, an event per 16 tokens.

    python benchmarks/managed_speed.py --json benchmarks/results/managed_speed.json

Measured as in `run.py`, in one run on one thread. `managed` has slots and chunks, `managed-slots` slots alone, and
`managed-backbone` is the same model without a memory. The table is also timed by itself, for a batch of one and of
eight streams: `EVENTS` events, each followed by the reads of 16 tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import run
import torch
from managed_train import SETUPS
from record import about, write_json
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig

from memzoo.kernels.slot_table import Event, ReadWeights, Rules, empty_table, noted, read, write

STRIDE, EVENTS, SLOTS, WIDTH, STREAMS = 16, 128, 32, 64, 8
NEAR, FAR = 256, 65536


def case(config: PreTrainedConfig) -> run.Case:
    """A model to measure."""

    def build() -> run.Runner:
        return run.Runner(AutoModelForCausalLM.from_config(config))

    return run.Case(build, "memzoo", peer=False, max_context=1 << 30)


def config(**options: Any) -> PreTrainedConfig:
    """The 2.7M model's, with a candidate every `STRIDE` tokens."""
    base = SETUPS["full"].config()
    every = {"write_trigger": "stride", "write_stride": STRIDE, "event_token_ids": None}
    return type(base).from_dict({**base.to_dict(), **every, **options})


# Not in a function: a process that is spawned finds them by importing this file.
run.CASES |= {
    "managed": case(config()),
    "managed-slots": case(config(fallback_chunks=0)),
    "managed-backbone": case(config().backbone_config),
}


def through_table(streams: int, repeat: int) -> float:
    """Seconds of `EVENTS` events of each stream and the reads after them; the fastest of some rounds."""
    generator = torch.Generator().manual_seed(0)
    keys, queries, values = (
        torch.randn(EVENTS, streams, tokens, WIDTH, generator=generator) for tokens in (1, STRIDE, 1)
    )
    keys, queries = F.normalize(keys, dim=-1), F.normalize(queries, dim=-1)
    ones, zeros = torch.ones(streams), torch.zeros(streams, dtype=torch.long)
    place = torch.arange(STRIDE).expand(streams, -1)

    def work() -> None:
        table = empty_table(streams, SLOTS, WIDTH, WIDTH, keys)
        for at in range(EVENTS):
            position = zeros + STRIDE * at
            event = Event(
                ones > 0, position, keys[at, :, 0], values[at, :, 0], 0.9 * ones, ones, zeros, zeros, ones < 0
            )
            table, _ = write(table, event, Rules())
            reading = read(table, queries[at], place + STRIDE * at + 1, Rules(), ReadWeights(), 4)
            table = noted(table, reading)

    with torch.no_grad():
        work()
        return min(run.timed(work, "cpu") for _ in range(repeat))


def promises(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold, as far as this run has measured it, and what a look-up of chunks adds."""
    found: list[dict[str, Any]] = []

    def hold(text: str, value: float, holds: bool) -> None:
        found.append({"promise": text, "value": value, "holds": holds})

    speed = {(row["case"], row["tokens"]): row["tokens_per_second"] for row in results["training"]}
    for name, tokens in speed:
        if name != "managed-backbone":
            ratio = speed[name, tokens] / speed["managed-backbone", tokens]
            text = f"{name}, forward + backward of {tokens} tokens: speed at least 0.7 times the backbone's"
            hold(text, ratio, ratio >= 0.7)
    one, many = (results["table_seconds"][str(streams)] for streams in (1, STREAMS))
    text = f"the table, a batch of {STREAMS} streams: time at most 2 times that of one"
    hold(text, many / one, many <= 2 * one)
    cost = {(row["case"], row["context"]): row["ms_per_token"] for row in results["decoding"]}
    if ("managed-slots", NEAR) in cost and ("managed-slots", FAR) in cost:
        ratio = cost["managed-slots", FAR] / cost["managed-slots", NEAR]
        text = f"managed-slots, decoding: cost per token after {FAR} tokens at most 1.15 times that after {NEAR}"
        hold(text, ratio, ratio <= 1.15)
    return found


def look_ups(results: dict[str, Any]) -> str:
    """What the look-up of chunks adds to a decoded token at each context."""
    cost = {(row["case"], row["context"]): row["ms_per_token"] for row in results["decoding"]}
    parts = [
        f"{cost['managed', context] - cost['managed-slots', context]:.2f} ms after {context}"
        for name, context in cost
        if name == "managed"
    ]
    return f"The look-up of chunks adds per token: {', '.join(parts) or 'not measured'}."


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    contexts = [NEAR, 1024, 4096, 16384, FAR]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=run.numbers, default=[2048], help="lengths to train on; default 2048")
    parser.add_argument("--contexts", type=run.numbers, default=contexts, help="to decode after, or none")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of which the fastest counts; default 3")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--check", action="store_true", help="fail unless all promises hold")
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    if min([args.repeat, *args.tokens, *args.contexts]) < 1:
        parser.error("expected --repeat, --tokens and --contexts of at least 1")
    torch.set_num_threads(1)
    results = run.measure(["managed", "managed-slots", "managed-backbone"], args)
    results["table_seconds"] = {str(n): run.apart(through_table, n, args.repeat) for n in (1, STREAMS)}
    results["promises"] = promises(results)
    settings = {"config": config().to_diff_dict(), "repeat": args.repeat, "dtype": "float32", "threads": 1}
    settings["decoding"], settings["training"] = run.SETTINGS["decoding"], run.SETTINGS["training"]
    if args.json:
        write_json(args.json, {**about("managed_speed.py", argv, settings), **results})
    print(run.report(results, "cpu"), look_ups(results), sep="\n\n")
    return int(args.check and not all(x["holds"] for x in results["promises"]))


if __name__ == "__main__":
    sys.exit(main())
