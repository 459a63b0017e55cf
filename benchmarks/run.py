"""What the zoo costs: speed and memory of training and of cached decoding, beside peers, in one run on one thread.

    python benchmarks/run.py --json results.json

Every model reads the same token ids, each in a process of its own, so that its peak memory is its own, and the cases
take turns, so that a drift of the machine meets all of them. Speed is tokens per CPU second (`time.process_time`) in
the fastest of `--repeat` rounds, each after a warm-up: what else a machine does only ever makes a round slower. On a
GPU it is tokens per second between two CUDA events, in the median round, and the ops' kernels are timed one by one
(`kernel_speed.py`). Memory is the peak resident size (on a GPU: allocated), and its
increase over the size after the imports, which the ratios compare; on Linux the processes branch off one that has done
the imports, so pages of libraries that a case never touches do not count. Every registered architecture is measured;
`VARIANTS` says in which configurations.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import kernel_speed
import psutil
import torch
import torch.utils._pytree as pytree
from record import Column, about, table, write_json
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import (
    AutoModelForCausalLM,
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import memzoo

WIDTH, LAYERS, HEADS, VOCAB, CHUNK, PERSISTENT = 256, 4, 4, 1024, 64, 4
SHAPE = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
MEMORY = {"memory_depth": 2, "memory_expansion": 4, "chunk_size": CHUNK, "num_persistent_tokens": PERSISTENT}
# The attention of every wiring reaches as far as the peer's.
TITANS = {**MEMORY, "sliding_window": CHUNK, "segment_size": CHUNK}
# Which configurations of an architecture run, by model type; an architecture that is not listed runs as it comes.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "memzoo_titans": {
        **{variant: {"variant": variant, **TITANS} for variant in ("lmm", "mac", "mag", "mal")},
        "lmm-e16": {"variant": "lmm", "capacity_blocks": 16, **TITANS},
    },
    # With the features that they come with, and with none: then the memory is as large as that of Titans.
    **{
        f"memzoo_{name}": {
            "lmm": {"variant": "lmm", **TITANS},
            "lmm-identity": {"variant": "lmm", "feature_map": "identity", **TITANS},
        }
        for name in ("omeganet", "atlas")
    },
    "memzoo_dla": {"lmm": {"variant": "lmm", **TITANS}},
    # Keys and values as wide as the model, as the peers' are.
    **{
        f"memzoo_{name}": {"": {"expand_k": 1.0, "expand_v": 1.0}}
        for name in ("retnet", "deltanet", "gated_deltanet", "comba", "swla", "deep_transformer", "swdt", "dot")
    },
}
STEPS = 2 * CHUNK  # decoded tokens per round: two ends of a chunk, wherever the round starts
SETTINGS = {
    "batch": 1,
    "dtype": "float32",
    "threads": 1,
    **SHAPE,
    "titans": TITANS,
    "decoding": f"fastest round of {STEPS} single-token steps, the cases taking turns",
    "training": "fastest round after its warm-up, the cases taking turns; loss, backward and zero_grad",
    "flops": "matrix products, attention and convolutions that torch dispatches; elementwise work is not counted",
}
NEAR, FAR = 256, 16384


class Promise(NamedTuple):
    """What the project promises of a case, beside a peer."""

    rival: str
    tokens: tuple[int, ...]
    """Lengths of forward + backward."""
    speed: float
    memory: float
    decoding_rival: str
    decoding: float


_TITANS = Promise("titans-pytorch", (4096,), 2.0, 1 / 3, "titans-pytorch", 5.0)
_DELTA = Promise("qwen3-next", (2048, 4096), 1.3, 1.0, "qwen3-next", 1.5)
_LINEAR = Promise("llama", (4096,), 1.4, 1.0, "qwen3-next", 1.5)
PROMISED = {
    "titans-lmm": _TITANS,
    "titans-mag": _TITANS,
    "deltanet": _DELTA,
    "gated_deltanet": _DELTA,
    "comba": _DELTA,
    "retnet": _LINEAR,
    "swla": _LINEAR,
}
COSTS = {"omeganet-lmm": ("titans-lmm", 1.25), "atlas-lmm": ("titans-lmm", 2.0)}
"""What a case's forward + backward of 4,096 tokens may cost, as a multiple of another case's."""
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
MIB = 1 << 20


class Runner:
    """A language model as the measurements use it; as it stands, one of transformers' making."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def logits(self, ids: Tensor) -> Tensor:
        """Logits of all positions, `[1, T, vocabulary]`."""
        return self.model(input_ids=ids, use_cache=False).logits

    def loss(self, ids: Tensor) -> Tensor:
        """The language model's loss on `[1, T]`."""
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def read(self, ids: Tensor, first: int, last: int, cache: Any) -> tuple[Tensor, Any]:
        """Read `ids[:, first:last]` after what `cache` holds: the last token's logits, and the cache."""
        output = self.model(input_ids=ids[:, first:last], cache=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1], output.cache


