"""GR00T's own: its time and its velocity, embodiments, images, prompt and release."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.policies.released_fakes import (
    STATISTICS,
    in_release_layout,
    make,
    tiny_config,
    vlm_sizes,
    write_release,
    write_tokenizer,
)
from tests.policies.vla_fakes import SPEC, observations
from vla_async import keys
from vla_async.policies.checkpoints import _rename
from vla_async.policies.gr00t import EMBODIMENTS, KEY_MAP, Gr00tPolicy
from vla_async.rng import normal


@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_a_chunk_is_what_gr00ts_own_integration_gives(num_steps: int):
    """Its time runs the other way round; a wrong sign, or a time that is off by a step, gives other actions."""
    policy = make(Gr00tPolicy, num_steps=num_steps)
    td = observations(policy, 4)
    cache = policy.prefix(td).cache
    x = normal(td[keys.REQUEST_KEY].squeeze(-1), 5, 6)
    for step in range(num_steps):
        velocity, _ = policy.network.velocity(cache, x, torch.full((4,), step / num_steps))
        x = x + velocity / num_steps
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        chunk = policy.normalize_actions(policy.act(td)[keys.CHUNK])
    torch.testing.assert_close(chunk, x[:, :3, :3], rtol=1e-4, atol=1e-5)


def test_rounding_loses_no_time_bucket():
    """1 - 0.3 is a little less than 0.7 in float32: the release's bucket of step 7 of 10 is 700, not 699."""
    policy = make(Gr00tPolicy)
    prefix, seen = policy.prefix(observations(policy, 1)), []
    policy.network.dit.time_encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].item()))
    expected = []
    for num_steps in (3, 4, 7, 10, 16):
        for step in range(num_steps):
            t = (num_steps - torch.tensor([step])) / num_steps
            policy.velocity(prefix, torch.zeros(1, 5, 6), t)
            expected.append(int(step / num_steps * 1000))
    assert seen == expected


def test_an_embodiment_has_weights_of_its_own_and_trains_no_others():
    """Another robot's encoders would read this robot's joints as its own."""
    gr1, by_number, droid = (make(Gr00tPolicy, embodiment=name) for name in ("gr1", 24, "oxe_droid"))
    td = observations(gr1, 2)
    chunk = gr1.act(td.clone())[keys.CHUNK]
    assert torch.equal(by_number.act(td.clone())[keys.CHUNK], chunk)
    assert not torch.allclose(droid.act(td.clone())[keys.CHUNK], chunk, atol=1e-3)
    gr1.evaluate(gr1.act(td))[keys.LOG_PROB].sum().backward()
    for layer in (gr1.network.state_encoder.layer1, gr1.network.action_encoder.layer2, gr1.network.action_decoder.layer2):
        moved = layer.weight.grad.abs().flatten(1).sum(1)
        assert moved.nonzero().flatten().tolist() == [EMBODIMENTS["gr1"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embodiment": "franka"}, r"model\.embodiment='franka' is unknown: choose one of \['agibot_genie1'"),
        ({"embodiment": -1}, r"model\.embodiment=-1 is unknown"),
        ({"gripper": "closed"}, r"model\.gripper='closed' is unknown: choose one of \['as_is', 'open_is_one'\]"),
        ({"image_area": 0.0}, r"model\.image_area=0\.0 must lie in \(0, 1\]"),
        ({"cameras": ["image", None]}, r"model\.cameras: GR00T has no place for a camera that is missing"),
    ],
)
def test_settings_of_its_own_are_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Gr00tPolicy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embodiment": 32}, r"model\.embodiment=32 is number 32, but there are weights of 32 embodiments only"),
        ({"config": {"max_embodiments": 8}}, r"model\.embodiment='new_embodiment' is number 31, but there are weights of 8"),
        ({"config": {"connector_layers": 3}}, r"connector_layers=3 is unknown"),
        ({"config": {"chunk_size": 1025}}, r"chunk_size=1025 is above the 1024 positions of actions"),
        ({"config": {"text": {"hiden_size": 8}}}, r"text has fields \['hiden_size'\] that Qwen3Config does not know"),
        ({"config": {"context_heads": 5}}, "context_heads=5 does not divide the backbone's width 24"),
        ({"config": {"future_tokens": -1}}, "future_tokens=-1 must not be negative"),
    ],
)
def test_what_does_not_fit_the_network_is_refused_by_name(options: dict[str, Any], message: str):
    config = tiny_config(Gr00tPolicy) | options.get("config", {})
    with pytest.raises(ValueError, match=message):
        Gr00tPolicy(**options | {"config": config}).build(SPEC)


def test_a_gripper_that_is_one_when_open_is_turned_round():
    """LIBERO opens at -1; weights that were trained on 1 for open would otherwise let go what they mean to hold."""
    bounds = {"mode": "min_max", "min": [-1.0, -2.0, 0.0], "max": [1.0, 2.0, 1.0], "eps": 0.0}
    policy = make(Gr00tPolicy, gripper="open_is_one", action_statistics=bounds)
    opens_and_closes = torch.tensor([[0.5, 1.0, 1.0], [0.5, 1.0, -1.0]])
    actions = policy.unnormalize_actions(opens_and_closes)
    assert actions.tolist() == [[0.5, 2.0, -1.0], [0.5, 2.0, 1.0]]
    assert policy.normalize_actions(actions).tolist() == opens_and_closes.tolist()


