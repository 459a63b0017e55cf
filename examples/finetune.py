"""Train a Titans language model on your text files, from a fresh model or from a checkpoint.

    python examples/finetune.py --text book.txt --preset 170m --tokenizer DIR --max_steps 1000
    python examples/finetune.py --text a.txt b.txt --hidden_size 256 --num_hidden_layers 4 --num_attention_heads 4
    python examples/finetune.py --text notes.txt --model runs/finetune --output_dir runs/notes
    python examples/finetune.py --text notes.txt --model UPCYCLED --freeze source    # the memory alone

Every option of `transformers.TrainingArguments` is an option here too (`--learning_rate`, `--bf16`, `--max_steps`,
`--gradient_checkpointing`, `--resume_from_checkpoint`, ...). Without `--tokenizer` a fresh model gets a byte-pair
tokenizer trained on the text.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from memzoo import TitansConfig
from memzoo.conversion.upcycle import FREEZE, freeze


@dataclass
class Arguments:
    """What to train on what."""

    text: list[str] = field(metadata={"help": "Text files (UTF-8) to train on."})
    eval_text: list[str] | None = field(
        default=None, metadata={"help": "Held-out files; else the last 5 % of the text."}
    )
    context: int = field(default=512, metadata={"help": "Tokens in a training window."})
    model: str | None = field(default=None, metadata={"help": "Checkpoint folder or Hub name to go on from."})
    freeze: str = field(
        default="none", metadata={"help": f"What of an upcycled model stays as it is: {', '.join(FREEZE)}."}
    )
    preset: str | None = field(
        default=None, metadata={"help": "Size of a fresh model: 170m (default), 340m, 760m, 1.3b."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Tokenizer folder or Hub name."})
    vocab_size: int = field(default=8192, metadata={"help": "Size of the tokenizer that is trained without one."})


@dataclass
class FreshModel:
    """What a fresh model has otherwise than its preset: fields of `TitansConfig`; add those that you vary."""

    variant: str | None = field(default=None, metadata={"help": "lmm (default), mac, mag or mal."})
    capacity_blocks: int | None = field(default=None, metadata={"help": "Blocks of the Proteus schedule."})
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None


def load_text(args: Arguments) -> datasets.DatasetDict:
    """The files as documents, one a row, under `train` and perhaps `validation`."""
    files = {"train": args.text} | ({"validation": args.eval_text} if args.eval_text else {})
    return datasets.load_dataset("text", data_files=files, sample_by="document")


def train_tokenizer(documents: datasets.Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair tokenizer of the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((row["text"] for row in documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def load_model(
    args: Arguments, fresh: FreshModel, documents: datasets.Dataset
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer: of the checkpoint, or fresh."""
    fields = {name: value for name, value in asdict(fresh).items() if value is not None}
    if args.model and (fields or args.preset):
        raise ValueError(f"--model {args.model} has its own shape: leave out {sorted(fields) or '--preset'}.")
    if args.freeze != "none" and not args.model:
        raise ValueError(f"--freeze {args.freeze}: a fresh model has no source; name an upcycled one with --model.")
    source = args.tokenizer or args.model
    tokenizer = AutoTokenizer.from_pretrained(source) if source else train_tokenizer(documents, args.vocab_size)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
        if args.freeze != "none":
            freeze(model, args.freeze)
        return model, tokenizer
    config = TitansConfig.preset(
        args.preset or "170m",
        vocab_size=len(tokenizer),
        capacity_context=args.context,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **fields,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def to_windows(
    documents: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase, context: int
) -> datasets.DatasetDict:
    """Documents as rows of `context` tokens; a document's last tokens share a row with the next one's first."""

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(batch["text"]).input_ids]}

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = [token for document in batch["input_ids"] for token in document]
        rows = [ids[at : at + context] for at in range(0, len(ids) - context + 1, context)]
        return {"input_ids": rows, "labels": rows}

    tokens = documents.map(tokenize, batched=True, remove_columns=["text"], desc="Tokenizing")
    return tokens.map(cut, batched=True, desc="Cutting into windows")


def hold_out(data: datasets.DatasetDict, context: int) -> datasets.DatasetDict:
    """`data` with a `validation` part: what was given, or the last twentieth of the windows."""
    if "validation" not in data and len(data["train"]) >= 2:
        parts = data["train"].train_test_split(max(1, len(data["train"]) // 20), shuffle=False)
        data = datasets.DatasetDict(train=parts["train"], validation=parts["test"])
    counts = {name: len(data[name]) if name in data else 0 for name in ("train", "validation")}
    print(f"Windows of {context} tokens: {counts}")
    if min(counts.values()) == 0:
        raise ValueError(f"{counts} windows of {context} tokens: expected at least one of each; lower --context.")
    return data


def main(args: Arguments, fresh: FreshModel, training_args: TrainingArguments) -> None:
    set_seed(training_args.seed)
    documents = load_text(args)
    model, tokenizer = load_model(args, fresh, documents["train"])
    data = hold_out(to_windows(documents, tokenizer, args.context), args.context)
    trained = model.num_parameters(only_trainable=True)
    print(f"{type(model).__name__} with {model.num_parameters():,} parameters, {trained:,} of them trained")
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"Held-out perplexity: {math.exp(loss):.2f} (loss {loss:.4f}). Saved to {training_args.output_dir}.")


if __name__ == "__main__":
    parser = HfArgumentParser((Arguments, FreshModel, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/finetune",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=10,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    main(*parser.parse_args_into_dataclasses())