class TitansPytorch(Runner):
    """titans-pytorch's `MemoryAsContextTransformer` with the setting's sizes: what is the same and what is not.

    The same: a two-layer memory of expansion 4 with momentum and decay in each layer, chunk 64, 4 persistent tokens
    and a window of 64 tokens (65 with the current one). In its favour: as it comes, all inner gradients are taken at
    the initial weights and a chunk shares its momentum and decay, where the zoo takes them at each chunk's start, with
    gates per token. Against it: four residual streams (hyper-connections) and a learned position embedding. Its memory
    and its attention follow one another: of the zoo's wirings, `mal` is nearest.

    Decoding is what its `sample(use_cache=True)` does, the position embedding computed beforehand.
    """

    def __init__(self) -> None:
        from titans_pytorch import MemoryAsContextTransformer, MemoryMLP  # noqa: PLC0415  # may not be installed

        head_dim = WIDTH // HEADS
        model = MemoryAsContextTransformer(
            num_tokens=VOCAB,
            dim=WIDTH,
            depth=LAYERS,
            segment_len=CHUNK,
            heads=HEADS,
            dim_head=head_dim,
            neural_memory_layers=tuple(range(1, LAYERS + 1)),
            neural_memory_segment_len=CHUNK,
            neural_memory_model=MemoryMLP(dim=head_dim, depth=2, expansion_factor=4.0),
            neural_memory_kwargs={"heads": HEADS, "dim_head": head_dim},
            num_persist_mem_tokens=PERSISTENT,
            num_longterm_mem_tokens=0,
            use_flex_attn=False,
            sliding_window_attn=True,
        )
        super().__init__(model)

    def logits(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def loss(self, ids: Tensor) -> Tensor:
        # Not its `return_loss`, which reads one token less: a whole chunk less than everyone else.
        return nn.functional.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def read(self, ids: Tensor, first: int, last: int, cache: Any) -> tuple[Tensor, Any]:
        held, places = (None, None) if cache is None else cache
        if places is None:
            embedding = self.model.axial_pos_emb
            places = embedding(embedding.maybe_derive_outer_dim(ids.shape[1], (CHUNK,)), return_factorized=True)
        logits, held = self.model(ids[:, :last], cache=held, return_cache=True, factorized_pos_emb=places)
        return logits[:, -1], (held, places)


class Case(NamedTuple):
    """Something to measure."""

    build: Callable[[], Runner]
    package: str
    """What must be installed."""
    peer: bool
    max_context: int
    """Contexts beyond take too long to prefill and decode."""


def zoo_case(config_class: type, options: dict[str, Any]) -> Case:
    def build() -> Runner:
        return Runner(AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **options})))

    return Case(build, "memzoo", peer=False, max_context=1 << 30)


