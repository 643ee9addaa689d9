"""A policy that was written in the layout of its release loads back as the same policy, in other libraries too."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from lightning import __version__
from safetensors.torch import load_file

from tests.policies import test_openvla_oft as openvla
from tests.policies.released_fakes import in_release_layout, tiny_config, write_tokenizer
from tests.policies.test_adapters import KINDS
from tests.policies.test_pi0 import inputs_of_transformers
from tests.policies.test_pi05 import in_release_layout as in_pi05_layout
from tests.policies.test_prismatic import release_of
from tests.policies.vla_fakes import SPEC, observations, randomize, tiny_pi0_config
from vla_async import keys
from vla_async.__main__ import main
from vla_async.export import export_policy
from vla_async.policies import TinyVLAPolicy
from vla_async.policies.checkpoints import TensorFiles
from vla_async.policies.gr00t import Gr00tPolicy
from vla_async.policies.layouts import Layout
from vla_async.policies.openvla_oft import OpenVLAOFTPolicy
from vla_async.policies.pi0 import Pi0Policy
from vla_async.policies.pi05 import Pi05Policy
from vla_async.policies.smolvla import SmolVLAPolicy
from vla_async.rng import normal

STATISTICS: dict[str, Any] = {"mode": "quantiles", "q01": [-1.0, -2.0, 0.1], "q99": [1.0, 3.0, 0.5]}
STATE = {"mode": "mean_std", "mean": [0.1, 0.2, 0.3, 0.4, 0.5], "std": [1.1, 0.9, 0.7, 1.3, 2.0]}


def make(kind: Any, folder: Path, **options: Any) -> Any:
    tokenizer = write_tokenizer(folder / "tokenizer")
    if kind is OpenVLAOFTPolicy:
        given = {"q01": STATE["mean"], "q99": [3.0] * 5, "mode": "quantiles"}
        policy = openvla.make_policy(tokenizer=tokenizer, use_state=True, state_statistics=given, **options)
    else:
        config = tiny_config(kind) if kind in (SmolVLAPolicy, Gr00tPolicy) else tiny_pi0_config()
        settings = {"tokenizer": tokenizer, "action_statistics": STATISTICS, "state_statistics": STATE, "num_steps": 4}
        policy = kind(config=config, **settings, **options)
        policy.build(SPEC)
    randomize(policy)
    return policy


def load(folder: Path, policy: Any) -> Any:
    """What the section that was written makes."""
    section = yaml.safe_load((folder / "model.yaml").read_text())["model"]
    assert section["class_path"].endswith(type(policy).__name__)
    loaded = type(policy)(**section["init_args"])
    loaded.build(policy.env_spec)
    return loaded


def chunk(policy: Any) -> torch.Tensor:
    seen = openvla.observe(policy, 4) if isinstance(policy, OpenVLAOFTPolicy) else observations(policy, 4)
    made: torch.Tensor = policy.act(seen)[keys.CHUNK]
    return made


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_loads_back_as_the_same_policy(kind, lora, tmp_path: Path):
    """Weights, sizes, statistics and settings; low-rank additions have become part of the weights."""
    policy = make(kind, tmp_path, lora=lora)
    export_policy(policy, tmp_path / "out")
    loaded = load(tmp_path / "out", policy)
    assert not [name for name in loaded.state_dict() if "lora" in name]
    torch.testing.assert_close(chunk(loaded), chunk(policy), rtol=1e-5, atol=1e-5)


def test_transformers_loads_pi0_and_decides_the_same(tmp_path: Path):
    """By ``from_pretrained`` alone, with the sizes that the export says."""
    from transformers import PI0ForConditionalGeneration

    policy = make(Pi0Policy, tmp_path, lora={"rank": 2})
    export_policy(policy, tmp_path / "out")
    theirs, info = PI0ForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="sdpa"
    )
    assert set(info["missing_keys"]) <= {"model.dit.embed_tokens.weight"}, "nothing reads it"
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    td = observations(policy, 4)
    noise = normal(td[keys.REQUEST_KEY].squeeze(-1), 5, 6)
    inputs = inputs_of_transformers(policy, td)
    inputs["state"] = policy.read_state(td)
    made = theirs.eval().sample_actions(noise=noise, num_steps=theirs.config.num_inference_steps, **inputs)
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    with set_exploration_type(ExplorationType.DETERMINISTIC):
        ours = policy.normalize_actions(policy.act(td)[keys.CHUNK])
    torch.testing.assert_close(ours, made[:, :3, :3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Pi05Policy, SmolVLAPolicy, Gr00tPolicy])
def test_names_and_shapes_are_those_of_the_public_releases(kind, tmp_path: Path):
    """Compared to the layout that the tests of loading write by hand. Releases hold a little more, which nothing reads."""
    policy = make(kind, tmp_path)
    export_policy(policy, tmp_path / "out")
    written = {name: tuple(tensor.shape) for name, tensor in TensorFiles(tmp_path / "out").items()}
    by_hand = in_pi05_layout(policy) if kind is Pi05Policy else in_release_layout(policy)
    released = {name: tuple(tensor.shape) for name, tensor in by_hand.items()}
    if kind is Pi05Policy:
        released["paligemma_with_expert.gemma_expert.lm_head.weight"] = (300, 16)
    assert written.items() <= {name.removeprefix("_groot_model."): shape for name, shape in released.items()}.items()
    extra = ("lm_head", "head.probe", "normalize_inputs", "buffer")
    assert all(any(part in name for part in extra) for name in released.keys() - written.keys())


def test_openvlas_names_are_those_of_its_release_but_for_layers_that_are_never_read(tmp_path: Path):
    policy = make(OpenVLAOFTPolicy, tmp_path)
    released = {name: tuple(tensor.shape) for name, tensor in release_of(policy.network).items()}
    export_policy(policy, tmp_path / "out")
    written = {name: tuple(tensor.shape) for name, tensor in TensorFiles(tmp_path / "out" / "model.safetensors").items()}
    assert written.items() <= released.items()
    unread = ("featurizer.blocks.2.", "featurizer.norm.", "attn_pool.")
    assert all(any(part in name for part in unread) for name in released.keys() - written.keys())
    assert set(load_file(tmp_path / "out" / "proprio_projector.safetensors")) == {
        f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")
    }
    # a recipe's own would stay beside the statistics, and two of them are refused
    settings = yaml.safe_load((tmp_path / "out" / "model.yaml").read_text())["model"]["init_args"]
    assert "dataset" in settings
    assert settings["dataset"] is None
    # where OFT's own code looks for the state's percentiles, by the release's name of it
    said = json.loads((tmp_path / "out" / "config.json").read_text())["norm_stats"]["vla_async"]["proprio"]
    torch.testing.assert_close(torch.tensor([said["q01"], said["q99"]]), torch.tensor([STATE["mean"], [3.0] * 5]))


@pytest.mark.parametrize("kind", [Pi05Policy, SmolVLAPolicy])
def test_statistics_lie_where_lerobot_looks_for_them(kind, tmp_path: Path):
    """Measured ones too, in the way that config.json says they are to be used."""
    policy = make(kind, tmp_path)
    export_policy(policy, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["normalization_mapping"] == {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    tensors = load_file(tmp_path / "out" / "policy_postprocessor_step_0_unnormalizer_processor.safetensors")
    raw = torch.tensor([[0.3, -1.0, 0.2]])
    theirs = (raw - tensors["action.mean"]) / (tensors["action.std"] + 1e-8)
    torch.testing.assert_close(theirs, policy.normalize_actions(raw), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tensors["observation.state.mean"], torch.tensor(STATE["mean"]))


@pytest.mark.parametrize(
    ("kind", "prompt", "length"),
    [
        (Pi05Policy, ("pi05_prepare_state_tokenizer_processor_step", {"max_state_dim": 5}), 200),
        (SmolVLAPolicy, ("smolvla_new_line_processor", {}), 48),
    ],
)
def test_lerobots_processors_lie_beside_the_weights(kind, prompt, length, tmp_path: Path):
    """By the names that LeRobot looks up, and in an order in which the prompt is made of what is normalised.

    Without them LeRobot loads no export, with others its network sees other inputs. ``make parity`` compares what they make.
    """
    export_policy(make(kind, tmp_path), tmp_path / "out")
    steps = json.loads((tmp_path / "out" / "policy_preprocessor.json").read_text())["steps"]
    rename, batch, normalize, write, tokenize, to_device = steps
    assert [rename["registry_name"], batch["registry_name"]] == ["rename_observations_processor", "to_batch_processor"]
    assert (write["registry_name"], write["config"]) == prompt
    assert to_device == {"registry_name": "device_processor", "config": {"device": "cpu"}}
    assert tokenize["config"]["tokenizer_name"] == str(tmp_path / "tokenizer"), "transformers reads folders, not files"
    assert tokenize["config"]["max_length"] == length
    back = json.loads((tmp_path / "out" / "policy_postprocessor.json").read_text())["steps"][0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for step, features in ((normalize, {**config["input_features"], **config["output_features"]}), (back, None)):
        assert step["config"]["features"] == (features or config["output_features"])
        assert step["config"]["norm_map"] == config["normalization_mapping"]
        tensors = load_file(tmp_path / "out" / step["state_file"])
        assert set(tensors) == {f"{name}.{number}" for name in ("observation.state", "action") for number in ("mean", "std")}


@pytest.mark.parametrize("kind", [Pi05Policy, Gr00tPolicy])
def test_large_weights_lie_as_their_reader_wants_them(kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """LeRobot looks for one file, and without it goes on with random weights; transformers reads parts, and so do we."""
    save = functools.partial(huggingface_hub.save_torch_state_dict, max_shard_size=10_000)
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", save)
    policy = make(kind, tmp_path)
    export_policy(policy, tmp_path / "out")
    files = [path.name for path in (tmp_path / "out").glob("model*.safetensors")]
    assert files == ["model.safetensors"] if kind is Pi05Policy else len(files) > 1
    torch.testing.assert_close(chunk(load(tmp_path / "out", policy)), chunk(policy), rtol=1e-5, atol=1e-5)


def test_gr00ts_config_describes_the_whole_network(tmp_path: Path):
    """What LeRobot and NVIDIA's code would otherwise fill in is another network, or nothing."""
    export_policy(make(Gr00tPolicy, tmp_path), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["action_horizon"], config["action_dim"], config["compute_dtype"]) == (5, 6, "float32")
    head = config["action_head_cfg"]
    dit, context = head["diffusion_model_cfg"], head["vl_self_attention_cfg"]
    assert (dit["interleave_self_attention"], dit["norm_type"], dit["cross_attention_dim"]) == (True, "ada_norm", 24)
    assert context["attention_head_dim"] == 8
    assert dit["positional_embeddings"] is context["positional_embeddings"] is None


