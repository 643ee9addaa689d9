"""LeRobot's policies act, and are trained if they match flows; stand-ins have the interface of LeRobot 0.4."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from vla_async import keys
from vla_async.envs import EnvSpec
from vla_async.objectives import PPO
from vla_async.policies.lerobot import LeRobotParts, LeRobotPolicy, load_lerobot

H, A, STATE = 3, 2, 4
HORIZON, WIDTH, STEPS = 5, 6, 4  # H', A' and K of the stand-in
SPEC = EnvSpec((-1.0,) * A, (1.0,) * A, chunk_size=H, state_dim=STATE, images={"image": (3, 8, 8), "wrist": (3, 6, 6)})
TEXTS = ("push the cube", "lift", "prends la tasse étoilée")
HERE = "tests.policies.test_lerobot"


def config(**changes: Any) -> SimpleNamespace:
    features = {"observation.images.top": None, "observation.images.wrist": None}
    values: dict[str, Any] = {
        "chunk_size": HORIZON,
        "max_action_dim": WIDTH,
        "n_obs_steps": 1,
        "image_features": features,
        "input_features": {"observation.state": SimpleNamespace(shape=(STATE,))},
        "output_features": {"action": SimpleNamespace(shape=(A,))},
    }
    return SimpleNamespace(**values | changes)


class FlowModel(nn.Module):
    """What SmolVLA's and π0's ``model`` have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.Linear(STATE + 8, 16)
        self.expert = nn.Linear(WIDTH + 16 + 1, 16)
        self.action_out_proj = nn.Linear(16, WIDTH)

    @torch.no_grad()
    def sample_actions(self, seen: Tensor, noise: Tensor | None = None) -> Tensor:
        cache = {"past_key_values": torch.tanh(self.reader(seen)), "prefix_pad_masks": torch.ones(len(seen), 2).bool()}
        x_t = torch.randn(len(seen), HORIZON, WIDTH) if noise is None else noise
        for step in range(STEPS):
            t = torch.full((len(seen),), 1.0 - step / STEPS)
            x_t = x_t - self.denoise_step(x_t=x_t, timestep=t, **cache) / STEPS
        return x_t

    def denoise_step(self, prefix_pad_masks: Tensor, past_key_values: Tensor, x_t: Tensor, timestep: Tensor) -> Tensor:
        t = timestep[:, None, None].expand(-1, HORIZON, 1)
        suffix = torch.tanh(self.expert(torch.cat([x_t, past_key_values.unsqueeze(1).expand(-1, HORIZON, -1), t], dim=-1)))
        return self.action_out_proj(suffix)


class FlowStandIn(nn.Module):
    """A flow-matching policy of LeRobot."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.model = config(), FlowModel()

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], noise: Tensor | None = None) -> Tensor:
        self.eval()
        return self.model.sample_actions(batch["seen"], noise)[:, :, :A]


class DirectStandIn(nn.Module):
    """A policy of LeRobot that regresses its chunk, like ACT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.layer = config(), nn.Linear(STATE + 8, HORIZON * A)

    def predict_action_chunk(self, batch: dict[str, Any]) -> Tensor:
        return self.layer(batch["seen"]).reshape(-1, HORIZON, A)


def preprocess(batch: dict[str, Any]) -> dict[str, Any]:
    images = [batch["observation.images.top"].flatten(1)[:, :4], batch["observation.images.wrist"].flatten(1)[:, :3]]
    words = torch.tensor([[len(text) / 10.0] for text in batch["task"]])
    assert all(float(image.max()) <= 1.0 for image in images)
    return {"seen": torch.cat([batch["observation.state"], *images, words], dim=-1)}


def postprocess(action: Tensor) -> Tensor:
    return action * torch.tensor([2.0, 0.5]) + torch.tensor([0.0, 1.0])


def load_flow(source: str) -> LeRobotParts:
    return LeRobotParts(FlowStandIn(), preprocess, postprocess)


def load_direct(source: str) -> LeRobotParts:
    return LeRobotParts(DirectStandIn(), preprocess, postprocess)


