"""Transformer-L is the paper's: its sizes, its causality, its arithmetic."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gpipe_lite.models import transformer
from gpipe_lite.models.transformer import CausalAttention, sinusoids


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("num_layers", "count"),
    [
        (3, 282_178_816),
        (13, 785_761_536),
        (103, 5_318_006_016),
        (415, 21_029_786_880),
        (1663, 83_876_910_336),
    ],
)
def test_parameter_counts_are_the_paper_s_to_the_digit(num_layers, count):
    """Huang et al., arXiv 1811.06965v5, Table 1: 282.2M, 785.8M, 5.3B, 21.0B, 83.9B."""
    with torch.device("meta"):
        model = transformer(num_layers)
    assert num_parameters(model) == count
    assert len(model) == num_layers + 2


@given(
    num_layers=st.integers(1, 5),
    vocab_size=st.integers(1, 300),
    num_heads=st.integers(1, 8),
    head_width=st.integers(1, 16),
    d_ff=st.integers(1, 200),
)
def test_parameter_counts_follow_the_closed_formula(num_layers, vocab_size, num_heads, head_width, d_ff):
    """Two matrices of d a token and a bias; each block four d by d, two d by d_ff, their biases, two norms."""
    d = num_heads * head_width
    with torch.device("meta"):
        model = transformer(num_layers, vocab_size, d, num_heads, d_ff)
    block = 4 * d * d + 2 * d * d_ff + (4 * d + d_ff + d) + 4 * d
    assert num_parameters(model) == 2 * vocab_size * d + vocab_size + num_layers * block


@given(length=st.integers(2, 9), data=st.data())
def test_a_later_token_changes_no_earlier_logit(length, data):
    """And it changes its own: the model is causal, not blind."""
    torch.manual_seed(0)
    changed = data.draw(st.integers(0, length - 1))
    model = transformer(2, 11, 8, 2, 16).double()
    tokens = torch.randint(11, (2, length))
    others = tokens.clone()
    others[:, changed] = (others[:, changed] + 1) % 11
    before, after = model(tokens), model(others)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-12)
    assert (before[:, changed:] - after[:, changed:]).abs().amax(dim=(0, 2)).min() > 1e-6


def test_attention_is_the_softmax_of_scaled_products_over_the_past():
    """Against the formula written out, head by head, in float64."""
    torch.manual_seed(0)
    attention = CausalAttention(d_model=6, num_heads=2).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    query, key, value = attention.query_key_value(x).split(6, dim=-1)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    heads = []
    for head in (slice(0, 3), slice(3, 6)):
        scores = query[..., head] @ key[..., head].mT / math.sqrt(3)
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[..., head])
    torch.testing.assert_close(attention(x), attention.output(torch.cat(heads, dim=-1)))


def test_a_block_adds_what_attention_and_feed_forward_see_after_layer_norm():
    """Pre-norm, written out; with nothing to add, a block is the identity."""
    torch.manual_seed(0)
    block = transformer(1, 7, 8, 2, 16)[1].double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    y = x + block.attention(functional.layer_norm(x, (8,)))
    up, _, down = block.feed_forward
    torch.testing.assert_close(block(x), y + down(up(functional.layer_norm(y, (8,))).relu()))
    for last in (block.attention.output, down):
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("d_model", [1, 2, 7, 16])
def test_positions_are_sines_and_cosines_of_falling_frequency(d_model):
    """Against the formula of Vaswani et al., arXiv 1706.03762, section 3.5, with Python's own functions."""
    expected = [
        [(math.cos if i % 2 else math.sin)(position / 10_000 ** (2 * (i // 2) / d_model)) for i in range(d_model)]
        for position in range(40)
    ]
    torch.testing.assert_close(sinusoids(40, d_model), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_the_order_of_the_tokens_matters():
    """A causal model without positions could not tell [1, 2, 3] from [2, 1, 3] at the last token."""
    torch.manual_seed(0)
    model = transformer(1, 7, 8, 2, 16)
    last = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1]
    assert (last[0] - last[1]).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_have_one_score_a_token_of_the_vocabulary_in_the_model_s_dtype(dtype):
    """Tokens (N, T) to logits (N, T, vocabulary); an empty batch, too."""
    model = transformer(2, 13, 8, 4, 16).to(dtype)
    for n in (0, 1, 3):
        logits = model(torch.zeros(n, 6, dtype=torch.int64))
        assert logits.shape == (n, 6, 13)
        assert logits.dtype == dtype


def test_there_is_nothing_to_save_but_parameters():
    """No buffer for positions or masks, so any length will do, and weights load into any model of their size."""
    model = transformer(2, 13, 8, 4, 16)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert "1.attention.query_key_value.weight" in model.state_dict()


@pytest.mark.parametrize("place", range(5))
def test_dropout_acts_after_the_embedding_and_on_what_each_half_of_a_block_adds(place):
    """Each of a model's 2 L + 1 places drops by itself."""
    torch.manual_seed(0)
    model = transformer(2, 13, 8, 2, 16)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(dropouts) == 5
    tokens = torch.arange(10).view(2, 5)
    before = model(tokens)
    dropouts[place].p = 0.5
    assert not torch.equal(model(tokens), before)


def test_dropout_acts_in_training_only():
    """In training it drops, at evaluation the model is as without it."""
    torch.manual_seed(0)
    model = transformer(2, 13, 8, 2, 16, dropout=0.5)
    plain = transformer(2, 13, 8, 2, 16)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(10).view(2, 5)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers is a whole number, 1 or more, not 0"),
        ({"vocab_size": 2.5}, r"vocab_size is a whole number, 1 or more, not 2\.5"),
        ({"d_ff": True}, "d_ff is a whole number, 1 or more, not True"),
        ({"num_heads": 0}, "num_heads is a whole number, 1 or more, not 0"),
        ({"d_model": 10, "num_heads": 4}, "d_model 10 cannot be split into 4 .* 2 heads, or a d_model of 12"),
        ({"dropout": 1.0}, r"from 0 to below 1, not 1\.0"),
        ({"dropout": float("nan")}, "not nan"),
    ],
)
def test_an_impossible_model_is_refused_with_the_way_out(arguments, message):
    """The error names the argument, what it may be and what it is."""
    sizes = {"num_layers": 1, "vocab_size": 7, "d_model": 8, "num_heads": 2, "d_ff": 16}
    with pytest.raises(ValueError, match=message):
        transformer(**{**sizes, **arguments})