def test_a_name_that_would_not_come_back_is_an_error():
    """A rule that is too greedy would write two tensors over one another."""
    layout = Layout([(r"^a\d", "x")], [(r"^x", "a1")], {})
    assert list(layout.rename({"a1.weight": torch.ones(1)})) == ["x.weight"]
    with pytest.raises(RuntimeError, match=r"a2\.weight would be written as x\.weight, which is read as a1\.weight"):
        layout.rename({"a2.weight": torch.ones(1)})


def test_what_cannot_be_exported_is_refused(tmp_path: Path):
    """By the name of the policy, or if nobody could make its prompts; and no file of somebody else is overwritten."""
    tiny = TinyVLAPolicy(hidden=[4])
    tiny.build(SPEC)
    with pytest.raises(ValueError, match="TinyVLAPolicy has no public release"):
        export_policy(tiny, tmp_path / "tiny")
    hashing = SmolVLAPolicy(config=tiny_config(SmolVLAPolicy))
    hashing.build(SPEC)
    with pytest.raises(ValueError, match=r"has to be trained with model\.tokenizer"):
        export_policy(hashing, tmp_path / "hashing")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("42")
    with pytest.raises(FileExistsError, match="is not empty; give a new folder as --directory"):
        export_policy(make(Pi0Policy, tmp_path), tmp_path / "full")