def load_history(source: str) -> LeRobotParts:
    parts = load_flow(source)
    parts.policy.config.n_obs_steps = 2
    return parts


def load_relative(source: str) -> LeRobotParts:
    return LeRobotParts(FlowStandIn(), preprocess, torch.tanh)


def make_policy(loader: str = "load_flow", spec: EnvSpec = SPEC, **options: Any) -> LeRobotPolicy:
    defaults = {"pretrained": "somewhere", "loader": f"{HERE}.{loader}", "cameras": {"top": "image"}, "num_steps": STEPS}
    policy = LeRobotPolicy(**defaults | options)
    policy.build(spec)
    return policy


def observe(policy: LeRobotPolicy, rows: int) -> TensorDict:
    generator = torch.Generator().manual_seed(7)
    td = TensorDict({}, batch_size=[rows])
    for name, shape in SPEC.images.items():
        td["observation", name] = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=generator)
    td[keys.STATE] = torch.randn(rows, STATE, generator=generator)
    td[keys.INSTRUCTION_TOKENS] = torch.stack([policy.tokenize(TEXTS[row % len(TEXTS)]) for row in range(rows)])
    td[keys.REQUEST_KEY] = torch.arange(100, 100 + rows).unsqueeze(-1)
    return td


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
def test_evaluate_gives_what_act_reported_in_any_batch_and_order(noise):
    policy = make_policy(noise=noise)
    acted = policy.act(observe(policy, 17))
    for rows in ([4], [16, 0, 9], torch.randperm(17, generator=torch.Generator().manual_seed(1)).tolist()):
        again = policy.evaluate(acted[torch.tensor(rows)])
        for key in (keys.LOG_PROB, keys.VALUE):
            torch.testing.assert_close(again[key], acted[key][rows], atol=1e-5, rtol=1e-5)
    assert again[keys.LOG_PROB].shape == (17, H, A)


def test_without_exploration_the_chunk_is_lerobots_own():
    """The same noise through LeRobot's own sampling and postprocessing gives the same chunk."""
    from vla_async.rng import normal

    policy = make_policy()
    td = observe(policy, 4)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        chunk = policy.act(td.clone())[keys.CHUNK]
    noise = normal(td[keys.REQUEST_KEY].squeeze(-1), HORIZON, WIDTH)
    texts = [TEXTS[row % len(TEXTS)] for row in range(4)]
    batch = {"observation.images.top": td["observation", "image"] / 255.0, "task": texts}
    batch |= {"observation.images.wrist": td["observation", "wrist"] / 255.0, "observation.state": td[keys.STATE]}
    expected = postprocess(policy.wrapper.policy.predict_action_chunk(preprocess(batch), noise))[:, :H]
    torch.testing.assert_close(chunk, expected, atol=1e-5, rtol=1e-5)


def test_the_denoising_step_is_lerobots_again_after_a_prefix():
    policy = make_policy()
    policy.act(observe(policy, 1))
    assert "denoise_step" not in vars(policy.wrapper.policy.model)


def test_training_moves_the_expert_and_leaves_what_is_read_without_gradient():
    policy = make_policy(objective=PPO(), lr=1e-2)
    acted = policy.act(observe(policy, 6))
    evaluated = policy.evaluate(acted)
    (evaluated[keys.LOG_PROB].sum() + evaluated[keys.VALUE].sum()).backward()
    model = policy.wrapper.policy.model
    assert float(model.expert.weight.grad.abs().max()) > 0.0
    assert model.reader.weight.grad is None
    # what is frozen is neither stepped nor published
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["reader.weight", "reader.bias"]
    names = [name for name, _ in policy.named_parameters()]
    assert len(names) == len(set(names))
    assert sum(name.endswith("model.expert.weight") for name in names) == 1