def llama() -> Runner:
    """The usual transformer, full attention, with the zoo's feed-forward width."""
    return Runner(LlamaForCausalLM(LlamaConfig(**SHAPE, intermediate_size=-(-8 * WIDTH // 192) * 64)))


class Qwen3Next(Runner):
    """Qwen3-Next (Gated DeltaNet) without its attention layers and experts, on transformers' torch path.

    It asks the cache of an attention layer for the position; here it is told, and that there is no mask to make.
    """

    def __init__(self) -> None:
        super().__init__(Qwen3NextForCausalLM(self.config()))

    def read(self, ids: Tensor, first: int, last: int, cache: Any) -> tuple[Tensor, Any]:
        output = self.model(
            input_ids=ids[:, first:last],
            position_ids=torch.arange(first, last, device=ids.device)[None],
            attention_mask=dict.fromkeys(("full_attention", "linear_attention")),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], output.cache

    @staticmethod
    def config() -> Qwen3NextConfig:
        """The setting's sizes."""
        return Qwen3NextConfig(
            **SHAPE,
            intermediate_size=-(-8 * WIDTH // 192) * 64,
            layer_types=["linear_attention"] * LAYERS,
            mlp_only_layers=list(range(LAYERS)),
            linear_num_key_heads=HEADS,
            linear_num_value_heads=HEADS,
            linear_key_head_dim=WIDTH // HEADS,
            linear_value_head_dim=WIDTH // HEADS,
        )


CASES: dict[str, Case] = {
    "-".join(filter(None, (config.model_type.removeprefix("memzoo_"), row))): zoo_case(config, options)
    for config, *_ in memzoo.ARCHITECTURES
    for row, options in VARIANTS.get(config.model_type, {"": {}}).items()
} | {
    "titans-pytorch": Case(TitansPytorch, "titans_pytorch", peer=True, max_context=1024),
    "llama": Case(llama, "transformers", peer=True, max_context=1 << 30),
    "qwen3-next": Case(Qwen3Next, "transformers", peer=True, max_context=1 << 30),
}


def token_ids(count: int, device: str) -> Tensor:
    """The ids that every case reads, `[1, count]`."""
    return torch.randint(VOCAB, (1, count), generator=torch.Generator().manual_seed(0)).to(device)


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of the process's CPU time, or on a GPU between two events around the work."""
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000


def typical(seconds: list[float], device: str) -> float:
    """Of several rounds: the fastest of a CPU, which nothing makes too fast; the median of a GPU."""
    return min(seconds) if device == "cpu" else statistics.median(seconds)


def resident_bytes(device: str) -> int:
    return psutil.Process().memory_info().rss if device == "cpu" else torch.cuda.memory_allocated()


def peak_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def matrix_rate(device: str) -> float:
    """Floating-point operations per second of a float32 product of two 1024 x 1024 matrices; best of 9."""
    a, b = torch.randn(2, 1024, 1024).to(device)
    for _ in range(2):
        a @ b
    return 2 * 1024**3 / min(timed(lambda: a @ b, device) for _ in range(9))


def counted_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of `work`; torch's counter does not know its own attention on the CPU."""

    def attention(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
        return sdpa_flop_count(q, k, v) // (2 if causal else 1)

    def backward(_: Any, q: Any, k: Any, v: Any, out: Any, norm: Any, dropout: float, causal: bool, **__: Any) -> int:
        return 5 * attention(q, k, v, dropout, causal) // 2  # five products where the forward has two

    forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    with FlopCounterMode(display=False, custom_mapping={forward_op: attention, backward_op: backward}) as counter:
        work()
    return counter.get_total_flops()


def train(name: str, tokens: int, first: bool, device: str) -> dict[str, Any]:
    """Forward and backward of one case, once, with what needs no second round if this is the `first`."""
    importlib.import_module(CASES[name].package)
    before = resident_bytes(device)
    torch.manual_seed(0)
    runner = CASES[name].build()
    model = runner.model.to(device).train()
    ids = token_ids(tokens, device)

    def work() -> Tensor:
        model.zero_grad()
        loss = runner.loss(ids)
        loss.backward()
        return loss.detach()

    loss = float(work())
    if not math.isfinite(loss):
        raise ValueError(f"{name}: expected a finite loss on {tokens} tokens, got {loss}.")
    seconds = timed(work, device)
    peak = peak_bytes(device)
    return {
        "case": name,
        "tokens": tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": loss,
        "seconds": [seconds],
        "peak_bytes": peak,
        "increase_bytes": peak - before,
        **({"flops": counted_flops(work)} if first else {}),
    }


def cached_error(runner: Runner, device: str) -> float:
    """Largest difference between cached decoding and one pass, over the logits' standard deviation."""
    prompt, ids = CHUNK + CHUNK // 2, token_ids(2 * CHUNK + 6, device)
    full = runner.logits(ids)
    logits, cache = runner.read(ids, 0, prompt, None)
    steps = [logits]
    for last in range(prompt + 1, ids.shape[1] + 1):
        logits, cache = runner.read(ids, last - 1, last, cache)
        steps.append(logits)
    return float((torch.stack(steps, dim=1) - full[:, prompt - 1 :]).abs().max() / full.std())


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, memzoo.MemoryCache):
        return cache.memory_bytes
    if isinstance(cache, Cache):
        cache = [vars(layer) for layer in cache.layers]
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(cache) if isinstance(x, Tensor))


class Decoding:
    """Cached decoding of one case after each of several contexts."""

    @torch.no_grad()
    def __init__(self, name: str, contexts: Sequence[int], rounds: int, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.runner = CASES[name].build()
        self.runner.model.to(device).eval()
        self.error = cached_error(self.runner, device)
        if not CASES[name].peer and not self.error < 1e-3:
            raise ValueError(
                f"{name}: cached decoding differs from one pass by {self.error:.1e} of the logits' spread."
            )
        self.ids = token_ids(max(contexts) + rounds * STEPS + 1, device)
        self.caches = {context: self._prefilled(context) for context in contexts}
        self.read = {context: context for context in contexts}
        for context in contexts:
            self._advance(context, 1)

    def _prefilled(self, context: int) -> Any:
        """The cache after `context` tokens; read in parts where that is possible, so that many cases fit in memory."""
        size, cache = context if CASES[self.name].peer else 1024, None
        for first in range(0, context, size):
            _, cache = self.runner.read(self.ids, first, min(context, first + size), cache)
        return cache

    def _advance(self, context: int, count: int) -> None:
        for index in range(self.read[context], self.read[context] + count):
            _, self.caches[context] = self.runner.read(self.ids, index, index + 1, self.caches[context])
        self.read[context] += count

    @torch.no_grad()
    def round(self, context: int) -> float:
        """Seconds of `STEPS` tokens."""
        return timed(lambda: self._advance(context, STEPS), self.device)

    def row(self, context: int) -> dict[str, Any]:
        """What there is to say besides the time."""
        row = {"case": self.name, "context": context, "cache_bytes": cache_bytes(self.caches[context])}
        return {**row, "cached_error": self.error, "seconds": []}


_decoding: Decoding  # in a case's own process


def _begin_decoding(*args: Any) -> None:
    global _decoding
    _decoding = Decoding(*args)


def _decode(context: int) -> float:
    return _decoding.round(context)


def _decoded(context: int) -> dict[str, Any]:
    return _decoding.row(context)


def process() -> ProcessPoolExecutor:
    """A process of one's own, on one thread."""
    return ProcessPoolExecutor(1, mp_context=CONTEXT, initializer=torch.set_num_threads, initargs=(1,))


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` in a process of its own."""
    print(f"{work.__name__} {' '.join(map(str, args))}", file=sys.stderr)
    with process() as pool:
        return pool.submit(work, *args).result()


def trained(names: list[str], tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward of all cases, in rounds."""
    rows = {name: apart(train, name, tokens, True, args.device) for name in names}
    for _ in range(1, args.repeat):
        for name, row in rows.items():
            row["seconds"] += apart(train, name, tokens, False, args.device)["seconds"]
    for row in rows.values():
        row["tokens_per_second"] = tokens / typical(row["seconds"], args.device)
    return list(rows.values())


def decoded(names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Cached decoding of all cases, in rounds; each case's process lives through all of them."""
    with ExitStack() as stack:
        rows: list[tuple[ProcessPoolExecutor, dict[str, Any]]] = []
        for name in names:
            contexts = [context for context in args.contexts if context <= CASES[name].max_context]
            if contexts:
                print(f"decode {name} {contexts}", file=sys.stderr)
                pool = stack.enter_context(process())
                pool.submit(_begin_decoding, name, contexts, args.repeat, args.device).result()
                rows += [(pool, pool.submit(_decoded, context).result()) for context in contexts]
        for _ in range(args.repeat):
            for pool, row in rows:
                row["seconds"].append(pool.submit(_decode, row["context"]).result())
    for _, row in rows:
        row["ms_per_token"] = 1000 * typical(row["seconds"], args.device) / STEPS
    return [row for _, row in rows]


def measure(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """All measurements, with the ratios to each peer in its row's place."""
    rate = apart(matrix_rate, args.device)
    training = [row for tokens in args.tokens for row in trained(names, tokens, args)]
    decoding = decoded(names, args)
    peers = [name for name in names if CASES[name].peer]
    for row in training:
        row["matrix_rate_fraction"] = row["flops"] / typical(row["seconds"], args.device) / rate
        rivals = [x for x in training if x["case"] in peers and x["tokens"] == row["tokens"]]
        row["speed_ratio"] = {x["case"]: row["tokens_per_second"] / x["tokens_per_second"] for x in rivals}
        row["memory_ratio"] = {x["case"]: row["increase_bytes"] / max(1, x["increase_bytes"]) for x in rivals}
    for row in decoding:
        rivals = [x for x in decoding if x["case"] in peers and x["context"] == row["context"]]
        row["speed_ratio"] = {x["case"]: x["ms_per_token"] / row["ms_per_token"] for x in rivals}
    found = {"matrix_rate": rate, "training": training, "decoding": decoding}
    return found if args.device == "cpu" else {**found, "kernels": apart(kernel_speed.on_gpu, args.device)}


def promises(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold, as far as this run has measured it."""
    found: list[dict[str, Any]] = []

    def hold(text: str, value: float, at_least: float = 0.0, at_most: float = math.inf) -> None:
        found.append({"promise": text, "value": value, "holds": at_least <= value <= at_most})

    for row in results["training"]:
        promise = PROMISED.get(row["case"])
        if promise is not None and row["tokens"] in promise.tokens and promise.rival in row["speed_ratio"]:
            what, rival = f"{row['case']}, forward + backward of {row['tokens']} tokens", promise.rival
            hold(f"{what}: speed at least {promise.speed} times {rival}'s", row["speed_ratio"][rival], promise.speed)
            text = f"{what}: memory at most {promise.memory:.2f} times {rival}'s"
            hold(text, row["memory_ratio"][rival], at_most=promise.memory)
    speed = {row["case"]: row["tokens_per_second"] for row in results["training"] if row["tokens"] == 4096}
    for name, (other, cost) in COSTS.items():
        if name in speed and other in speed:
            what = f"{name}, forward + backward of 4096 tokens: time at most {cost} times {other}'s"
            hold(what, speed[other] / speed[name], at_most=cost)
    ours = [row for row in results["decoding"] if not CASES[row["case"]].peer]
    for row in ours:
        promise = PROMISED.get(row["case"])
        if promise is not None and promise.decoding_rival in row["speed_ratio"]:
            text = f"{row['case']}, decoding after {row['context']} tokens: speed at least {promise.decoding} times "
            ratio = row["speed_ratio"][promise.decoding_rival]
            hold(f"{text}{promise.decoding_rival}'s", ratio, at_least=promise.decoding)
    near, far = ({x["case"]: x["ms_per_token"] for x in ours if x["context"] == context} for context in (NEAR, FAR))
    for name in [name for name in near if name in far]:
        what = f"{name}, decoding: cost per token after {FAR} tokens at most 1.15 times that after {NEAR}"
        hold(what, far[name] / near[name], at_most=1.15)
    return found


def report(results: dict[str, Any], device: str) -> str:
    """The results as text."""
    training, decoding = results["training"], results["decoding"]

    def ratios(sign: str, key: str) -> list[Column]:
        peers = dict.fromkeys(peer for row in (*training, *decoding) for peer in row.get(key, ()))
        return [(f"{sign} {p}", lambda row, p=p: f"{row[key][p]:.2f}" if p in row[key] else "-") for p in peers]

    train_columns: list[Column] = [
        ("forward + backward", lambda row: row["case"]),
        ("tokens", lambda row: str(row["tokens"])),
        ("M params", lambda row: f"{row['parameters'] / 1e6:.2f}"),
        ("tokens/CPU s" if device == "cpu" else "tokens/s", lambda row: f"{row['tokens_per_second']:.0f}"),
        *ratios("x", "speed_ratio"),
        ("peak MiB", lambda row: f"{row['peak_bytes'] / MIB:.0f}"),
        ("increase MiB", lambda row: f"{row['increase_bytes'] / MIB:.0f}"),
        *ratios("/", "memory_ratio"),
        ("GFlop", lambda row: f"{row['flops'] / 1e9:.0f}"),
        ("of matrix rate", lambda row: f"{row['matrix_rate_fraction']:.0%}"),
    ]
    decode_columns: list[Column] = [
        ("cached decoding", lambda row: row["case"]),
        ("context", lambda row: str(row["context"])),
        ("ms/token", lambda row: f"{row['ms_per_token']:.2f}"),
        *ratios("x", "speed_ratio"),
        ("cache MiB", lambda row: f"{row['cache_bytes'] / MIB:.2f}"),
        ("error", lambda row: f"{row['cached_error']:.0e}"),
    ]
    parts = [f"Product of two 1024 x 1024 matrices: {results['matrix_rate'] / 1e9:.1f} GFlop/s"]
    parts += [table(columns, rows) for columns, rows in ((train_columns, training), (decode_columns, decoding)) if rows]
    lines = [f"{'holds ' if x['holds'] else 'MISSED'}  {x['value']:6.2f}  {x['promise']}" for x in results["promises"]]
    parts += [kernel_speed.lines(results["kernels"])] if "kernels" in results else []
    return "\n\n".join([*parts, "\n".join(lines) or "These sizes measure no promise."])


def numbers(text: str) -> list[int]:
    """Of an option: comma-separated, or none."""
    return [] if text == "none" else [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the names of the cases to run."""
    ours, peers = ([name for name, case in CASES.items() if case.peer == wanted] for wanted in (False, True))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="all", help=f"names, comma-separated, of {', '.join(ours)}; default all")
    parser.add_argument("--peers", default="all", help=f"names of {', '.join(peers)}; all that are installed, or none")
    parser.add_argument("--tokens", type=numbers, default=[4096], help="lengths to train on, or none; default 4096")
    parser.add_argument("--contexts", type=numbers, default=[256, 1024, 4096, 16384], help="to decode after, or none")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of which the fastest counts; default 3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--check", action="store_true", help="fail unless promises are measured and all hold")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.backends.cuda.is_built():
        parser.error(f"--device cuda: expected a torch built for a GPU, got {torch.__version__}; install one on a GPU")
    if min([args.repeat, *args.tokens, *args.contexts]) < 1:
        parser.error("expected --repeat, --tokens and --contexts of at least 1")
    installed = [name for name in peers if importlib.util.find_spec(CASES[name].package)]
    names = []
    for wanted, known in ((args.only, ours), (args.peers, installed)):
        chosen = {"all": known, "none": []}.get(wanted, wanted.split(","))
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"expected names of {', '.join(known)}; got {', '.join(unknown)}")
        names += chosen
    return args, names


def main(argv: Sequence[str] | None = None) -> int:
    args, names = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results = measure(names, args)
    results["promises"] = promises(results)
    settings = {**SETTINGS, "repeat": args.repeat, "device": args.device}
    content = {**about("run.py", sys.argv[1:] if argv is None else argv, settings), **results}
    if args.json:
        write_json(args.json, content)
    print(*(f"{key}: {json.dumps(content[key])}" for key in ("machine", "versions", "settings")), sep="\n", end="\n\n")
    print(report(results, args.device))
    missed = not results["promises"] or not all(x["holds"] for x in results["promises"])
    return int(args.check and missed)


if __name__ == "__main__":
    sys.exit(main())
