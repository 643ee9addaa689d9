"""What the tiny policy sees: state, cameras and instruction."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.policies import TinyVLAPolicy


def changed(policy: TinyVLAPolicy, first: TensorDict, second: TensorDict) -> dict[str, bool]:
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        policy.act(first), policy.act(second)
    return {name: not torch.equal(first[key], second[key]) for name, key in (("action", keys.CHUNK), ("value", keys.VALUE))}


@pytest.mark.parametrize("source", ["state", "image", "wrist"])
def test_every_input_reaches_actor_and_critic(make_policy, image_spec, observe, source):
    policy = make_policy(image_spec)
    first, second = observe(policy, 2), observe(policy, 2)
    second["observation", source] = second["observation", source].flip(0)
    assert changed(policy, first, second) == {"action": True, "value": True}


def test_the_instruction_matters_and_its_spelling_of_case_and_punctuation_does_not(make_policy, spec, observe):
    policy = make_policy(spec)
    push, pick = observe(policy, 2, "push the cube"), observe(policy, 2, "pick the cube")
    assert changed(policy, push, pick) == {"action": True, "value": True}
    assert changed(policy, push, observe(policy, 2, "Push the  cube!")) == {"action": False, "value": False}


def test_padding_of_the_instruction_does_not_matter(make_policy, spec, observe):
    short, long = make_policy(spec, max_words=3), make_policy(spec, max_words=30)
    long.load_state_dict(short.state_dict())
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        torch.testing.assert_close(short.act(observe(short, 2))[keys.CHUNK], long.act(observe(long, 2))[keys.CHUNK])


def test_images_can_be_left_unseen(make_policy, image_spec, observe):
    policy = make_policy(image_spec, use_images=False)
    first, second = observe(policy, 2), observe(policy, 2)
    second["observation", "image"] = second["observation", "image"].flip(0)
    assert changed(policy, first, second) == {"action": False, "value": False}


def test_a_camera_alone_is_enough_to_see_and_tells_positions():
    """A policy that cannot localise a dot cannot manipulate."""
    torch.manual_seed(0)
    spec = EnvSpec((-1.0,) * 2, (1.0,) * 2, chunk_size=1, images={"image": (3, 32, 32)})
    policy = TinyVLAPolicy(hidden=[32], lr=3e-3)
    policy.build(spec)
    rows, columns = torch.meshgrid(torch.arange(4, 28), torch.arange(4, 28), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], -1)
    image = torch.full((len(places), 3, 32, 32), 40, dtype=torch.uint8)
    for index, (row, column) in enumerate(places.tolist()):
        image[index, :, row - 2 : row + 3, column - 2 : column + 3] = 220
    batch = TensorDict({keys.CHUNK: (places / 16.0 - 1.0).unsqueeze(1)}, batch_size=[len(places)])
    batch[keys.IMAGE] = image
    batch[keys.INSTRUCTION_TOKENS] = policy.tokenize("reach").expand(len(places), -1)
    batch[keys.ACTION_IS_PAD] = torch.zeros(len(places), 1, dtype=torch.bool)
    optimizer = policy.configure_optimizers()
    for _ in range(60):
        output = policy.imitation_step(batch[torch.randperm(len(batch))[:64]])
        optimizer.zero_grad()
        (output.loss / output.num_samples).backward()
        optimizer.step()
    output = policy.imitation_step(batch)
    spread = batch[keys.CHUNK].var().item()
    assert output.loss.item() / output.num_samples < 0.05 * spread


def test_statistics_normalise_the_state_and_a_still_element_does_not_explode(make_policy, spec, observe):
    policy = make_policy(spec)
    plain = observe(policy, 3)
    raw = plain.clone()
    mean, std = torch.arange(5.0) * 10, torch.tensor([2.0, 3.0, 4.0, 5.0, 0.0])
    raw[keys.STATE] = plain[keys.STATE] * std.clamp(min=0.01) + mean
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        policy.act(plain)
        policy.set_statistics(mean, std)
        policy.act(raw)
    torch.testing.assert_close(raw[keys.CHUNK], plain[keys.CHUNK], atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match=r"std of the state must be \[5\] finite numbers"):
        policy.set_statistics(mean, torch.full((5,), float("nan")))
