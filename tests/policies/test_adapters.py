"""LoRA: only the additions are trained and published, and nothing else about a policy changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.policies import test_openvla_oft as openvla
from tests.policies.released_fakes import tiny_config as tiny_released
from tests.policies.vla_fakes import SPEC, assert_independent_of_the_batch, observations, randomize, tiny_pi0_config
from vla_async import keys
from vla_async.objectives import PPO
from vla_async.policies import VLAPolicy
from vla_async.policies.adapters import LoRA, merged_weights
from vla_async.policies.gr00t import Gr00tPolicy
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.policies.pi0 import Pi0Policy
from vla_async.policies.pi05 import Pi05Policy
from vla_async.policies.smolvla import SmolVLAPolicy
from vla_async.weights.publisher import published_names

KINDS: tuple[Any, ...] = (Pi0Policy, Pi05Policy, SmolVLAPolicy, Gr00tPolicy, OpenVLAOFTPolicy)
RANK_2 = {"rank": 2, "alpha": 4.0}


def make(kind: Any, lora: dict[str, Any] | None = RANK_2, **options: Any) -> Any:
    """A policy in which every weight matters, those of the additions too."""
    if kind is OpenVLAOFTPolicy:
        policy = openvla.make_policy(lora=lora, **options)
    else:
        config = tiny_released(kind) if kind in (SmolVLAPolicy, Gr00tPolicy) else tiny_pi0_config()
        policy = kind(**{"config": config, "num_steps": 3, "lora": lora} | options)
        policy.build(SPEC)
    randomize(policy)
    return policy


def seen(policy: VLAPolicy, rows: int) -> Any:
    return openvla.observe(policy, rows) if isinstance(policy, OpenVLAOFTPolicy) else observations(policy, rows)


def loss_of(policy: Any) -> torch.Tensor:
    result = policy.evaluate(policy.act(seen(policy, 3)))
    loss: torch.Tensor = result[keys.LOG_PROB].sum() + result[keys.VALUE].sum()
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_every_addition_has_an_effect_and_nothing_frozen_a_gradient(kind):
    """An addition to a layer whose weights are read without a call would be trained for nothing."""
    policy = make(kind, detach_value=False)
    loss_of(policy).backward()
    trained = {name: p for name, p in policy.network.named_parameters() if p.requires_grad}
    additions = {name: p for name, p in trained.items() if ".lora_" in name}
    heads = {
        name for part in (policy.heads() if kind is not OpenVLAOFTPolicy else []) for name, _ in part.named_parameters()
    }
    assert additions
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in additions.values())
    assert all(any(name.endswith(head) for head in heads) for name in trained.keys() - additions.keys())
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)
    assert any(p.grad is not None for p in policy.value_head.parameters())
    adapted = {name.partition(".lora_A")[0] for name in additions}
    linear = {
        name.removesuffix(".base_layer") for name, part in policy.network.named_modules() if isinstance(part, nn.Linear)
    }
    left = {name for name in linear - adapted if ".lora_" not in name}
    assert all(name == "lm_head" or any(f"{name}.weight".endswith(head) for head in heads) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_only_additions_heads_and_critic_are_published(kind):
    """A publish that carried the frozen base would be a hundred times as large; one that missed an addition, stale."""
    policy = make(kind)
    parameters = dict(policy.named_parameters())
    published = {name for name in published_names(policy) if name in parameters}
    assert published == {name for name, p in parameters.items() if p.requires_grad}
    assert not [name for name in published if ".base_layer." in name or "embed_tokens" in name]
    assert {name for name in parameters if ".lora_" in name or name.startswith("value_head.")} <= published
    optimized = {id(p) for group in policy.configure_optimizers().param_groups for p in group["params"]}
    assert optimized == {id(p) for p in parameters.values() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_addition_changes_no_decision(kind):
    """LoRA begins at the released weights; anything else would be a jump before the first update."""
    torch.manual_seed(0)
    plain = make(kind, None)
    adapted = make(kind)
    weights = {name.replace(".base_layer.", "."): name for name in adapted.state_dict() if ".lora_" not in name}
    adapted.load_state_dict({weights[name]: tensor for name, tensor in plain.state_dict().items()}, strict=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
    assert torch.equal(plain.act(seen(plain, 3))[keys.CHUNK], adapted.act(seen(adapted, 3))[keys.CHUNK])


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_decide_as_the_additions_do(kind):
    """What is exported has no additions any more, and must be the same policy."""
    adapted, plain = make(kind), make(kind, None)
    plain.network.load_state_dict(merged_weights(adapted.network))
    plain.load_state_dict({n: t for n, t in adapted.state_dict().items() if not n.startswith("network.")}, strict=False)
    a, b = (policy.act(seen(policy, 3)) for policy in (adapted, plain))
    torch.testing.assert_close(a[keys.CHUNK], b[keys.CHUNK], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a[keys.VALUE], b[keys.VALUE], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient_of_an_addition(kind):
    """Where the input of a layer needs no gradient, as under LoRA, some kinds of checkpointing give none at all."""
    gradients = []
    for checkpointing in (False, True):
        policy = make(kind, gradient_checkpointing=checkpointing, detach_value=False)
        policy.train()
        loss_of(policy).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_the_additions_back(kind, tmp_path: Path):
    """Resuming must find the layers that the checkpoint's names speak of."""
    from lightning import __version__

    policy = make(kind, **{} if kind is not OpenVLAOFTPolicy else {"use_state": False})
    checkpoint = {"state_dict": policy.state_dict(), "hyper_parameters": dict(policy.hparams)}
    policy.on_save_checkpoint(checkpoint)
    torch.save(checkpoint | {"pytorch-lightning_version": __version__}, tmp_path / "policy.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "policy.ckpt", weights_only=True)
    assert torch.equal(policy.act(seen(policy, 3))[keys.CHUNK], loaded.act(seen(loaded, 3))[keys.CHUNK])
    assert published_names(loaded) == published_names(policy)


@pytest.mark.parametrize("kind", KINDS)
def test_no_decision_depends_on_its_batch(kind):
    """Training mode included: what evaluate gives there is what act gave."""
    policy = make(kind)
    if kind is not OpenVLAOFTPolicy:
        assert_independent_of_the_batch(policy)
    acted = policy.act(seen(policy, 4))
    policy.train()
    again = policy.evaluate(acted)
    torch.testing.assert_close(again[keys.LOG_PROB].detach(), acted[keys.LOG_PROB], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_gets_no_addition_and_additions_are_float32(kind):
    """A step of RL is smaller than what bfloat16 can tell apart."""
    policy = make(kind, freeze="vision", dtype="bfloat16")
    vision = [policy.network.vision] if kind is OpenVLAOFTPolicy else policy.parts()["vision"]
    assert not [p for part in vision for p in part.parameters() if p.requires_grad]
    additions = [p for name, p in policy.network.named_parameters() if ".lora_" in name]
    assert {p.dtype for p in additions} == {torch.float32}
    acted = policy.act(seen(policy, 4))
    assert acted[keys.LOG_PROB].dtype == torch.float32
    torch.testing.assert_close(policy.evaluate(acted)[keys.LOG_PROB].detach(), acted[keys.LOG_PROB], rtol=1e-4, atol=1e-4)


def test_targets_choose_the_layers():
    """As in peft, by the last parts of their names."""
    policy = make(Pi0Policy, RANK_2 | {"targets": ["q_proj", "mlp.up_proj"]}, freeze="vision")
    names = {name.partition(".lora_A")[0] for name, _ in policy.network.named_parameters() if ".lora_A" in name}
    layers = ("model.vlm.language_model", "model.dit")
    expected = {f"{m}.layers.{i}.{t}" for m in layers for i in (0, 1) for t in ("self_attn.q_proj", "mlp.up_proj")}
    assert names == expected


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, r"model\.lora\.rank=0 must be at least 1"),
        ({"alpha": 0.0}, r"model\.lora\.alpha=0.0 must be positive"),
        ({"dropout": 1.0}, r"model\.lora\.dropout=1.0 must lie in \[0, 1\)"),
        ({"targets": []}, r"model\.lora\.targets=\[\] must be names of linear layers"),
        ({"targets": "q_proj"}, r"model\.lora\.targets='q_proj' must be names"),
        ({"r": 8}, r"model\.lora: \['r'\] does not exist; there is rank, alpha, dropout, targets"),
    ],
)
@pytest.mark.parametrize("kind", [Pi0Policy, OpenVLAOFTPolicy])
def test_settings_that_cannot_work_are_refused_at_once(kind, lora: dict[str, Any], message: str):
    """The error names the setting, before anything is built."""
    with pytest.raises(ValueError, match=message):
        kind(lora=lora)


def test_a_target_that_names_no_layer_is_refused_with_those_that_exist():
    """A typing error would train less than was meant."""
    with pytest.raises(ValueError, match=r"has a name like \['query'\]; there is \[.*'q_proj'.*\]"):
        make(Pi0Policy, RANK_2 | {"targets": ["q_proj", "query"]})


@pytest.mark.parametrize("kind", [Pi0Policy, OpenVLAOFTPolicy])
def test_dropout_is_for_imitation_only(kind):
    """In RL the log-prob of training would be another than that of acting, for the same weights."""
    with pytest.raises(ValueError, match=r"model\.lora\.dropout=0\.1 would make the log-prob of training another"):
        kind(PPO(), lora={"dropout": 0.1})
    assert LoRA.read({"dropout": 0.1}) == LoRA(dropout=0.1)
