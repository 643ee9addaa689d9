"""OpenVLA-OFT's network against independent forward passes, and its weights in the release's layout."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.policies.test_openvla_oft import SPEC, TINY, A, H, make_policy, observe
from vla_async import keys
from vla_async.policies.images import resize, to_unit_range
from vla_async.policies.prismatic import PrismaticNetwork, PrismaticShape, merge_sizes

SIZES = merge_sizes(TINY)


def make_network(**shape) -> PrismaticNetwork:
    torch.manual_seed(0)
    network = PrismaticNetwork(SIZES, PrismaticShape(H * A, **shape)).eval()
    for parameter in network.parameters():  # biases, class tokens and registers start at zero, where errors hide
        nn.init.normal_(parameter, std=0.1)
    return network


def inputs(words: int, length: int) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = [torch.rand(2, 3, 28, 28, generator=generator) * 2.0 - 1.0 for _ in range(2)]
    tokens = torch.randint(3, 120, (2, length), generator=generator)
    mask = (torch.arange(length) < words).expand(2, -1)
    return images, torch.where(mask, tokens, 0), mask


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_padding_of_the_prompt_changes_nothing(attention):
    network = make_network(attention=attention)
    images, tokens, mask = inputs(7, 7)
    short = network(images, tokens, mask)
    padded = network(images, functional.pad(tokens, (0, 5), value=99), functional.pad(mask, (0, 5)))
    torch.testing.assert_close(padded.logits, short.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded.features, short.features, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_one_pass_is_the_llamas_own_on_the_sequence_of_the_release(attention):
    """[bos, patches of both cameras, prompt, empty actions, stop]; each token predicts the next, lowest bin last."""
    network = make_network(attention=attention)
    images, tokens, mask = inputs(6, 6)
    embed = network.language.embed_tokens
    patches = [network.projector(network.vision(image)) for image in images]
    empty, stop = torch.zeros(2, H * A, 32), embed(torch.full((2, 1), 2))
    sequence = torch.cat([embed(tokens[:, :1]), *patches, embed(tokens[:, 1:]), empty, stop], dim=1)
    network.language.config.is_causal = attention == "causal"
    for layer in network.language.layers:
        layer.self_attn.is_causal = attention == "causal"
    hidden = network.language(inputs_embeds=sequence).last_hidden_state
    start = 1 + 2 * 4 + 5 - 1  # the last word of the prompt
    logits = functional.linear(hidden[:, start : start + H * A], network.lm_head.weight)
    expected = torch.stack([logits[..., 384 - 64 - 1 - bin_] for bin_ in range(256)], dim=-1)
    torch.testing.assert_close(network(images, tokens, mask).logits, expected, atol=1e-5, rtol=1e-5)


def test_later_actions_are_seen_by_earlier_ones_only_without_causality():
    """Bidirectional: the stop token's embedding moves the first action's logits. Causal: it moves none."""
    for attention, moved in (("bidirectional", True), ("causal", False)):
        network = make_network(attention=attention)
        before = network(*inputs(6, 6)).logits
        with torch.no_grad():
            network.language.embed_tokens.weight[2] += 1.0
        assert (not torch.allclose(network(*inputs(6, 6)).logits, before, atol=1e-4)) is moved


def test_the_state_is_a_token_of_its_own():
    network = make_network(state_dim=5)
    state = torch.zeros(2, 5)
    one = network(*inputs(6, 6), state).logits
    state[1] = 1.0
    other = network(*inputs(6, 6), state).logits
    torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(one[1], other[1], atol=1e-3)


# ---------------------------------------------------------------- the release's layout


def release_of(network: PrismaticNetwork) -> dict[str, Tensor]:
    """Random weights under the names of openvla-7b: timm's for vision, one layer more than is read, and what is not read."""
    generator = torch.Generator().manual_seed(5)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    tensors = {f"language_model.model.{name}": new(*p.shape) for name, p in network.language.named_parameters()}
    tensors["language_model.lm_head.weight"] = new(*network.lm_head.weight.shape)
    tensors |= {f"projector.{name}": new(*p.shape) for name, p in network.projector.named_parameters()}
    for part, prefix, hidden in (("dinov2", "featurizer", 64), ("siglip", "fused_featurizer", 32)):
        dim, prefix = SIZES[part]["hidden_size"], f"vision_backbone.{prefix}."
        shapes = {"patch_embed.proj.weight": (dim, 3, 14, 14), "patch_embed.proj.bias": (dim,), "pos_embed": (1, 4, dim)}
        shapes |= {"norm.weight": (dim,), "norm.bias": (dim,)}
        if part == "dinov2":
            shapes |= {"cls_token": (1, 1, dim), "reg_token": (1, 4, dim)}
        else:
            shapes |= {"attn_pool.latent": (1, 1, dim), "attn_pool.q.weight": (dim, dim)}
        for block in range(3):
            sizes = {"norm1": (dim,), "norm2": (dim,), "attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim)}
            sizes |= {"mlp.fc1": (hidden, dim), "mlp.fc2": (dim, hidden)}
            for name, size in sizes.items():
                shapes |= {f"blocks.{block}.{name}.weight": size, f"blocks.{block}.{name}.bias": size[:1]}
            if part == "dinov2":
                shapes |= {f"blocks.{block}.ls{i}.scale_factor": (dim,) for i in (1, 2)}
        tensors |= {prefix + name: new(*shape) for name, shape in shapes.items()}
    return tensors


def timm_features(weights: dict[str, Tensor], prefix: str, image: Tensor, heads: int) -> Tensor:
    """A vision transformer as timm has it, up to the last block but one, written from the names of its weights."""
    w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    x = functional.conv2d(image, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=14).flatten(2).mT
    x = x + w["pos_embed"]
    extra = [w[name].expand(len(x), -1, -1) for name in ("cls_token", "reg_token") if name in w]
    x = torch.cat([*extra, x], dim=1)
    dim = x.shape[-1]

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (dim,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    for block in range(2):
        at = f"blocks.{block}."
        q, k, v = (
            linear(f"{at}attn.qkv", norm(f"{at}norm1", x)).reshape(len(x), -1, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        )
        seen = torch.softmax(q @ k.mT / (dim // heads) ** 0.5, dim=-1) @ v
        out = linear(f"{at}attn.proj", seen.transpose(1, 2).flatten(2))
        x = x + out * w.get(f"{at}ls1.scale_factor", torch.ones(dim))
        out = linear(f"{at}mlp.fc2", functional.gelu(linear(f"{at}mlp.fc1", norm(f"{at}norm2", x))))
        x = x + out * w.get(f"{at}ls2.scale_factor", torch.ones(dim))
    return x[:, sum(part.shape[1] for part in extra) :]


@pytest.fixture
def release(tmp_path):
    from safetensors.torch import save_file

    tensors = release_of(make_network())
    save_file(tensors, tmp_path / "model.safetensors")
    action = {"q01": [-0.5] * A, "q99": [0.5] * A, "mask": [True] * (A - 1) + [False], "mean": [0.0] * A}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"libero_spatial": {"action": action}}))
    return tmp_path, tensors


def load(folder, **options):
    return make_policy(pretrained=str(folder), **{"dataset": "libero_spatial", "tokenizer": None} | options)


@pytest.fixture
def hashed(monkeypatch):
    """The release under test has no tokenizer; hash words instead."""
    from vla_async.policies import openvla_oft

    monkeypatch.setattr(openvla_oft, "PretrainedTokenizer", lambda source: openvla_oft.HashingTokenizer(384))


def test_a_release_loads_whole_and_sees_as_timm_does(release, hashed):
    folder, tensors = release
    policy = load(folder)
    image = to_unit_range(torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8))
    unit = (resize(image, 28, 28) + 1.0) / 2.0
    mean, std = torch.tensor([0.484375, 0.455078125, 0.40625]), torch.tensor([0.228515625, 0.2236328125, 0.224609375])
    dino = (unit - mean.reshape(3, 1, 1)) / std.reshape(3, 1, 1)
    expected = torch.cat(
        [
            timm_features(tensors, "vision_backbone.featurizer.", dino, 2),
            timm_features(tensors, "vision_backbone.fused_featurizer.", unit * 2.0 - 1.0, 2),
        ],
        dim=-1,
    )
    torch.testing.assert_close(policy.network.vision(image), expected, atol=1e-5, rtol=1e-4)
    loaded = policy.network.language.layers[1].mlp.up_proj.weight
    assert torch.equal(loaded, tensors["language_model.model.layers.1.mlp.up_proj.weight"])


def test_the_statistics_of_the_dataset_are_used(release, hashed):
    policy = load(release[0])
    acted = policy.act(observe(policy, 3))
    assert float(acted[keys.CHUNK][..., :-1].abs().max()) <= 0.5
    with pytest.raises(ValueError, match=r"no 'libero_goal'; there is \['libero_spatial'\]"):
        load(release[0], dataset="libero_goal")
    with pytest.raises(ValueError, match="the action statistics are missing: set model"):
        load(release[0], dataset=None)


def test_a_release_that_lacks_or_adds_weights_is_refused(release, hashed):
    from safetensors.torch import save_file

    folder, tensors = release
    lacking = {name: value for name, value in tensors.items() if name != "projector.fc1.bias"}
    save_file(lacking | {"novel.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing: projector.fc1.bias; 1 unexpected: novel.weight"):
        load(folder)
    save_file(tensors | {"projector.fc1.bias": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 mismatched: projector.fc1.bias"):
        load(folder)


def test_the_state_projector_may_lie_beside_the_weights(release, hashed):
    from safetensors.torch import save_file

    folder, _ = release
    generator = torch.Generator().manual_seed(6)
    shapes = {"fc1.weight": (32, 5), "fc1.bias": (32,), "fc2.weight": (32, 32), "fc2.bias": (32,)}
    projector = {f"module.{name}": torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    save_file(projector, folder / "proprio_projector.safetensors")
    policy = load(folder, use_state=True, state_statistics={"q01": [-1.0] * SPEC.state_dim, "q99": [1.0] * SPEC.state_dim})
    assert torch.equal(policy.network.state_projector.fc1.weight, projector["module.fc1.weight"])


def test_the_tokenizer_of_the_release_is_used(release):
    """Found in its folder, whose config.json names a model that transformers does not have."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<PAD>": 3, "lift?": 4, "Out:": 5, "In:": 6}
    words |= {f"unused{index}": index for index in range(7, 300)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(release[0] / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<PAD>", "unk_token": "<unk>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (release[0] / "tokenizer_config.json").write_text(json.dumps(about))
    (release[0] / "config.json").write_text(json.dumps({"model_type": "openvla", "norm_stats": {}}))
    policy = load(release[0])
    tokens = policy.tokenize("Lift").tolist()
    assert tokens[:2] == [1, 6]
    assert tokens[8:12] == [0, 4, 5, 3]
    assert policy.prompt.mask(torch.tensor(tokens)).sum() == 11
    assert policy.act(observe(policy, 2))[keys.CHUNK].shape == (2, H, A)


def test_a_saved_policy_needs_its_release_no_more(release, hashed, tmp_path):
    """A checkpoint holds the weights and the statistics; the folder of the release may be gone."""
    import shutil

    policy = load(release[0])
    checkpoint = {"state_dict": policy.state_dict()}
    policy.on_save_checkpoint(checkpoint)
    shutil.rmtree(release[0])
    again = type(policy)(**policy.hparams)
    again.on_load_checkpoint(checkpoint)
    again.load_state_dict(checkpoint["state_dict"])
    td = policy.act(observe(policy, 2))
    torch.testing.assert_close(again.evaluate(td)[keys.LOG_PROB], td[keys.LOG_PROB], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.bins.decode(td[keys.TOKENS]), td[keys.CHUNK])
