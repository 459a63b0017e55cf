"""What a memory learns of a mapping while it reads: five mappings, three memories, three inner optimizers.

    python benchmarks/memorize.py --json benchmarks/results/memorize.json --plot benchmarks/results/memorize.png

A memory reads the pairs `(k_t, v_t)` of a sequence once and in order, by `memzoo.kernels.deep_memory` at chunk size
1, where every gradient is taken at the memory as it stands. Before it reads a pair it is asked for it,

    error_t = |M_{t-1}(k_t) - v_t|^2 / mean_t |v_t|^2,

so that 1 is the error of a memory that always says 0. With inputs i_t ~ N(0, I), a random network f of two layers and
random causal attention A over the inputs so far,

    low_rank           k = i      v = i X Y        X Y of rank 4
    mlp                k = i      v = f(i)
    attention_mlp      k = i      v = f(A(i))      what the key does not say depends on the past
    attention_inputs   k = A(i)   v = f(A(i))      as `mlp`, but the keys resemble one another
    window_mlp         k = i      v = f(A'(i))     A' sees the last 64 inputs only

Source: the five mappings and the training along the sequence are those of ATLAS (arXiv 2505.23735, section 6.4). All
constants are ours, and so are these: attention's and f's outputs are scaled to unit variance; nothing is forgotten;
momentum is 0.9. The memories are the zoo's, a matrix that starts at zero, `W_1 gelu(W_2 x)` and its gated form, four
times as wide inside as outside, without the `x +` of a layer, which a mapping would have to take away again. The step
size of every mapping, memory and optimizer is the one of the optimizer's powers of two whose mean error is smallest on
sequences (with mappings of their own) that are not reported, where it may still diverge: such an error is `null`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import operator
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from record import about, table, write_json
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from memzoo.kernels.deep_memory import Muon, deep_memory, initial_state
from memzoo.modeling.mixers.deep_memory import InitialWeights

WIDTH, HIDDEN, RANK, WINDOW, MOMENTUM = 32, 128, 4, 64, 0.9
BUCKET = 16  # tokens whose errors a point of the plot averages
Draw = Callable[[int, int], Tensor]


class Memory(NamedTuple):
    """A memory network."""

    hidden: tuple[int, ...]
    gated: bool = False


class Optimizer(NamedTuple):
    """How it learns, and the step sizes to choose from."""

    step_sizes: list[float]
    momentum: float | None = None
    muon: Muon | None = None


FINE, COARSE = [2.0**-i for i in range(4, 17)], [2.0**-i for i in range(4, 12)]
MEMORIES = {"linear": Memory(()), "mlp": Memory((HIDDEN,)), "gated_mlp": Memory((HIDDEN,), gated=True)}
OPTIMIZERS = {
    "gd": Optimizer(FINE),
    "momentum": Optimizer(FINE, MOMENTUM),
    "muon": Optimizer(COARSE, MOMENTUM, Muon(5, "token")),  # whose steps have one length, whatever the gradient's
}


def scaled(x: Tensor) -> Tensor:
    """`x` with a mean square of 1."""
    return x / x.square().mean().sqrt()


def network(x: Tensor, draw: Draw) -> Tensor:
    """A random network of two layers."""
    return F.gelu(x @ draw(WIDTH, HIDDEN)) @ draw(HIDDEN, WIDTH)


def attention(x: Tensor, draw: Draw, window: int | None = None) -> Tensor:
    """Random causal softmax attention, `[T, D]` to the same."""
    q, k, v = (x @ draw(WIDTH, WIDTH) for _ in range(3))
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    return scaled(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0])


def low_rank(x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    return x, x @ draw(WIDTH, RANK) @ draw(RANK, WIDTH)


def mlp(x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    return x, network(x, draw)


def attention_mlp(x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    return x, network(attention(x, draw), draw)


def attention_inputs(x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    return mlp(attention(x, draw), draw)


def window_mlp(x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    return x, network(attention(x, draw, WINDOW), draw)


MAPPINGS = {f.__name__: f for f in (low_rank, mlp, attention_mlp, attention_inputs, window_mlp)}


def sequence(mapping: str, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a fresh mapping, `[T, D]` each; the same seed draws the same inputs for every mapping."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=generator)
    key, value = MAPPINGS[mapping](x, lambda n, m: torch.randn(n, m, generator=generator) / math.sqrt(n))
    return key, scaled(value)


@torch.no_grad()
def errors(key: Tensor, value: Tensor, memory: Memory, optimizer: Optimizer, step_sizes: Sequence[float]) -> Tensor:
    """`error_t` of every token but the first, for every step size, `[N, S, T - 1]`, for pairs `[N, T, D]`.

    The heads are the step sizes, which start from the same weights.
    """
    count, tokens, _ = key.shape
    initial = InitialWeights(count, [WIDTH, *memory.hidden, WIDTH], memory.gated)
    torch.manual_seed(0)
    initial.init_weights()
    heads = len(step_sizes)
    weights = [w[:, None].expand(-1, heads, -1, -1) for w in initial()]
    # Token t, once read, is asked for the pair t + 1.
    q, k, v, wanted = (
        x[:, :, None].expand(-1, -1, heads, -1) for x in (key[:, 1:], key[:, :-1], value[:, :-1], value[:, 1:])
    )
    log_momentum = None
    if optimizer.momentum is not None:
        log_momentum = torch.full((count, tokens - 1, heads), math.log(optimizer.momentum))
    y, _ = deep_memory(
        q,
        k,
        v,
        None,
        log_momentum,
        torch.tensor(step_sizes).expand(count, tokens - 1, -1),
        initial_state(weights, count, chunk_size=1, momentum=optimizer.momentum is not None),
        chunk_size=1,
        residual=False,
        muon=optimizer.muon,
    )
    power = value.square().sum(-1).mean(-1)
    return ((y - wanted).square().sum(-1) / power[:, None, None]).movedim(1, 2)


def finite(x: Tensor) -> float | None:
    """The number, if it is one."""
    return float(x) if x.isfinite() else None


def measure(tokens: int, sequences: int) -> list[dict[str, Any]]:
    """A row for every mapping, memory and optimizer: the best step size, and its errors on sequences of its own."""
    seeds = range(2 * sequences)  # the first half chooses the step size, the second is reported
    pairs = {name: [sequence(name, tokens, seed) for seed in seeds] for name in MAPPINGS}
    keys, values = (torch.stack([pair[part] for name in MAPPINGS for pair in pairs[name]]) for part in (0, 1))
    rows = []
    for memory, optimizer in tqdm([(m, o) for m in MEMORIES for o in OPTIMIZERS], desc="memories and optimizers"):
        steps = OPTIMIZERS[optimizer].step_sizes
        found = errors(keys, values, MEMORIES[memory], OPTIMIZERS[optimizer], steps)
        for mapping, error in zip(MAPPINGS, found.split(len(seeds)), strict=True):
            cost = error[:sequences].mean((0, 2)).nan_to_num(math.inf)
            best = int(cost.argmin())
            chosen = error[sequences:, best]
            last = chosen[:, 3 * tokens // 4 :].mean(1)
            rows.append(
                {
                    "mapping": mapping,
                    "memory": memory,
                    "optimizer": optimizer,
                    "step_size": steps[best],
                    "at_edge_of_grid": best in (0, len(steps) - 1),
                    "error": finite(chosen.mean()),
                    "last_quarter": finite(last.mean()),
                    "last_quarter_deviation": finite(last.std(correction=0)),
                    "curve": [finite(part.mean()) for part in chosen.split(BUCKET, dim=1)],
                }
            )
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Errors of the last quarter and their step sizes, a line per mapping and memory."""

    def cell(row: dict[str, Any]) -> str:
        error, deviation = row["last_quarter"], row["last_quarter_deviation"]
        found = "diverged" if error is None else f"{error:.3f} +- {deviation:.3f}"
        return f"{found} at 2^{math.log2(row['step_size']):.0f}"

    lines = [
        {row["optimizer"]: cell(row) for row in rows if (row["mapping"], row["memory"]) == name} | {"": ", ".join(name)}
        for name in itertools.product(MAPPINGS, MEMORIES)
    ]
    heads = {"error, last quarter": "", **{name: name for name in OPTIMIZERS}}
    return table([(head, operator.itemgetter(key)) for head, key in heads.items()], lines)


