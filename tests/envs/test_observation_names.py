"""What a factory says of its observations without a simulator must be what its simulator gives."""

from __future__ import annotations

import pytest

from vla_async.envs import EnvFactory, LiberoEnvs, ManiSkillEnvs, ToyEnvs


@pytest.mark.parametrize(
    "factory",
    [*(ToyEnvs(obs=obs) for obs in ("state", "rgb", "rgb+state")), ManiSkillEnvs(task="PushCube-v1", obs="state")],
    ids=repr,
)
def test_what_is_known_beforehand_is_what_comes(factory: EnvFactory) -> None:
    """Else a policy would be refused that fits, or taken that does not."""
    env = factory.make(0)
    spec = env.env_spec
    env.close()
    assert factory.observation_names == set(spec.images) | ({"state"} if spec.state_dim else set())


def test_cameras_are_named() -> None:
    """Without building anything that draws."""
    two = ManiSkillEnvs(task="StackCube-v1", obs="rgb", cameras=["base_camera", "hand_camera"])
    assert two.observation_names == {"state", "image", "hand_camera"}
    assert LiberoEnvs(wrist_camera="robot0_eye_in_hand").observation_names == {"state", "image", "wrist_image"}
    assert LiberoEnvs().observation_names == {"state", "image"}