def test_imitation_learns_the_chunk_in_the_envs_units():
    policy = make_policy(lr=1e-2, objective=None)
    batch = observe(policy, 3)
    batch[keys.CHUNK] = torch.tensor([1.5, 1.2]).expand(3, H, A).clone()
    batch[keys.ACTION_IS_PAD] = torch.zeros(3, H, dtype=torch.bool)
    optimizer = policy.configure_optimizers()
    torch.manual_seed(0)
    for _ in range(300):
        output = policy.imitation_step(batch)
        optimizer.zero_grad()
        (output.loss / output.num_samples).backward()
        optimizer.step()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        chunk = policy.act(batch.exclude(keys.CHUNK))[keys.CHUNK]
    assert float((chunk - torch.tensor([1.5, 1.2])).abs().mean()) < 0.3


def test_a_policy_without_a_flow_acts_but_has_no_log_prob():
    policy = make_policy("load_direct")
    td = policy.act(observe(policy, 3))
    assert td[keys.CHUNK].shape == (3, H, A)
    assert keys.LOG_PROB not in td.keys()
    assert not td[keys.CHUNK].requires_grad
    alone = policy.act(observe(policy, 3)[1:2])
    torch.testing.assert_close(alone[keys.CHUNK], td[keys.CHUNK][1:2])
    with pytest.raises(RuntimeError, match="DirectStandIn matches no flow"):
        policy.evaluate(td)
    with pytest.raises(ValueError, match="DirectStandIn matches no flow, so nothing can train it"):
        make_policy("load_direct", objective=PPO())


@pytest.mark.parametrize(
    ("loader", "spec", "options", "said"),
    [
        ("load_flow", {}, {"cameras": {}}, r"no images for 'top' .*have \['image', 'wrist'\]"),
        ("load_flow", {"state_dim": 7}, {}, "reads a state of 4 elements, but the envs give 7"),
        (
            "load_flow",
            {"action_low": (-1.0,) * 3, "action_high": (1.0,) * 3},
            {},
            "actions of 2 elements, but the envs take 3",
        ),
        ("load_flow", {"chunk_size": 9}, {}, "env.chunk_size=9 is longer than the 5 actions"),
        ("load_direct", {"chunk_size": 9}, {}, "env.chunk_size=9 is longer than the 5 actions"),
        ("load_history", {}, {}, "looks at 2 observations at once"),
        ("load_relative", {}, {}, "postprocessing of the actions is no scale and offset"),
    ],
)
def test_what_does_not_fit_the_envs_is_refused_by_name(loader, spec, options, said):
    fields = {name: getattr(SPEC, name) for name in ("action_low", "action_high", "chunk_size", "state_dim", "images")}
    with pytest.raises(ValueError, match=said):
        make_policy(loader, EnvSpec(**{**fields, **spec}), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pretrained": ""}, "model.pretrained=''"),
        ({"value": "prefix"}, "model.value='prefix'"),
        ({"lr": -1.0}, "model.lr=-1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said):
        make_policy(**options)


def test_without_lerobot_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(ImportError, match=r"lerobot==0\.4\.4.*or use this library's own Pi0Policy"):
        load_lerobot("lerobot/smolvla_base")


def test_lerobots_own_loaders_are_called(monkeypatch):
    """With LeRobot 0.4's names: the config tells the class, and the processors come from the same checkpoint."""
    calls: list[Any] = []

    class Config:
        type = "smolvla"

        @classmethod
        def from_pretrained(cls, source: str) -> Config:
            calls.append(("config", source))
            return cls()

    class Loaded:
        @classmethod
        def from_pretrained(cls, source: str, config: Config) -> str:
            calls.append(("policy", source, config.type))
            return "policy"

    modules = {name: ModuleType(name) for name in ("lerobot", "lerobot.configs", "lerobot.configs.policies")}
    modules |= {name: ModuleType(name) for name in ("lerobot.policies", "lerobot.policies.factory")}
    modules["lerobot.configs.policies"].PreTrainedConfig = Config
    factory = modules["lerobot.policies.factory"]
    factory.get_policy_class = lambda kind: Loaded
    factory.make_pre_post_processors = lambda config, pretrained_path: ("before", pretrained_path)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert load_lerobot("folder") == LeRobotParts("policy", "before", "folder")
    assert calls == [("config", "folder"), ("policy", "folder", "smolvla")]