def test_the_command_exports_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """From the recipe and the checkpoint alone; wrong command lines are refused in a line."""
    policy = make(Pi0Policy, tmp_path, lora={"rank": 2})
    checkpoint = {"state_dict": policy.state_dict(), "hyper_parameters": dict(policy.hparams)}
    policy.on_save_checkpoint(checkpoint)
    torch.save(checkpoint | {"pytorch-lightning_version": __version__}, tmp_path / "trained.ckpt")
    recipe = {"model": {"class_path": "vla_async.policies.pi0.Pi0Policy"}, "env": {"class_path": "vla_async.envs.ToyEnvs"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = ["export", "--config", str(tmp_path / "recipe.yaml"), "--directory", str(tmp_path / "out")]
    assert main([*command, "--ckpt_path", str(tmp_path / "trained.ckpt")]) == 0
    assert str(tmp_path / "out" / "model.yaml") in capsys.readouterr().out
    torch.testing.assert_close(chunk(load(tmp_path / "out", policy)), chunk(policy), rtol=1e-5, atol=1e-5)
    assert main([*command, "--ckpt_path", str(tmp_path / "none.ckpt")]) == 1
    assert "is not a file" in capsys.readouterr().err
    assert main(command[:3]) == 1
    assert "--directory" in capsys.readouterr().err
