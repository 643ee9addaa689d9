"""LeRobot 0.4's side: loads our export of GR00T N1.5 as the model that a policy begins from, as it loads NVIDIA's."""

from __future__ import annotations

import torch
import yaml

from parity import cases
from parity.theirs_groot import answer, do_without_absent, without_flash_attention, write_eagle_config


def statistics() -> dict[str, dict[str, torch.Tensor]]:
    """What stands in ``model.yaml``, by LeRobot's names: NVIDIA's layout has it elsewhere, and LeRobot asks a data set."""
    options = yaml.safe_load((cases.FOLDER / "groot" / cases.EXPORT / "model.yaml").read_text())["model"]["init_args"]
    bounds = {}
    for feature, name in (("observation.state", "state_statistics"), ("action", "action_statistics")):
        mean, std = (torch.tensor(options[name][kind]) for kind in ("mean", "std"))
        bounds[feature] = {"min": mean - std, "max": mean + std}
    return bounds


def run() -> None:
    """Load the export, and write what LeRobot makes of the inputs."""
    from lerobot.configs.types import FeatureType, PolicyFeature  # type: ignore[import-not-found]
    from lerobot.policies.groot.configuration_groot import GrootConfig  # type: ignore[import-not-found]
    from lerobot.policies.groot.groot_n1 import DEFAULT_TOKENIZER_ASSETS_REPO  # type: ignore[import-not-found]
    from lerobot.policies.groot.modeling_groot import GrootPolicy  # type: ignore[import-not-found]
    from lerobot.policies.groot.processor_groot import make_groot_pre_post_processors  # type: ignore[import-not-found]
    from lerobot.utils.constants import HF_LEROBOT_HOME  # type: ignore[import-not-found]

    write_eagle_config(HF_LEROBOT_HOME / DEFAULT_TOKENIZER_ASSETS_REPO)
    folder = cases.FOLDER / "groot"
    images = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, cases.GROOT_IMAGE_SIZE) for name in cases.CAMERAS
    }
    config = GrootConfig(
        base_model_path=str(folder / cases.EXPORT),
        embodiment_tag=cases.GROOT_ROBOT,
        max_state_dim=cases.MAX_STATE_DIM,
        max_action_dim=cases.MAX_ACTION_DIM,
        chunk_size=cases.HORIZON,
        n_action_steps=cases.HORIZON,
        input_features=images | {"observation.state": PolicyFeature(FeatureType.STATE, (cases.STATE_DIM,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (cases.ACTION_DIM,))},
        use_bf16=False,
        device="cpu",
    )
    with without_flash_attention():
        policy = GrootPolicy(config).eval()
    preprocess, postprocess = make_groot_pre_post_processors(config, statistics())
    (folder / cases.ANSWERS).mkdir()
    # the first step packs the state; those between read files of the hub, see eagle_inputs
    pack = next(step for step in preprocess.steps if type(step).__name__ == "GrootPackInputsStep")
    answer(policy._groot_model, pack, postprocess.steps[0], folder / cases.ANSWERS)


if __name__ == "__main__":
    do_without_absent()
    run()
