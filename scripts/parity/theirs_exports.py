"""LeRobot 0.6's side: loads our exports of π0.5 and SmolVLA as any checkpoint. Runs in the environment of LeRobot."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from typing import Any

from parity import cases
from parity.theirs import answer, tiny_pi


def run(name: str) -> None:
    """Load weights, settings and processors of one export, and write what they make of the inputs."""
    from lerobot.configs import PreTrainedConfig  # type: ignore[import-not-found]
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # type: ignore[import-not-found]

    module = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    importlib.import_module(f"lerobot.policies.{name}.processor_{name}")
    folder = cases.FOLDER / name
    options: dict[str, Any] = {}
    if name == "smolvla":  # the VLM's sizes are described on the hub only, which these are not
        options["cli_overrides"] = [f"--vlm_model_name={folder / 'vlm'}"]
    config = PreTrainedConfig.from_pretrained(folder / cases.EXPORT, **options)
    with nullcontext() if name == "smolvla" else tiny_pi(module):
        policy = get_policy_class(name).from_pretrained(folder / cases.EXPORT, config=config)
    preprocess, postprocess = make_pre_post_processors(config, pretrained_path=str(folder / cases.EXPORT))
    (folder / cases.ANSWERS).mkdir()
    answer(module, policy.eval(), preprocess, postprocess, folder / cases.ANSWERS)


if __name__ == "__main__":
    for model in sys.argv[1:] or [name for name in cases.EXPORTED if name != "groot"]:
        run(model)
