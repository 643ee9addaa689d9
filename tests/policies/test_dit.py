"""The parts of GR00T's action head agree with independent computations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from vla_async.policies.dit import ActionEncoder, Block, CategoryLinear, CategoryMLP, DiT, TimeEncoder, sinusoid


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_category_has_weights_of_its_own():
    layer = CategoryLinear(3, 4, 5)
    x = torch.randn(2, 6, 4)
    expected = torch.einsum("bti,io->bto", x, layer.weight[1]) + layer.bias[1]
    torch.testing.assert_close(layer(x, 1), expected)
    CategoryMLP(3, 4, 8, 5)(x, 2).sum().backward()
    layer(x, 1).sum().backward()
    assert layer.weight.grad[1].abs().sum() > 0
    assert layer.weight.grad[[0, 2]].abs().sum() == 0, "another embodiment's weights were moved"


def test_sinusoid_by_hand():
    waves = sinusoid(torch.tensor([0, 3]), 2, 2)
    low = 10000.0**-0.5
    expected = [[0.0, 0.0, 1.0, 1.0], [math.sin(3), math.sin(3 * low), math.cos(3), math.cos(3 * low)]]
    torch.testing.assert_close(waves, torch.tensor(expected))


def test_the_time_encoder_takes_cosines_first_down_to_a_ten_thousandth():
    encoder = TimeEncoder(6)
    frequencies = 10000.0 ** -(torch.arange(128) / 127)
    waves = torch.cat([torch.cos(250 * frequencies), torch.sin(250 * frequencies)])
    expected = encoder.linear_2(nn.functional.silu(encoder.linear_1(waves)))
    torch.testing.assert_close(encoder(torch.tensor([250]))[0], expected, atol=1e-4, rtol=1e-4)


def _as_multihead(block: Block, context_dim: int | None = None) -> nn.MultiheadAttention:
    """Torch's own attention with the weights of a block's."""
    width = block.to_out.out_features
    kdim = width if context_dim is None else context_dim
    attention = nn.MultiheadAttention(width, block.heads, batch_first=True, kdim=kdim, vdim=kdim)
    with torch.no_grad():
        if kdim == width:
            attention.in_proj_weight.copy_(torch.cat([block.to_q.weight, block.to_k.weight, block.to_v.weight]))
        else:
            attention.q_proj_weight.copy_(block.to_q.weight)
            attention.k_proj_weight.copy_(block.to_k.weight)
            attention.v_proj_weight.copy_(block.to_v.weight)
        attention.in_proj_bias.copy_(torch.cat([block.to_q.bias, block.to_k.bias, block.to_v.bias]))
        attention.out_proj.load_state_dict(block.to_out.state_dict())
    return attention


def test_self_attention_of_a_plain_block_is_torchs_and_leaves_padding_out():
    block = Block(2, 4, adaptive=False)
    x, mask = torch.randn(3, 5, 8), torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    normed = block.norm1(x)
    attended, _ = _as_multihead(block)(normed, normed, normed, key_padding_mask=~mask)
    hidden = x + attended
    torch.testing.assert_close(block(x, mask=mask), hidden + block.feed_forward(block.norm3(hidden)), atol=1e-5, rtol=1e-5)
    assert block.norm3.weight is not None


def test_cross_attention_of_an_adaptive_block_is_torchs():
    block = Block(2, 4, context_dim=6)
    x, time, context = torch.randn(3, 5, 8), torch.randn(3, 8), torch.randn(3, 7, 6)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    scale, shift = block.norm1.linear(nn.functional.silu(time)).chunk(2, dim=1)
    normed = nn.functional.layer_norm(x, (8,)) * (1 + scale[:, None]) + shift[:, None]
    attended, _ = _as_multihead(block, 6)(normed, context, context, key_padding_mask=~mask)
    hidden = x + attended
    expected = hidden + block.feed_forward(nn.functional.layer_norm(hidden, (8,)))
    torch.testing.assert_close(block(x, time, block.project(context, mask)), expected, atol=1e-5, rtol=1e-5)


def test_the_dit_alternates_what_its_blocks_look_at():
    dit = DiT(heads=2, head_dim=4, num_layers=4, context_dim=6, output_dim=3)
    assert [block.to_k.in_features for block in dit.blocks] == [6, 8, 6, 8]
    contexts = dit.project(torch.randn(2, 7, 6), torch.ones(2, 7, dtype=torch.bool))
    assert len(contexts) == 2
    x = torch.randn(2, 5, 8)
    output = dit(x, torch.tensor([0, 750]), contexts)
    assert output.shape == (2, 5, 3)
    time = dit.time_encoder(torch.tensor([0, 750]))
    hidden = x
    for block, context in zip(dit.blocks, [contexts[0], None, contexts[1], None], strict=True):
        hidden = block(hidden, time, context)
    shift, scale = dit.proj_out_1(nn.functional.silu(time)).chunk(2, dim=1)
    expected = dit.proj_out_2(nn.functional.layer_norm(hidden, (8,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None])
    torch.testing.assert_close(output, expected)


def test_the_action_encoder_sees_its_rows_own_time():
    encoder = ActionEncoder(2, action_dim=3, width=8)
    actions = torch.randn(1, 4, 3).expand(2, -1, -1)
    tokens = encoder(actions, torch.tensor([0, 500]), 1)
    assert tokens.shape == (2, 4, 8)
    torch.testing.assert_close(tokens[1], encoder(actions[:1], torch.tensor([500]), 1)[0])
    assert not torch.allclose(tokens[0], tokens[1])