def test_pixel_shuffle_joins_neighbouring_patches_row_by_row():
    """Patches that are joined in another order meet weights that were trained for this one."""
    policy = make(Gr00tPolicy, config=tiny_config(Gr00tPolicy) | {"pixel_shuffle": True, "connector_layers": 2})
    backbone = policy.network.backbone
    backbone.connector = torch.nn.Identity()
    del backbone.vision_model
    backbone.vision_model = lambda pixel_values: SimpleNamespace(last_hidden_state=pixel_values.flatten(2).mT)
    rows = torch.arange(16.0).reshape(1, 1, 4, 4)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert backbone._see(rows)[0].tolist() == expected


def test_the_two_layer_connector_works():
    policy = make(Gr00tPolicy, config=tiny_config(Gr00tPolicy) | {"pixel_shuffle": True, "connector_layers": 2})
    td = policy.act(observations(policy, 2))
    torch.testing.assert_close(policy.evaluate(td)[keys.LOG_PROB], td[keys.LOG_PROB], rtol=1e-5, atol=1e-5)


def test_only_the_middle_of_an_image_is_seen_if_asked_for():
    """Models that were trained on crops see a zoomed scene otherwise."""
    whole, middle = make(Gr00tPolicy), make(Gr00tPolicy, image_area=0.25)
    td, framed = observations(whole, 2), observations(whole, 2)
    for name in SPEC.images:
        framed["observation", name][..., 0, :] = 0
    assert torch.equal(middle.act(td.clone())[keys.CHUNK], middle.act(framed.clone())[keys.CHUNK])
    assert not torch.allclose(whole.act(td)[keys.CHUNK], whole.act(framed)[keys.CHUNK], atol=1e-5)


def test_the_prompt_is_the_releases_chat():
    """The instruction comes after all images, written as a list of one."""
    asked: list[str] = []
    policy = make(Gr00tPolicy)
    tokenizer = policy.prompt.tokenizer

    def listen(text: str) -> list[int]:
        asked.append(text)
        return tokenizer(text)

    policy.make_network(listen)
    policy.prompt.tokenizer, listen.bos_id, listen.eos_id, listen.pad_id = listen, None, None, 0
    tokens = policy.tokenize("push the robot's cube")
    head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    images = [f"{head}<image 1><img>", "</img><image 2><img>", "</img>"]
    assert asked == [*images, f'["push the robot\'s cube"]{tail}']
    assert tokens.shape == (64,)


def test_the_default_sizes_are_those_of_the_release():
    """Shapes of ``nvidia/GR00T-N1.5-3B``."""
    from vla_async.policies.gr00t_network import Gr00tNetwork, Gr00tSizes

    with torch.device("meta"):
        network = Gr00tNetwork(Gr00tSizes(), [[1], [2]], 31)
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    eagle, head = "backbone.eagle_model.", "action_head."
    for name, shape in {
        f"{eagle}mlp1.0.weight": [2048, 1152],
        f"{eagle}vision_model.vision_model.embeddings.patch_embedding.weight": [1152, 3, 14, 14],
        f"{eagle}vision_model.vision_model.encoder.layers.26.mlp.fc1.weight": [4304, 1152],
        f"{eagle}language_model.model.layers.11.self_attn.q_norm.weight": [128],
        f"{eagle}language_model.model.embed_tokens.weight": [151680, 2048],
        f"{head}model.timestep_encoder.timestep_embedder.linear_1.weight": [1536, 256],
        f"{head}model.transformer_blocks.0.attn1.to_k.weight": [1536, 2048],
        f"{head}model.transformer_blocks.1.attn1.to_out.0.bias": [1536],
        f"{head}model.transformer_blocks.15.ff.net.0.proj.weight": [6144, 1536],
        f"{head}model.transformer_blocks.15.norm1.linear.weight": [3072, 1536],
        f"{head}model.proj_out_2.weight": [1024, 1536],
        f"{head}vl_self_attention.transformer_blocks.3.norm3.weight": [2048],
        f"{head}vlln.bias": [2048],
        f"{head}state_encoder.layer1.W": [32, 64, 1024],
        f"{head}action_encoder.W2.W": [32, 3072, 1536],
        f"{head}action_decoder.layer2.b": [32, 32],
        f"{head}position_embedding.weight": [1024, 1536],
        f"{head}future_tokens.weight": [32, 1536],
    }.items():
        assert shapes[_rename(name, KEY_MAP)] == shape, name
    assert "backbone.language_model.layers.12.mlp.up_proj.weight" not in shapes


def test_an_output_layer_stands_in_for_the_embedding_that_it_is_tied_to(tmp_path: Path):
    """Safetensors keeps only one of two tied names, and it need not be the embedding's."""
    tokenizer = write_tokenizer(tmp_path)
    policy = make(Gr00tPolicy, tokenizer=tokenizer)
    tensors = {f"_groot_model.{name}": tensor for name, tensor in in_release_layout(policy).items()}
    del tensors["_groot_model.backbone.eagle_model.language_model.model.embed_tokens.weight"]
    release = write_release(tmp_path / "release", policy, tensors)
    options: dict[str, Any] = {"tokenizer": tokenizer, "config": vlm_sizes(Gr00tPolicy), "action_statistics": STATISTICS}
    loaded = Gr00tPolicy(pretrained=release, **options)
    loaded.build(SPEC)
    own, theirs = (one.network.backbone.language_model.embed_tokens.weight for one in (policy, loaded))
    assert torch.equal(own, theirs)
