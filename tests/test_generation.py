"""`generate` in all its modes gives with the cache what it gives without, and rows of a batch what they give alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer, pipeline

from memzoo import MemoryCache

NEW = 2 * zoo.CHUNK + 2
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam samples": {"do_sample": True, "num_beams": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "several beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "guidance": {"do_sample": False, "guidance_scale": 1.5},
}


def generate(model: PreTrainedModel, ids: Tensor, **kwargs: object) -> Tensor:
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=NEW, pad_token_id=0, **kwargs)


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(p.shape[0] for p in prompts)
    ids = torch.stack([torch.cat([torch.zeros(width - p.shape[0], dtype=torch.long), p]) for p in prompts])
    return ids, (ids != 0).long()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, **{f"w{i}": i for i in range(1, zoo.VOCAB)}}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in zoo.NAMES for mode in MODES if name in zoo.BLOCKS or mode == "several beams"],
)
def test_cached_equals_uncached(name: str, mode: str) -> None:
    """On a batch of prompts of unequal length."""
    model = zoo.causal_lm(name) if name in zoo.BLOCKS else zoo.shallow(name)
    ids, mask = left_padded([zoo.tokens(1, n, seed=n)[0] for n in (9, 5, 2)])
    cached = generate(model, ids, attention_mask=mask, **MODES[mode])
    assert torch.equal(cached, generate(model, ids, attention_mask=mask, use_cache=False, **MODES[mode]))


@pytest.mark.parametrize("name", [n for n in ("titans-mal-skip-e16", "dot-e1") if n in zoo.NAMES])
def test_a_static_cache_gives_the_same(name: str) -> None:
    """As transformers makes one: with room for the longest sequence that may come of the prompts."""
    model = zoo.causal_lm(name)
    ids, mask = left_padded([zoo.tokens(1, n, seed=n)[0] for n in (9, 5, 2)])
    static = generate(model, ids, attention_mask=mask, do_sample=False, cache_implementation="static")
    assert torch.equal(static, generate(model, ids, attention_mask=mask, do_sample=False))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_rows_of_a_batch_equal_rows_alone(name: str) -> None:
    model = zoo.causal_lm(name)
    prompts = [zoo.tokens(1, n, seed=n)[0] for n in (9, 5, 1)]
    ids, mask = left_padded(prompts)
    batch = generate(model, ids, attention_mask=mask, do_sample=False)
    for row, prompt in zip(batch, prompts, strict=True):
        alone = generate(model, prompt[None], do_sample=False)[0]
        assert torch.equal(row[-NEW:], alone[-NEW:])


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_conversation_on_one_cache_equals_one_pass(name: str) -> None:
    """Prompt, answer, next turn: given as the whole sequence, or as the new tokens with a mask of the whole."""
    model = zoo.causal_lm(name)
    ids, mask = left_padded([zoo.tokens(1, n, seed=n)[0] for n in (7, 4)])
    turn = zoo.tokens(2, 3, seed=9)

    def ones(columns: int) -> Tensor:
        return torch.ones(2, columns, dtype=torch.long)

    for whole in (True, False):
        cache = MemoryCache(model.config)
        first = generate(model, ids, attention_mask=mask, cache=cache, do_sample=False)
        assert cache.get_seq_length() == first.shape[1] - 1  # the last token has not been read yet
        longer = torch.cat([first, turn], dim=1)
        longer_mask = torch.cat([mask, ones(NEW + 3)], dim=1)
        want = generate(model, longer, attention_mask=longer_mask, do_sample=False)
        given = longer if whole else longer[:, cache.get_seq_length() :]
        got = generate(model, given, attention_mask=longer_mask, cache=cache, do_sample=False)
        assert torch.equal(got[:, -NEW:], want[:, -NEW:])


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_prefill_in_pieces(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(1, 13)
    want = generate(model, ids, do_sample=False)
    assert torch.equal(generate(model, ids, do_sample=False, prefill_chunk_size=5), want)


def test_stops_at_a_string() -> None:
    inner = Tokenizer(BPE())
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=zoo.VOCAB, special_tokens=["<pad>"])
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    model, ids = zoo.causal_lm("titans-lmm-e1"), torch.arange(1, 6)[None]
    whole = generate(model, ids, do_sample=False)
    stop = tokenizer.decode(whole[0, 8:10])
    stopped = generate(model, ids, do_sample=False, stop_strings=stop, tokenizer=tokenizer)[0]
    assert stop in tokenizer.decode(stopped[5:])
    assert stop not in tokenizer.decode(stopped[5:-1])
    assert torch.equal(stopped, whole[0, : len(stopped)])


def test_continuous_batching_is_refused() -> None:
    with pytest.raises(ValueError, match="continuous batching keeps keys and values in pages"):
        zoo.causal_lm("titans-lmm-e1").generate_batch([[1, 2, 3], [4, 5]])


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_new_tokens_without_their_mask_are_refused(name: str) -> None:
    """transformers would take them for the whole sequence, of which the cache has read all."""
    model, ids = zoo.causal_lm(name), zoo.tokens(1, 9)
    cache = MemoryCache(model.config)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="the cache has already read 9 columns"):
        generate(model, ids[:, :2], cache=cache)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_prompt_as_embeddings(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(1, 6)
    embeds = model.get_input_embeddings()(ids)
    got = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, pad_token_id=0, do_sample=False)
    assert torch.equal(got, generate(model, ids, do_sample=False)[:, 6:])


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_streamed_text_is_the_generated_text(
    name: str, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompt = zoo.causal_lm(name), tokenizer("w5 w9 w3", return_tensors="pt").input_ids
    out = generate(model, prompt, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == tokenizer.decode(out[0, 3:]).split()


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_pipeline_from_a_saved_model(name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = zoo.causal_lm(name)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["w5 w9 w3", "w4 w4 w8 w1 w2 w2 w7"]
    pipe = pipeline("text-generation", model=str(tmp_path), tokenizer=str(tmp_path), device="cpu", dtype=torch.float64)
    found = pipe(texts, batch_size=2, max_new_tokens=NEW, do_sample=False, return_full_text=False)
    for text, (result,) in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        # The pipeline leaves special tokens out, which a random model may well write.
        want = tokenizer.decode(generate(model, ids, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True)
        assert result["generated_text"].split() == want.split()
