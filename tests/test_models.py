"""Every architecture, whichever way its input is cut, padded or packed, computes what one pass over one sequence does.

Sequences have lively weights (`zoo.enliven`) and the first test measures that history matters, so that the others mean
something.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import zoo
from tolerances import MODEL, close, error, follows
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from memzoo import ARCHITECTURES, MemoryCache

BOUND = MODEL[torch.float64]
LENGTH = 6 * zoo.CHUNK + 3
CUTS = range(1, 2 * zoo.CHUNK + 2)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **kwargs: object) -> Tensor:
    return model(ids, **kwargs).logits


@pytest.mark.parametrize("name", zoo.NAMES)
def test_history_matters(name: str) -> None:
    """What the equality tests would miss if it were small: the effect of the first tokens on much later ones."""
    model, ids = zoo.causal_lm(name), zoo.tokens(2, LENGTH)
    other = torch.cat([zoo.tokens(2, 4, seed=1), ids[:, 4:]], dim=1)
    assert error(logits(model, other)[:, -8:], logits(model, ids)[:, -8:]) > 1e-3


@pytest.mark.parametrize("name", zoo.NAMES)
def test_prefill_and_decode_equal_one_pass(name: str) -> None:
    """For every cut from 1 to 2C + 1: the rest at once, in pieces, and token by token for 2C tokens or, once, all."""
    model, ids = zoo.shallow(name), zoo.tokens(2, LENGTH)
    want = logits(model, ids)
    for cut in CUTS:
        prompt, rest = ids.split([cut, LENGTH - cut], dim=1)
        read = MemoryCache(model.config)
        first = logits(model, prompt, cache=read)
        single = len(CUTS) - 1 if cut > 1 else LENGTH - cut
        for pieces in ([LENGTH - cut], [3, 5, 1, LENGTH - cut - 9], [1] * single + [LENGTH - cut - single]):
            cache = copy.deepcopy(read)
            parts = [logits(model, part, cache=cache) for part in rest.split(pieces, dim=1) if part.shape[1]]
            close(torch.cat([first, *parts], dim=1), want, BOUND)
            assert cache.get_seq_length() == LENGTH
            assert {layer.get_seq_length() for layer in cache.layers} == {LENGTH}


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
def test_short_sequences(name: str, length: int) -> None:
    """Shorter than the convolution, the chunk, the segment: right values and a state that continues."""
    model, ids = zoo.shallow(name), zoo.tokens(1, length + 6)
    want = logits(model, ids)
    close(logits(model, ids[:, :length]), want[:, :length], BOUND)
    cache = MemoryCache(model.config)
    logits(model, ids[:, :length], cache=cache)
    close(logits(model, ids[:, length:], cache=cache), want[:, length:], BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("left", [True, False])
def test_padded_rows_equal_rows_alone(name: str, left: bool) -> None:
    """Left or right padding, whatever ids stand under the mask, in one pass and for cuts on a cache.

    Odd cuts are at every place of a chunk, since another row is 5 tokens behind.
    """
    model, ids = zoo.causal_lm(name), zoo.tokens(3, LENGTH)
    lengths = [LENGTH, LENGTH - 5, 3]
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, LENGTH - length :] = 1 if left else 0
        mask[row, :length] |= 0 if left else 1
    got = logits(model, ids, attention_mask=mask)
    noisy = torch.where(mask == 1, ids, zoo.tokens(3, LENGTH, seed=7))
    assert torch.equal(logits(model, noisy, attention_mask=mask), got)
    alone = [logits(model, ids[row : row + 1][mask[row : row + 1] == 1][None])[0] for row in range(3)]
    for row in range(3):
        close(got[row][mask[row] == 1], alone[row], BOUND)
    more = zoo.tokens(3, 6, seed=3)
    for cut in CUTS[::2]:
        cache = MemoryCache(model.config)
        parts = [
            logits(model, ids[:, low:high], attention_mask=mask[:, :high], cache=cache)
            for low, high in ((0, cut), (cut, cut + 1), (cut + 1, LENGTH))
        ]
        close(torch.cat(parts, dim=1), got, BOUND)
        # A next turn on the same cache, rows standing at different positions, token by token.
        assert cache.position is not None
        assert cache.position.tolist() == lengths
        if cut in (CUTS[0], CUTS[-1]):
            turn = torch.cat([logits(model, token, cache=cache) for token in more.split(1, dim=1)], dim=1)
            for row in range(3):
                whole = torch.cat([ids[row][mask[row] == 1], more[row]])[None]
                close(turn[row], logits(model, whole)[0, -6:], BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("convention", ["position_ids", "seq_idx", "cu_seqlens", "cu_seq_lens_q"])
def test_packed_sequences_equal_sequences_alone(name: str, convention: str) -> None:
    model = zoo.causal_lm(name)
    parts = [zoo.tokens(1, length, seed=length) for length in (5, 1, 13, zoo.CHUNK)]
    lengths = torch.tensor([part.shape[1] for part in parts])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packing = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "seq_idx": torch.arange(len(parts)).repeat_interleave(lengths)[None],
        "cu_seqlens": bounds,
        "cu_seq_lens_q": bounds.int(),
    }
    got = logits(model, torch.cat(parts, dim=1), **{convention: packing[convention]})
    for low, high, part in zip(bounds[:-1], bounds[1:], parts, strict=True):
        close(got[:, low:high], logits(model, part), BOUND)
    # Two packed rows, padded on the right, by positions.
    if convention in ("position_ids", "seq_idx"):
        row = torch.cat(parts, dim=1)
        ids = torch.cat([row, row.flip(1)])
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        got = logits(model, ids, attention_mask=mask, **{convention: packing[convention].expand(2, -1)})
        for low, high in itertools.pairwise(bounds):
            high_1 = min(int(high), ids.shape[1] - 3)
            close(got[0, low:high], logits(model, ids[:1, low:high])[0], BOUND)
            if low < high_1:
                close(got[1, low:high_1], logits(model, ids[1:, low:high_1])[0], BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_logit_sees_a_later_token(name: str) -> None:
    """Gradient of each logit with respect to later embeddings is exactly zero, and to its own is not."""
    length = 4 * zoo.CHUNK + 3  # two segments and some
    model, ids = zoo.shallow(name), zoo.tokens(1, length)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeds, use_cache=False).logits
    for t in range(length - 1):
        (gradient,) = torch.autograd.grad(out[:, t].square().sum(), embeds, retain_graph=True)
        assert gradient[:, t + 1 :].abs().max() == 0, f"logit {t} sees token {t + 1} or later"
        assert gradient[:, t].abs().max() > 0


@pytest.mark.parametrize("name", zoo.NAMES)
def test_old_cache_names_and_both_at_once(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(1, 9)
    want = logits(model, ids)[:, 6:]
    for key in ("cache", "past_key_values", "cache_params"):
        for module in (model, model.model):
            cache = MemoryCache(model.config)
            model(ids[:, :6], cache=cache)
            out = module(ids[:, 6:], **{key: cache})
            close(out.logits if module is model else model.lm_head(out.last_hidden_state), want, BOUND)
    for key in ("past_key_values", "cache_params"):
        with pytest.raises(ValueError, match=key):
            model(ids, cache=MemoryCache(model.config), **{key: MemoryCache(model.config)})


@pytest.mark.parametrize("name", zoo.NAMES)
def test_inputs_embeds_and_hidden_states(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    again = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, output_hidden_states=True)
    close(again.logits, out.logits, BOUND)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    for hidden in out.hidden_states:
        assert hidden.shape == (2, 9, model.config.hidden_size)
    close(model.lm_head(out.hidden_states[-1]), out.logits, BOUND)
    close(model(ids, attention_mask=mask, logits_to_keep=2).logits, out.logits[:, -2:], BOUND)
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_reference_backend_gives_the_same_model(name: str) -> None:
    ids = zoo.tokens(2, 2 * zoo.CHUNK + 1)
    slow = zoo.build(name, torch.float64, kernel_backend="reference").eval()
    close(logits(zoo.causal_lm(name), ids), logits(slow, ids), BOUND)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_bfloat16_follows_float32(name: str) -> None:
    ids = zoo.tokens(2, LENGTH)
    want = logits(zoo.build(name).eval(), ids)
    low = zoo.build(name, torch.bfloat16).eval()
    got = logits(low, ids)
    assert got.dtype == torch.bfloat16
    inexact = logits(zoo.rounded(name), ids)
    follows(got, want, inexact)
    cache = MemoryCache(low.config)
    parts = [logits(low, part, cache=cache) for part in ids.split([7, 1, LENGTH - 8], dim=1)]
    follows(torch.cat(parts, dim=1), want, inexact)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_classifier_reads_the_last_real_token(name: str) -> None:
    model, ids = zoo.classifier(name), zoo.tokens(3, 9)
    lengths = [9, 6, 2]
    alone = torch.cat([model(ids[row : row + 1, :n]).logits for row, n in enumerate(lengths)])
    right = torch.zeros_like(ids)
    left, left_ids = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        right[row, :n] = 1
        left[row, 9 - n :] = 1
        left_ids[row, 9 - n :] = ids[row, :n]
    close(model(ids, attention_mask=right).logits, alone, BOUND)
    close(model(left_ids, attention_mask=left).logits, alone, BOUND)
    # Without a mask the padding id says where a row ends.
    close(model(ids * right).logits, alone, BOUND)
    close(model(left_ids).logits, alone, BOUND)
    assert model(ids, labels=torch.tensor([0, 1, 2])).loss.isfinite()


@pytest.mark.parametrize("name", zoo.NAMES)
def test_scaled_inputs_stay_finite(name: str) -> None:
    model = zoo.build(name).eval()
    embeds = 100 * model.get_input_embeddings()(zoo.tokens(1, 200))
    assert torch.isfinite(model(inputs_embeds=embeds).logits).all()


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=lambda entry: entry[0].model_type)
def test_auto_classes_know_every_architecture(entry: tuple[type, type, type, type]) -> None:
    config_class, model_class, causal_lm, _ = entry
    config = next(config for config in zoo.TINY.values() if isinstance(config, config_class))
    assert isinstance(AutoConfig.for_model(config.model_type), config_class)
    assert isinstance(AutoModel.from_config(config), model_class)
    assert isinstance(AutoModelForCausalLM.from_config(config), causal_lm)
    assert config.model_type.startswith("memzoo_")
    for cls in entry[1:]:
        assert cls.__doc__
        assert not any(part in cls.__name__.lower() for part in ("reformer", "minimax", "xlnet", "rwkv", "xlstm"))


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_packing_with_padding_between_the_parts(name: str) -> None:
    """A gap inside a sequence is a hole; between two it is not."""
    model, ids = zoo.causal_lm(name), zoo.tokens(1, 12)
    mask = torch.ones_like(ids)
    mask[0, 5] = 0
    parts = torch.tensor([[0] * 6 + [1] * 6])
    got = logits(model, ids, attention_mask=mask, seq_idx=parts)
    close(got[:, :5], logits(model, ids[:, :5]), BOUND)
    close(got[:, 6:], logits(model, ids[:, 6:]), BOUND)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="padding between real tokens of one sequence"):
        model(ids, attention_mask=mask, seq_idx=parts)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_one_long_sequence_does_not_pad_many_short_ones(name: str) -> None:
    """The rows that a packed batch is computed on hold at most twice its tokens."""
    model, sizes = zoo.causal_lm(name), []
    hook = model.model.layers[0].register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[:2].numel()))
    lengths = [40, *[1, 2, 3] * 6]
    ids = zoo.tokens(1, sum(lengths))
    got = logits(model, ids, position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    hook.remove()
    assert sum(sizes) <= 2 * sum(lengths)
    bounds = list(itertools.accumulate(lengths, initial=0))
    for low, high in itertools.pairwise(bounds):
        close(got[:, low:high], logits(model, ids[:, low:high]), BOUND)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_refuses_inputs_that_do_not_fit(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 6)
    holes = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": ids[0]}, r"expected integers \[B, T\]"),
        ({"input_ids": ids[:, :0]}, "T >= 1"),
        ({"input_ids": ids.double()}, "expected integers"),
        ({"input_ids": ids + zoo.VOCAB}, rf"expected ids from 0 to {zoo.VOCAB - 1}, got "),
        ({"input_ids": -ids}, "expected ids from 0"),
        ({"inputs_embeds": torch.zeros(2, 6, 5)}, "inputs_embeds: expected"),
        ({"input_ids": ids, "attention_mask": holes}, "row 0 has padding between real tokens"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 6, 6)}, "2-D mask"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 5)}, r"attention_mask: expected \[2, 6\]"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 9)}, r"attention_mask: expected \[2, 6\]"),
        ({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 4, 5, 6]])}, "row 0 goes from 2 to 4"),
        ({"input_ids": ids, "position_ids": torch.zeros(2, 5)}, "position_ids: expected"),
        ({"input_ids": ids, "seq_idx": torch.zeros(2, 5)}, "seq_idx: expected"),
        ({"input_ids": ids, "cu_seqlens": torch.tensor([0, 6])}, "a batch of one row"),
        ({"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 4, 3, 6])}, "ascending bounds from 0 to 6"),
        ({"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 4])}, "ascending bounds from 0 to 6"),
        (
            {
                "input_ids": ids[:1],
                "cu_seqlens": torch.tensor([0, 4, 6]),
                "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]),
            },
            "divide the batch differently",
        ),
        (
            {"input_ids": ids[:1], "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]), "use_cache": True},
            "Packed sequences have no cache",
        ),
        ({"input_ids": ids, "output_attentions": True}, "no attention map"),
        ({"input_ids": ids, "cache": DynamicCache()}, "expected a MemoryCache, got DynamicCache"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            model(**arguments)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_classifier_refuses_packed_rows(name: str) -> None:
    model, ids = zoo.classifier(name), zoo.tokens(1, 10)
    parts = torch.tensor([[0] * 5 + [1] * 5])
    for packing in (
        {"position_ids": torch.arange(5).repeat(2)[None]},
        {"seq_idx": parts},
        {"cu_seqlens": torch.tensor([0, 5, 10])},
        {"cu_seq_lens_q": torch.tensor([0, 5, 10])},
    ):
        with pytest.raises(ValueError, match="expected one per row"):
            model(ids, **packing)


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_a_cache_given_to_a_packed_batch_is_refused(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(1, 10)
    with pytest.raises(ValueError, match="Packed sequences"):
        model(ids, seq_idx=torch.tensor([[0] * 5 + [1] * 5]), cache=MemoryCache(model.config))


@pytest.mark.parametrize("name", zoo.PLAIN)
def test_a_refused_input_leaves_the_cache_as_it_was(name: str) -> None:
    model, ids = zoo.causal_lm(name), zoo.tokens(2, 12)
    cache = MemoryCache(model.config)
    logits(model, ids[:, :6], cache=cache)
    packed = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    for arguments in (
        {"input_ids": ids[:, 6:] + zoo.VOCAB},
        {"input_ids": ids[:1, 6:]},
        {"input_ids": ids[:, 6:], "seq_idx": packed},
    ):
        with pytest.raises(ValueError, match=r"expected|Packed"):
            model(**arguments, cache=cache)
    close(logits(model, ids[:, 6:], cache=cache), logits(model, ids)[:, 6:], BOUND)