def draw(rows: list[dict[str, Any]], tokens: int, path: Path) -> None:
    """A panel per mapping: the error along the sequence."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, len(MAPPINGS), figsize=(17, 4.6), sharey=True, layout="constrained")
    colors = dict(zip(OPTIMIZERS, ("#6b6b6b", "#1f5fa8", "#d9661f"), strict=True))
    styles = dict(zip(MEMORIES, (":", "-", "--"), strict=True))
    for panel, mapping in zip(panels, MAPPINGS, strict=True):
        for row in (row for row in rows if row["mapping"] == mapping):
            places = [BUCKET * (i + 0.5) for i in range(len(row["curve"]))]
            style, color = styles[row["memory"]], colors[row["optimizer"]]
            curve = [math.nan if error is None else error for error in row["curve"]]
            panel.plot(places, curve, style, color=color, label=f"{row['memory']}, {row['optimizer']}")
        panel.axhline(1, color="black", linewidth=0.5)
        panel.set(yscale="log", xlim=(0, tokens), ylim=(0.02, 4), xlabel="Pairs read", title=mapping)
    panels[0].set_ylabel("Error of the next pair (1: says nothing)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) // len(MEMORIES), frameon=False)
    beside = path.with_name(path.name + ".part")
    figure.savefig(beside, dpi=130, format="png")
    plt.close(figure)
    beside.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="pairs in a sequence; default 256")
    parser.add_argument("--sequences", type=int, default=4, help="reported per mapping; default 4")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw them in this PNG file")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.sequences < 1:
        parser.error("expected --tokens of at least 2 and --sequences of at least 1")
    torch.set_num_threads(1)
    begin = time.process_time()
    rows = measure(args.tokens, args.sequences)
    settings = {
        "width": WIDTH,
        "hidden": HIDDEN,
        "rank": RANK,
        "window": WINDOW,
        "momentum": MOMENTUM,
        "newton_schulz_steps": OPTIMIZERS["muon"].muon.steps,
        "step_sizes": {name: optimizer.step_sizes for name, optimizer in OPTIMIZERS.items()},
        "tokens": args.tokens,
        "sequences": args.sequences,
        "dtype": "float32",
        "threads": 1,
    }
    content = {**about("memorize.py", argv, settings), "cpu_seconds": time.process_time() - begin, "rows": rows}
    if args.json:
        write_json(args.json, content)
    if args.plot:
        draw(rows, args.tokens, args.plot)
    print(report(rows))


if __name__ == "__main__":
    main()
