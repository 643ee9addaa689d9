"""SmolVLA and GR00T: decisions that do not depend on the batch, weights in the layout of the releases, settings that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.policies.released_fakes import (
    KINDS,
    STATISTICS,
    in_release_layout,
    make,
    tiny_config,
    vlm_sizes,
    write_release,
    write_tokenizer,
)
from tests.policies.vla_fakes import SPEC, assert_independent_of_the_batch, observations, randomize
from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies.smolvla import SmolVLAPolicy

pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("noise", "value"), [("flow_sde", "prefix"), ("flow_sde", "suffix"), ("flow_noise", "suffix")])
def test_no_decision_depends_on_its_batch(kind, noise: str, value: str):
    """Padding or another row that leaks through an attention mask would change the log-prob with the batch."""
    assert_independent_of_the_batch(make(kind, noise=noise, value=value))


def test_padding_may_be_longer_without_changing_a_decision(kind):
    """A longer ``max_tokens`` only adds padding: nothing may attend to it, and it takes no position."""
    short, long = make(kind, max_tokens=32), make(kind, max_tokens=45)
    a, b = short.act(observations(short, 4)), long.act(observations(long, 4))
    for key in (keys.CHUNK, keys.LOG_PROB, keys.VALUE):
        torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-5)


def test_every_input_reaches_the_chunk(kind):
    """An observation that is read but not used would pass all tests of equality."""
    policy = make(kind)
    chunk = policy.act(observations(policy, 4))[keys.CHUNK]
    for name in (("observation", "image"), ("observation", "wrist"), keys.STATE, keys.INSTRUCTION_TOKENS):
        td = observations(policy, 4)
        td[name] = td[name].flip(0)
        assert not torch.allclose(policy.act(td)[keys.CHUNK], chunk, atol=1e-4), name


def test_a_velocity_leaves_the_prefix_as_it_is_and_rows_have_times_of_their_own(kind):
    """The prefix is used once per denoising step, with another step per row where one is stochastic."""
    policy = make(kind)
    prefix = policy.prefix(observations(policy, 3))
    x_t, t = torch.randn(3, 5, 6), torch.tensor([0.2, 0.6, 1.0])
    first, second = (policy.velocity(prefix, x_t, t) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (3, 5, 6)
    assert first.dtype == torch.float32
    for row, time in enumerate(t):
        alone = policy.velocity(prefix, x_t, time.expand(3))
        torch.testing.assert_close(alone[row], first[row], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(policy.velocity(prefix, x_t, t.flip(0))[0], first[0], atol=1e-4)


@pytest.mark.parametrize("freeze", ["none", "vision", "vlm"])
def test_gradients_reach_what_is_not_frozen(kind, freeze: str):
    """A cut in the graph, for example by the cache, would leave the vision-language model untrained."""
    policy = make(kind, freeze=freeze)
    policy.evaluate(policy.act(observations(policy, 4)))[keys.LOG_PROB].sum().backward()
    moved = {name for name, p in policy.network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    of_smol = kind is SmolVLAPolicy
    vision = "vision.embeddings" if of_smol else "backbone.vision_model.embeddings"
    words = "embedding.weight" if of_smol else "backbone.language_model.embed_tokens.weight"
    layer = "layers.0.block.self_attn.k_proj" if of_smol else "backbone.language_model.layers.0.self_attn.k_proj"
    head = "expert_layers.1.block.self_attn.k_proj" if of_smol else "dit.blocks.0.to_k"
    assert any(name.startswith(vision) for name in moved) == (freeze == "none")
    assert (words in moved) == any(name.startswith(layer) for name in moved) == (freeze != "vlm")
    assert any(name.startswith(head) for name in moved)
    assert any(name.startswith("state_") for name in moved)
    optimized = {id(p) for group in policy.configure_optimizers().param_groups for p in group["params"]}
    assert optimized == {id(p) for p in policy.parameters() if p.requires_grad}


def test_gradient_checkpointing_changes_no_gradient(kind):
    """Activations that are computed again must be the same, and none may be lost on the way."""
    gradients = []
    for checkpointing in (False, True):
        policy = make(kind, gradient_checkpointing=checkpointing, value="suffix", detach_value=False)
        policy.train()
        result = policy.evaluate(policy.act(observations(policy, 4)))
        (result[keys.LOG_PROB].sum() + result[keys.VALUE].sum()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_keeps_fewer_activations(kind):
    """A switch that saves nothing would only cost time."""
    kept = []
    for checkpointing in (False, True):
        policy, bytes_kept = make(kind, gradient_checkpointing=checkpointing), [0]
        policy.train()
        td = policy.act(observations(policy, 4))

        def pack(tensor: torch.Tensor, count: list[int] = bytes_kept) -> torch.Tensor:
            count[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.evaluate(td)
        kept.append(bytes_kept[0])
    assert kept[1] < 0.5 * kept[0]


def test_bfloat16_weights_give_float32_decisions(kind):
    """A log-prob in bfloat16 would have two digits."""
    policy = make(kind, dtype="bfloat16")
    td = policy.act(observations(policy, 4))
    assert {p.dtype for p in policy.network.parameters()} == {torch.bfloat16}
    # bfloat16 frequencies turn distant tokens by wrong angles
    assert {buffer.dtype for name, buffer in policy.named_buffers() if name.endswith("inv_freq")} == {torch.float32}
    assert td[keys.CHUNK].dtype == td[keys.LOG_PROB].dtype == td[keys.VALUE].dtype == torch.float32
    torch.testing.assert_close(policy.evaluate(td)[keys.LOG_PROB], td[keys.LOG_PROB], rtol=1e-4, atol=1e-4)


def test_mixed_precision_runs_and_keeps_the_log_prob_in_float32(kind):
    """Under autocast the attention's mask, cache and queries must still fit one another."""
    policy = make(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        td = policy.act(observations(policy, 4))
        result = policy.evaluate(td)
    assert td[keys.CHUNK].dtype == td[keys.LOG_PROB].dtype == result[keys.LOG_PROB].dtype == torch.float32
    torch.testing.assert_close(result[keys.LOG_PROB].detach(), td[keys.LOG_PROB], rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- releases


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_of_a_release_load_back_equal(kind, tmp_path: Path, shards: int):
    """A name that the map misses would be refused; one that it confuses gives other decisions."""
    tokenizer = write_tokenizer(tmp_path)
    policy = make(kind, tokenizer=tokenizer, action_statistics=STATISTICS)
    tensors = in_release_layout(policy)
    release = write_release(tmp_path / "release", policy, tensors)
    if shards == 2:
        _split(Path(release), tensors)
    options: dict[str, Any] = {"tokenizer": tokenizer, "config": vlm_sizes(kind), "num_steps": 3}
    loaded = kind(pretrained=release, action_statistics=STATISTICS, **options)
    loaded.build(SPEC)
    assert loaded.sizes == policy.sizes, "config.json says the sizes of the action expert"
    loaded.value_head.load_state_dict(policy.value_head.state_dict())
    a, b = (one.act(observations(one, 4)) for one in (policy, loaded))
    for key in (keys.CHUNK, keys.LOG_PROB, keys.VALUE):
        assert torch.equal(a[key], b[key])


def _split(release: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the weights as two files and an index, as large releases are."""
    import json

    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, release / file)
    (release / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (release / "model.safetensors").unlink()


def test_a_release_that_does_not_fit_is_refused_by_name(kind, tmp_path: Path):
    """Part of a model in random weights would train, and be blamed on the algorithm."""
    policy, tokenizer = make(kind), write_tokenizer(tmp_path)
    tensors = in_release_layout(policy)
    names = {name.split(".")[1]: name for name in tensors}
    missing, wrong = ("state_proj", "action_out_proj") if kind is SmolVLAPolicy else ("vlln", "model")
    del tensors[names[missing]]
    tensors[names[wrong]] = torch.ones(7)
    tensors["extra.weight"] = torch.ones(1)
    release = write_release(tmp_path / "release", policy, tensors)
    loading = kind(pretrained=release, tokenizer=tokenizer, config=vlm_sizes(kind), action_statistics=STATISTICS)
    with pytest.raises(ValueError, match="nothing was loaded") as refused:
        loading.build(SPEC)
    for said in ("1 missing: ", "1 unexpected: extra.weight", "1 mismatched: ", "the checkpoint [7]"):
        assert said in str(refused.value)


def test_a_checkpoint_of_training_needs_no_release(kind, tmp_path: Path):
    """A resumed run must not need the weights that its own checkpoint replaces, nor lose the release's sizes."""
    from lightning import __version__

    tokenizer = write_tokenizer(tmp_path)
    policy = make(kind, tokenizer=tokenizer)
    release = write_release(tmp_path / "release", policy, in_release_layout(policy))
    options: dict[str, Any] = {"tokenizer": tokenizer, "config": vlm_sizes(kind), "num_steps": 3}
    trained = kind(pretrained=release, action_statistics=STATISTICS, **options)
    trained.build(SPEC)
    randomize(trained, seed=1)
    checkpoint = {"state_dict": trained.state_dict(), "hyper_parameters": dict(trained.hparams)}
    trained.on_save_checkpoint(checkpoint)
    path = tmp_path / "policy.ckpt"
    torch.save(checkpoint | {"pytorch-lightning_version": __version__}, path)
    for file in Path(release).iterdir():
        file.unlink()
    resumed = kind.load_from_checkpoint(path, weights_only=True)
    a, b = (one.act(observations(one, 4)) for one in (trained, resumed))
    assert torch.equal(a[keys.CHUNK], b[keys.CHUNK])
    assert torch.equal(a[keys.VALUE], b[keys.VALUE])


def test_a_release_needs_its_statistics_and_its_tokenizer(kind, tmp_path: Path):
    """Other units, or other words, than in training would give actions that look sane and are wrong."""
    tokenizer = write_tokenizer(tmp_path)
    policy = make(kind, tokenizer=tokenizer)
    release = write_release(tmp_path / "release", policy, in_release_layout(policy))
    with pytest.raises(ValueError, match=r"set model\.tokenizer"):
        kind(pretrained=release)
    with pytest.raises(ValueError, match=r"set model\.action_statistics"):
        kind(pretrained=release, tokenizer=tokenizer, config=vlm_sizes(kind)).build(SPEC)


# ---------------------------------------------------------------- settings


def test_statistics_scale_states_and_actions(kind):
    """The network must see the numbers that it was trained on, and the env those that it understands."""
    state = {"mode": "mean_std", "mean": [1.0] * 5, "std": [2.0] * 5, "eps": 0.0}
    plain, scaled = make(kind), make(kind, state_statistics=state, action_statistics=STATISTICS | {"eps": 0.0})
    td = observations(plain, 4)
    shifted = observations(plain, 4)
    shifted[keys.STATE] = shifted[keys.STATE] * 2.0 + 1.0
    by_bounds, by_statistics = plain.act(td)[keys.CHUNK], scaled.act(shifted)[keys.CHUNK]
    normalized = torch.stack([by_bounds[..., 0], by_bounds[..., 1] / 2.0, by_bounds[..., 2] * 4.0 - 1.0], dim=-1)
    expected = torch.stack([normalized[..., 0], normalized[..., 1] * 2.5 + 0.5, (normalized[..., 2] + 1.0) / 4.0], dim=-1)
    torch.testing.assert_close(by_statistics, expected, rtol=1e-4, atol=1e-4)


def test_demonstrations_give_the_state_its_statistics_unless_there_are_some(kind):
    """A state in other units than the network's is lost in the noise, or drowns the rest."""
    policy, given = make(kind), make(kind, state_statistics={"mode": "identity"})
    frames = observations(policy, 9)
    policy.observe(frames)
    given.observe(frames)
    normalized = policy.state_normalizer.normalize(frames[keys.STATE])
    if kind is SmolVLAPolicy:
        torch.testing.assert_close(normalized.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(normalized.amax(0), torch.ones(5), atol=1e-4, rtol=0)
    assert torch.equal(given.state_normalizer.normalize(frames[keys.STATE]), frames[keys.STATE])


def test_the_order_of_the_cameras_is_a_setting(kind):
    """Swapped cameras are seen as swapped."""
    straight, crossed = make(kind, cameras=["image", "wrist"]), make(kind, cameras=["wrist", "image"])
    td, swapped = observations(straight, 4), observations(straight, 4)
    shape = (4, 3, 16, 16)
    small = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    td["observation", "image"] = swapped["observation", "wrist"] = small
    td["observation", "wrist"] = swapped["observation", "image"] = small.flip(0)
    torch.testing.assert_close(straight.act(td)[keys.CHUNK], crossed.act(swapped)[keys.CHUNK])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": "all"}, r"model\.freeze='all' is unknown"),
        ({"dtype": "float16"}, r"model\.dtype='float16' is unknown"),
        ({"max_tokens": 0}, r"model\.max_tokens=0 must be at least 1"),
        ({"cameras": []}, r"model\.cameras=\[\] shows the model nothing"),
        ({"action_statistics": {"mode": "min_max", "min": [0.0]}}, "the action statistics: 'max' is missing"),
        ({"state_statistics": {"mode": "mean_std", "mean": [0.0], "std": [float("nan")]}}, "'std' is not finite"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(kind, options: dict[str, Any], message: str):
    """The error names the setting, before anything is built."""
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (EnvSpec((-1.0,), (1.0,), 3, None, {"image": (3, 8, 8)}), {}, "give no state"),
        (EnvSpec((-1.0,), (1.0,), 3, 2, {}), {}, r"cameras \[\]"),
        (EnvSpec((-1.0,), (1.0,), 3, 2, {"image": (1, 8, 8)}), {}, "'image' has 1 channels"),
        (EnvSpec((-1.0,), (1.0,), 3, 9, {"image": (3, 8, 8)}), {}, "state has 9 elements, but the model has room for 8"),
        (EnvSpec((-1.0,), (1.0,), 6, 2, {"image": (3, 8, 8)}), {}, r"env\.chunk_size=6 is longer than the 5 actions"),
        (EnvSpec((-1.0,) * 7, (1.0,) * 7, 3, 2, {"image": (3, 8, 8)}), {}, "take 7 action dimensions"),
        (EnvSpec((-float("inf"),), (1.0,), 3, 2, {"image": (3, 8, 8)}), {}, "give action statistics"),
        (SPEC, {"cameras": ["side"]}, r"the envs have no \['side'\]; they have \['image', 'wrist'\]"),
        (SPEC, {"action_statistics": {"mode": "min_max", "min": [0.0], "max": [1.0]}}, "have 1 elements, but 3 are needed"),
        (SPEC, {"state_statistics": {"mode": "min_max", "min": [0.0], "max": [1.0]}}, "have 1 elements, but 5 are needed"),
        (SPEC, {"config": {"depth": 3}}, r"model\.config: \['depth'\] does not exist; there is"),
        (SPEC, {"config": {"chunk_size": 0}}, r"model\.config: chunk_size=0 must be at least 1"),
    ],
)
def test_envs_that_do_not_fit_are_refused_by_name(kind, spec: EnvSpec, options: dict[str, Any], message: str):
    """The alternative is an error of shapes somewhere inside."""
    config = tiny_config(kind) | options.get("config", {})
    with pytest.raises(ValueError, match=message):
        kind(**options | {"config": config}).build(spec)


def test_importing_the_policy_imports_no_models(kind):
    """They take seconds, and most runs do without."""
    import subprocess
    import sys

    heavy = ("_network", ".modeling_llama", ".modeling_qwen3", ".modeling_siglip", ".modeling_smolvlm")
    code = f"import sys, {kind.__module__}; sys.exit(any(name.endswith({heavy}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
