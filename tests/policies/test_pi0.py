"""π0: the same numbers as transformers' own, whatever the batch, and weights in the layout of the releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.policies.vla_fakes import SPEC, assert_independent_of_the_batch, observations, randomize, tiny_pi0_config
from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies.images import resize_with_pad
from vla_async.policies.pi0 import Pi0Policy
from vla_async.rng import normal


def make(spec: EnvSpec = SPEC, **options: Any) -> Pi0Policy:
    policy = Pi0Policy(**{"config": tiny_pi0_config(), "num_steps": 3} | options)
    policy.build(spec)
    randomize(policy)
    return policy


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("value", ["prefix", "suffix"])
def test_no_decision_depends_on_its_batch(noise: str, value: str):
    """Padding or another row that leaks through an attention mask would change the log-prob with the batch."""
    assert_independent_of_the_batch(make(noise=noise, value=value))


def of_transformers(policy: Pi0Policy) -> Any:
    """Transformers' own model with the policy's weights."""
    from transformers import PI0ForConditionalGeneration

    theirs = PI0ForConditionalGeneration(policy.sizes.make_config())
    missing, unexpected = theirs.load_state_dict(policy.network.state_dict(), strict=False)
    assert (missing, unexpected) == (["model.dit.embed_tokens.weight"], [])
    return theirs.eval()


def inputs_of_transformers(policy: Pi0Policy, td: TensorDict) -> dict[str, Tensor]:
    """The same observation as transformers' processor would give it: image placeholders, then the prompt."""
    config = policy.sizes.make_config().vlm_config
    size, patches = config.vision_config.image_size, config.text_config.num_image_tokens
    cameras = [resize_with_pad(td["observation", name], size, size) for name in ("image", "wrist")]
    words = td[keys.INSTRUCTION_TOKENS]
    places = words.new_full((len(td), patches * len(cameras)), config.image_token_id)
    return {
        "state": torch.nn.functional.pad(td[keys.STATE], (0, 3)),
        "input_ids": torch.cat([places, words], dim=1),
        "attention_mask": torch.cat([torch.ones_like(places), (words != 0).long()], dim=1),
        "pixel_values": torch.stack(cameras, dim=1),
        "pixel_attention_mask": torch.ones(len(td), len(cameras), dtype=torch.bool),
    }


def test_chunks_equal_those_of_transformers():
    """Anything that differs, a mask, a position, a scale, makes released weights give other actions."""
    policy = make(num_steps=4)
    td = observations(policy, 4)
    noise = normal(td[keys.REQUEST_KEY].squeeze(-1), 5, 6)
    theirs = of_transformers(policy).sample_actions(noise=noise, num_steps=4, **inputs_of_transformers(policy, td))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        ours = policy.normalize_actions(policy.act(td)[keys.CHUNK])
    torch.testing.assert_close(ours, theirs[:, :3, :3], rtol=1e-5, atol=1e-5)


def test_the_cached_velocity_equals_the_joint_forward_of_transformers():
    """The prefix is read once for many velocities; each must equal a forward pass over everything."""
    policy = make()
    td = observations(policy, 3)
    x_t, t = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(5)), torch.tensor([0.1, 0.6, 1.0])
    inputs = inputs_of_transformers(policy, td)
    inputs.pop("state")
    state = policy.prefix(td).cache.state
    theirs = of_transformers(policy)(state=state, noise=x_t, timestep=t, **inputs).logits
    prefix = policy.prefix(td)
    first, second = (policy.velocity(prefix, x_t, t) for _ in range(2))
    torch.testing.assert_close(first, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second), "a velocity has changed the cache"


def test_padding_may_be_longer_without_changing_a_decision():
    """A longer ``max_tokens`` only adds padding."""
    short, long = make(max_tokens=16), make(max_tokens=40)
    a, b = short.act(observations(short, 4)), long.act(observations(long, 4))
    torch.testing.assert_close(a[keys.CHUNK], b[keys.CHUNK], rtol=1e-5, atol=1e-5)


def test_every_input_reaches_the_chunk():
    """An observation that is read but not used would pass all tests of equality."""
    policy = make()
    chunk = policy.act(observations(policy, 4))[keys.CHUNK]
    for name in (("observation", "image"), ("observation", "wrist"), keys.STATE, keys.INSTRUCTION_TOKENS):
        td = observations(policy, 4)
        td[name] = td[name].flip(0)
        assert not torch.allclose(policy.act(td)[keys.CHUNK], chunk, atol=1e-4), name


