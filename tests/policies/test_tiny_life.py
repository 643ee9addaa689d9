"""The tiny policy's life: built, stored, trained; and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies import TinyVLAPolicy, VLAPolicy

HEADS = ("gaussian", "tokens")


def test_it_stays_small_even_with_cameras(make_policy, image_spec):
    policy = make_policy(image_spec, hidden=[256, 256])
    assert sum(p.numel() for p in policy.parameters()) < 500_000


def test_building_twice_keeps_the_weights_and_another_spec_is_refused(make_policy, spec, image_spec):
    policy = make_policy(spec)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    policy.build(spec)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    with pytest.raises(ValueError, match=r"built for .* cannot serve"):
        policy.build(image_spec)


def test_an_unbuilt_policy_says_so(make_policy, spec, observe):
    td = observe(make_policy(spec), 1)
    with pytest.raises(RuntimeError, match="call build"):
        TinyVLAPolicy().act(td)


def test_it_is_a_tensordict_module_that_reads_text(make_policy, spec, observe):
    policy = make_policy(spec)
    with_tokens, with_text = observe(policy, 2, "push the cube"), observe(policy, 2, "")
    del with_text[keys.INSTRUCTION_TOKENS]
    with_text[keys.INSTRUCTION] = "push the cube"
    assert isinstance(policy, VLAPolicy)
    assert torch.equal(policy(with_text)[keys.CHUNK], policy(with_tokens)[keys.CHUNK])


@pytest.mark.parametrize("head", HEADS)
def test_a_checkpoint_rebuilds_the_policy_and_holds_plain_values_only(make_policy, image_spec, observe, tmp_path, head):
    from lightning import __version__

    policy = make_policy(image_spec, head=head, lr=1e-2, use_images="auto")
    policy.set_statistics(torch.ones(5), torch.full((5,), 2.0))
    checkpoint = {"state_dict": policy.state_dict(), "hyper_parameters": dict(policy.hparams)}
    policy.on_save_checkpoint(checkpoint)
    path = tmp_path / "policy.ckpt"
    torch.save(checkpoint | {"pytorch-lightning_version": __version__}, path)
    torch.load(path, weights_only=True)
    loaded = TinyVLAPolicy.load_from_checkpoint(path, weights_only=True)
    assert loaded.env_spec == image_spec
    assert loaded.hparams == policy.hparams
    for key in (keys.CHUNK, keys.LOG_PROB, keys.VALUE):
        assert torch.equal(loaded.act(observe(policy, 4))[key], policy.act(observe(policy, 4))[key])


def test_the_hyperparameters_stay_plain_when_a_config_file_builds_the_policy():
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(TinyVLAPolicy, "model", subclass_mode=True)
    init_args = {"lr": 0.02, "objective": {"class_path": "vla_async.objectives.PPO"}}
    config = parser.parse_object({"model": {"class_path": "vla_async.policies.TinyVLAPolicy", "init_args": init_args}})
    model = parser.instantiate(config).model
    assert model.objective is not None
    assert model.hparams["lr"] == 0.02
    assert not {"objective", "_instantiator", "_class_path"} & set(model.hparams)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("head", HEADS)
def test_imitation_leaves_padding_out_and_counts_action_elements(make_policy, spec, observe, head):
    policy = make_policy(spec, head=head)
    batch = policy.act(observe(policy, 4))
    batch[keys.ACTION_IS_PAD] = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    dirty = batch.clone()
    dirty[keys.CHUNK][dirty[keys.ACTION_IS_PAD]] = 1e6
    output, other = policy.imitation_step(batch), policy.imitation_step(dirty)
    assert output.num_samples == (3 + 2 + 1) * 2
    assert output.loss.item() == other.loss.item() > 0
    parts = [policy.imitation_step(part).loss for part in batch.split(1)]
    torch.testing.assert_close(sum(parts), output.loss)


def test_imitating_keeps_the_deviation_and_never_touches_the_critic(make_policy, spec, observe):
    policy = make_policy(spec)
    batch = policy.act(observe(policy, 4))
    batch[keys.ACTION_IS_PAD] = torch.zeros(4, 3, dtype=torch.bool)
    policy.imitation_step(batch).loss.backward()
    touched = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None}
    assert touched == {"actor", "actor_encoder"}


def test_actor_and_critic_share_no_parameter(make_policy, image_spec, observe):
    policy = make_policy(image_spec)
    out = policy.evaluate(policy.act(observe(policy, 4)))
    parameters = dict(policy.named_parameters())
    by_actor = torch.autograd.grad(out[keys.LOG_PROB].sum(), parameters.values(), allow_unused=True, retain_graph=True)
    by_critic = torch.autograd.grad(out[keys.VALUE].sum(), parameters.values(), allow_unused=True)
    for name, a, c in zip(parameters, by_actor, by_critic, strict=True):
        assert (a is None) != (c is None), name
        assert (c is not None) == name.startswith("critic")


def test_the_optimizer_covers_each_parameter_once_with_its_own_rates(make_policy, image_spec):
    policy = make_policy(image_spec, lr=1e-3, critic_lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))
    optimizer = policy.configure_optimizers()
    seen = {}
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.9)
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert name not in seen
            seen[name] = (group["lr"], group["weight_decay"], p.ndim)
    assert set(seen) == {name for name, _ in policy.named_parameters()}
    for name, (lr, decay, ndim) in seen.items():
        assert lr == (1e-2 if name.startswith("critic") else 1e-3)
        assert decay == (0.1 if ndim > 1 else 0.0)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": [0]}, r"model.hidden=\[0\] must be positive widths"),
        ({"head": "flow"}, "model.head='flow' is unknown: choose gaussian or tokens"),
        ({"num_bins": 1}, "model.num_bins=1 must be at least 2"),
        ({"use_images": "yes"}, "model.use_images='yes' is unknown: choose true, false or auto"),
        ({"image_dim": 0}, "model.image_dim=0 must be at least 1"),
        ({"vocab_size": 1}, "model.vocab_size=1 must be at least 2"),
        ({"min_std": 0.0}, "model.min_std=0.0 must be positive"),
        ({"max_std": 0.01}, "model.max_std=0.01 must be above model.min_std=0.05"),
        ({"init_std": 1.0}, "model.init_std=1.0 must lie between model.min_std=0.05 and model.max_std=1.0"),
        ({"lr": -1.0}, "model.lr=-1.0 must not be negative"),
        ({"critic_lr": -1.0}, "model.critic_lr=-1.0 must not be negative"),
        ({"betas": (0.9, 1.0)}, r"model.betas=\(0.9, 1.0\) must lie in"),
        ({"weight_decay": -1.0}, "model.weight_decay=-1.0 must not be negative"),
    ],
)
def test_impossible_values_are_refused_on_construction(options, message):
    with pytest.raises(ValueError, match=message):
        TinyVLAPolicy(**options)


def test_envs_that_it_cannot_serve_are_refused(spec, image_spec):
    with pytest.raises(ValueError, match=r"model.use_images=true, but the envs have no camera"):
        TinyVLAPolicy(use_images=True).build(spec)
    blind = EnvSpec((-1.0,), (1.0,), chunk_size=1, images={"image": (3, 8, 8)})
    with pytest.raises(ValueError, match="nothing to see"):
        TinyVLAPolicy(use_images=False).build(blind)
    unbounded = EnvSpec((-math.inf,), (math.inf,), chunk_size=1, state_dim=2)
    with pytest.raises(ValueError, match="needs action bounds"):
        TinyVLAPolicy(head="tokens").build(unbounded)


def test_unbounded_actions_are_left_in_their_own_units(make_policy, observe):
    policy = make_policy(EnvSpec((-math.inf,), (math.inf,), chunk_size=1, state_dim=2))
    td = policy.act(observe(policy, 8))
    assert torch.isfinite(td[keys.CHUNK]).all()
    assert torch.isfinite(td[keys.LOG_PROB]).all()


def test_an_instruction_that_is_too_long_is_refused(make_policy, spec):
    with pytest.raises(ValueError, match=r"has 4 words, more than model.max_words=3; raise it"):
        make_policy(spec, max_words=3).tokenize("pick up the cube")