@pytest.mark.parametrize("freeze", ["none", "vision", "vlm"])
def test_gradients_reach_what_is_not_frozen(freeze: str):
    """A cut in the graph, for example by the cache, would leave the vision-language model untrained."""
    policy = make(freeze=freeze)
    policy.evaluate(policy.act(observations(policy, 4)))[keys.LOG_PROB].sum().backward()
    vlm = policy.vlm
    moved = {
        "vision": vlm.vision_tower.embeddings.patch_embedding.weight.grad is not None,
        "vlm": vlm.language_model.layers[0].self_attn.k_proj.weight.grad is not None,
        "expert": policy.expert.layers[0].mlp.up_proj.weight.grad is not None,
    }
    assert moved == {"vision": freeze == "none", "vlm": freeze != "vlm", "expert": True}


def test_gradient_checkpointing_changes_no_gradient():
    """Transformers' own checkpointing drops the cache, and with it all that the prefix says."""
    gradients = []
    for checkpointing in (False, True):
        policy = make(gradient_checkpointing=checkpointing, value="suffix", detach_value=False)
        policy.train()
        result = policy.evaluate(policy.act(observations(policy, 4)))
        (result[keys.LOG_PROB].sum() + result[keys.VALUE].sum()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_bfloat16_weights_give_float32_decisions():
    """A log-prob in bfloat16 would have two digits."""
    policy = make(dtype="bfloat16")
    td = policy.act(observations(policy, 4))
    assert policy.vlm.language_model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    # bfloat16 frequencies turn distant tokens by wrong angles
    assert {buffer.dtype for name, buffer in policy.named_buffers() if name.endswith("inv_freq")} == {torch.float32}
    assert td[keys.CHUNK].dtype == td[keys.LOG_PROB].dtype == td[keys.VALUE].dtype == torch.float32
    torch.testing.assert_close(policy.evaluate(td)[keys.LOG_PROB], td[keys.LOG_PROB], rtol=1e-4, atol=1e-4)


def test_mixed_precision_runs_and_keeps_the_log_prob_in_float32():
    """Under autocast the attention's mask, cache and queries must still fit one another."""
    policy = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        td = policy.act(observations(policy, 4))
        result = policy.evaluate(td)
    assert td[keys.CHUNK].dtype == td[keys.LOG_PROB].dtype == result[keys.LOG_PROB].dtype == torch.float32
    torch.testing.assert_close(result[keys.LOG_PROB].detach(), td[keys.LOG_PROB], rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- releases


def in_release_layout(policy: Pi0Policy) -> dict[str, Tensor]:
    """The policy's weights under the names of ``lerobot/pi0_base``."""
    released: dict[str, Tensor] = {}
    for name, tensor in policy.network.state_dict().items():
        name = name.replace("embed_action_time.", "")
        name = name.replace("model.vlm.vision_tower.", "model.vlm.vision_tower.vision_model.")
        name = name.replace("model.vlm.", "paligemma_with_expert.paligemma.model.")
        name = name.replace("model.dit.", "paligemma_with_expert.gemma_expert.model.")
        name = name.replace("paligemma.model.language_model.embed_tokens.", "paligemma.lm_head.")
        released[name] = tensor.clone()
    return released | {"paligemma_with_expert.gemma_expert.lm_head.weight": torch.ones(300, 16)}


def write_release(folder: Path, tensors: dict[str, Tensor]) -> str:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"type": "pi0", "chunk_size": 5, "max_state_dim": 8, "max_action_dim": 6}')
    return str(folder)


def write_tokenizer(folder: Path) -> str:
    """A small tokenizer of words, in the file format of the tokenizers library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", *(char for char in "0123456789,:;-"), "push", "the", "cube", "state"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def sizes() -> dict[str, Any]:
    """The sizes that a release's ``config.json`` does not say."""
    return {name: size for name, size in tiny_pi0_config().items() if name in ("vision", "text", "expert")}


def load(kind: type[Any], folder: Path, **options: Any) -> Any:
    """A policy with the weights of a release."""
    bounds = {"mode": "min_max", "min": SPEC.action_low, "max": SPEC.action_high, "eps": 0.0}
    tokenizer = write_tokenizer(folder / "tokenizer")
    policy = kind(
        **{"pretrained": str(folder), "tokenizer": tokenizer, "action_statistics": bounds, "num_steps": 3} | options
    )
    policy.build(SPEC)
    return policy


@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_output_layer_of_its_own_is_left_out(prefix: str, tmp_path: Path) -> None:
    """LeRobot does not tie it to the embedding, so training can move them apart; what is read is the embedding."""
    policy = make()
    released = in_release_layout(policy)
    head = "paligemma_with_expert.paligemma.lm_head.weight"
    released["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = released[head]
    released[head] = released[head] + 1.0
    write_release(tmp_path, {prefix + name: tensor for name, tensor in released.items()})
    loaded = load(Pi0Policy, tmp_path, config=sizes())
    td = observations(policy, 3)
    torch.testing.assert_close(loaded.act(td.clone())[keys.CHUNK], policy.act(td)[keys.CHUNK], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_of_a_release_load_back_equal(tmp_path: Path, prefix: str):
    """A name that the map misses would be refused; one that it confuses gives other decisions."""
    policy = make(tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    write_release(tmp_path, {prefix + name: tensor for name, tensor in in_release_layout(policy).items()})
    loaded = load(Pi0Policy, tmp_path, config=sizes())
    assert (loaded.sizes.chunk_size, loaded.sizes.max_action_dim) == (5, 6)
    a, b = (one.act(observations(one, 4))[keys.CHUNK] for one in (policy, loaded))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_weights_in_transformers_own_layout_load_back_equal(tmp_path: Path):
    """A model that was saved by transformers must be as good as a release, and say its own sizes."""
    policy = make(tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    of_transformers(policy).save_pretrained(tmp_path)
    a, b = (one.act(observations(one, 4))[keys.CHUNK] for one in (policy, load(Pi0Policy, tmp_path)))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_statistics_of_a_release_are_used(tmp_path: Path):
    """LeRobot stores them in files of its processors; weights without them would act in other units."""
    write_release(tmp_path, in_release_layout(make()))
    numbers = {"action.mean": torch.tensor([1.0, 2.0, 3.0]), "action.std": torch.tensor([0.5, 1.0, 2.0])}
    save_file(numbers, tmp_path / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"normalization_mapping": {"ACTION": "MEAN_STD"}}))
    loaded = load(Pi0Policy, tmp_path, config=sizes(), action_statistics=None)
    expected = torch.tensor([[1.5, 3.0, 5.0]])
    torch.testing.assert_close(loaded.unnormalize_actions(torch.ones(1, 3)), expected)


def test_a_release_that_does_not_fit_is_refused_by_name(tmp_path: Path):
    """Part of a model in random weights would train, and be blamed on the algorithm."""
    tensors = in_release_layout(make())
    del tensors["state_proj.bias"]
    tensors["extra.weight"] = torch.ones(1)
    tensors["action_out_proj.bias"] = torch.ones(7)
    write_release(tmp_path, tensors)
    with pytest.raises(ValueError, match="nothing was loaded") as refused:
        load(Pi0Policy, tmp_path, config=sizes())
    said = (
        "1 missing: embed_action_time.state_proj.bias",
        "1 unexpected: extra.weight",
        "1 mismatched: action_out_proj.bias",
    )
    assert all(part in str(refused.value) for part in said)


def test_a_checkpoint_of_training_needs_no_release(tmp_path: Path):
    """What is loaded for evaluation must not read, or need, the weights that its own checkpoint replaces."""
    write_release(tmp_path, in_release_layout(make()))
    policy = load(Pi0Policy, tmp_path, config=sizes())
    randomize(policy, seed=1)
    checkpoint: dict[str, Any] = {"state_dict": policy.state_dict(), "hyper_parameters": dict(policy.hparams)}
    policy.on_save_checkpoint(checkpoint)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    resumed = Pi0Policy(**checkpoint["hyper_parameters"])
    resumed.on_load_checkpoint(checkpoint)
    resumed.load_state_dict(checkpoint["state_dict"])
    a, b = (one.act(observations(one, 4))[keys.CHUNK] for one in (policy, resumed))
    assert torch.equal(a, b)


# ---------------------------------------------------------------- processing


def test_statistics_scale_states_and_actions_and_travel_with_the_weights():
    """Weights that were trained on normalised numbers are worth nothing without the same statistics."""
    state = {"mode": "mean_std", "mean": [1.0] * 5, "std": [2.0] * 5}
    action = {"mode": "quantiles", "q01": [-2.0, 0.0, 1.0], "q99": [2.0, 4.0, 3.0]}
    policy, plain = make(state_statistics=state, action_statistics=action), make()
    td = observations(plain, 4)
    td[keys.STATE] = td[keys.STATE] * 2.0 + 1.0
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        scaled = policy.act(td)[keys.CHUNK]
        same = plain.normalize_actions(plain.act(observations(plain, 4))[keys.CHUNK])
    torch.testing.assert_close(
        scaled, same * torch.tensor([2.0, 2.0, 1.0]) + torch.tensor([0.0, 2.0, 2.0]), rtol=1e-4, atol=1e-4
    )
    assert {"state_normalizer.offset", "action_normalizer.scale"} <= policy.state_dict().keys()


def test_demonstrations_give_the_state_statistics_that_were_not_given():
    """Imitation on raw joint angles and gripper widths would weigh them by their units."""
    policy = make()
    frames = TensorDict({"observation": {"state": torch.randn(200, 5) * 3.0 + 7.0}}, batch_size=[200])
    policy.observe(frames)
    seen = policy.state_normalizer.normalize(frames[keys.STATE])
    torch.testing.assert_close(seen.mean(0), torch.zeros(5), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(5), rtol=0, atol=1e-3)


def test_cameras_can_be_chosen_and_left_out():
    """The model must see the cameras it was given, in their order, and no other."""
    both, one = make(), make(cameras=["wrist"])
    td = observations(one, 4)
    chunk = one.act(td.clone())[keys.CHUNK]
    td["observation", "image"] = td["observation", "image"].flip(0)
    assert torch.equal(one.act(td.clone())[keys.CHUNK], chunk)
    assert not torch.allclose(both.act(observations(both, 4))[keys.CHUNK], chunk, atol=1e-4)


def test_imitation_learns_a_demonstrated_chunk():
    """The flow-matching loss must train what ``act`` then does."""
    policy = Pi0Policy(config=tiny_pi0_config(), num_steps=4, lr=5e-3)
    torch.manual_seed(0)
    policy.build(SPEC)
    batch = observations(policy, 8)
    batch[keys.CHUNK] = torch.tensor([0.5, -1.0, 0.25]).expand(8, 3, 3)
    batch[keys.ACTION_IS_PAD] = torch.zeros(8, 3, dtype=torch.bool)

    def error() -> float:
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return float((policy.act(observations(policy, 8))[keys.CHUNK] - batch[keys.CHUNK]).abs().mean())

    before, optimizer = error(), policy.configure_optimizers()
    for _ in range(200):
        output = policy.imitation_step(batch)
        optimizer.zero_grad()
        (output.loss / output.num_samples).backward()
        optimizer.step()
    assert error() < 0.7 * before


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pretrained": "somewhere"}, "needs the tokenizer it was trained with"),
        ({"freeze": "head"}, r"model.freeze='head' is unknown"),
        ({"dtype": "float16"}, r"model.dtype='float16' is unknown"),
        ({"max_tokens": 0}, r"model.max_tokens=0 must be at least 1"),
        ({"cameras": [None]}, "name at least one camera"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], says: str):
    """Each error must name the setting before anything is built."""
    with pytest.raises(ValueError, match=says):
        Pi0Policy(**options)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"expert": {"hiden_size": 4}}, r"expert has fields \['hiden_size'\] that GemmaConfig does not know"),
        ({"expert": {"num_hidden_layers": 3}}, r"expert.num_hidden_layers=3, but .* it is 18"),
        ({"expert": {"head_dim": 4}}, r"expert.head_dim=4, but .* it is 256"),
        ({"horizon": 4}, r"\['horizon'\] does not exist"),
        ({"chunk_size": 0}, r"chunk_size=0 must be at least 1"),
        ({"min_period": 5.0}, r"min_period=5.0 must lie between 0 and max_period=4.0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(config: dict[str, Any], says: str):
    """An expert that cannot attend to the prefix would fail deep inside of a layer."""
    with pytest.raises(ValueError, match=says):
        Pi0Policy(config=config).build(SPEC)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (EnvSpec((-1.0,), (1.0,), 3, None, {"image": (3, 16, 16)}), "give no state"),
        (EnvSpec((-1.0,), (1.0,), 3, 5, {}), r"cameras \[\]"),
        (EnvSpec((-1.0,), (1.0,), 3, 9, {"image": (3, 16, 16)}), "9 elements, but the model has room for 8"),
        (EnvSpec((-1.0,) * 7, (1.0,) * 7, 3, 5, {"image": (3, 16, 16)}), "7 action dimensions, but the model makes 6"),
        (EnvSpec((-1.0,), (1.0,), 6, 5, {"image": (3, 16, 16)}), "longer than the 5 actions"),
        (EnvSpec((-1.0,), (1.0,), 3, 5, {"depth": (1, 16, 16)}), "has 1 channels"),
    ],
)
def test_envs_that_do_not_fit_are_refused_by_name(spec: EnvSpec, says: str):
    """What cannot be padded must not be cut in silence."""
    with pytest.raises(ValueError, match=says):
        Pi0Policy(config=tiny_pi0_config()).build(spec)
