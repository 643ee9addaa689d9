"""What is known of ManiSkill's tasks and robots without importing ManiSkill, so that a wrong setting is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

_ARM_MODES = (
    "pd_ee_delta_pos", "pd_ee_delta_pose", "pd_ee_pose", "pd_ee_target_delta_pos", "pd_ee_target_delta_pose",
    "pd_joint_delta_pos", "pd_joint_pos", "pd_joint_target_delta_pos", "pd_joint_vel", "pd_joint_pos_vel",
    "pd_joint_delta_pos_vel",
)  # fmt: skip
_HAND_MODES = ("pd_joint_delta_pos", "pd_joint_pos", "pd_joint_target_delta_pos")


@dataclass(frozen=True)
class Robot:
    """A robot whose model comes with ManiSkill.

    Attributes:
        control_modes: the modes with a bounded action, the default first.
        cameras: the cameras that it carries.
    """

    control_modes: tuple[str, ...]
    cameras: tuple[str, ...] = ()


ROBOTS: dict[str, Robot] = {
    "panda": Robot(_ARM_MODES),
    "panda_wristcam": Robot(_ARM_MODES, ("hand_camera",)),
    "panda_stick": Robot(_ARM_MODES),
    "two_panda_wristcam": Robot(_ARM_MODES, ("panda_wristcam-0-hand_camera", "panda_wristcam-1-hand_camera")),
    "fetch": Robot(
        (*(mode for mode in _ARM_MODES if mode not in ("pd_ee_pose", "pd_joint_pos")), "pd_joint_delta_pos_stiff_body"),
        ("fetch_head", "fetch_hand"),
    ),
    "so100": Robot(_HAND_MODES),
    "dclaw": Robot(_HAND_MODES),
    "allegro_hand_right_touch": Robot(_HAND_MODES),
    "trifingerpro": Robot((*_HAND_MODES, "pd_joint_vel", "pd_joint_pos_vel", "pd_joint_delta_pos_vel")),
    "unitree_g1_simplified_upper_body_with_head_camera": Robot(("pd_joint_delta_pos", "pd_joint_pos"), ("head_camera",)),
    "cartpole": Robot(("pd_joint_delta_pos",)),
}


@dataclass(frozen=True)
class Task:
    """A task that runs with what comes with ManiSkill's wheel.

    Attributes:
        instruction: the language instruction.
        horizon: the number of env steps that ManiSkill registers the task with.
        robots: robots that the task supports, the default first.
        control_mode: the default control mode where it is not the robot's first.
        dense: whether the task has a dense reward.
        cameras: the task's own cameras.
        drawn: whether the task needs a renderer even where nothing is looked at.
        batched: whether the task can be simulated on a GPU, where some rows restart while the others go on.
        rebuilt: whether the scene is built anew for each episode on a CPU, for the old one would show in the new episode.
        privileged: what the task tells besides an image although no camera or joint could: left out of ``obs: rgb``.
    """

    instruction: str
    horizon: int = 50
    robots: tuple[str, ...] = ("panda", "fetch")
    control_mode: str | None = None
    dense: bool = True
    cameras: tuple[str, ...] = ("base_camera",)
    drawn: bool = False
    batched: bool = True
    rebuilt: bool = False
    privileged: tuple[str, ...] = ()


_WRIST = ("panda_wristcam",)
_STACKING = ("panda_wristcam", "panda", "fetch")
_VALVE = ("valve_qpos", "valve_qvel", "valve_x", "valve_y")
_HUMANOID = ("unitree_g1_simplified_upper_body_with_head_camera",)
_POSE = "pd_ee_delta_pose"


def _valve(turn: str, horizon: int) -> Task:
    return Task(f"turn the valve {turn} with the fingers", horizon, ("dclaw",), batched=False, privileged=_VALVE)


def _in_hand(what: str) -> Task:
    return Task(
        f"rotate the {what} in the hand without dropping it", 300, ("allegro_hand_right_touch",), batched=False, rebuilt=True
    )


def _trifinger(instruction: str) -> Task:
    return Task(instruction, 250, ("trifingerpro",), batched=False)


TASKS: dict[str, Task] = {
    "PushCube-v1": Task("push the cube onto the round target"),
    "PullCube-v1": Task("pull the cube back onto the round target"),
    "PickCube-v1": Task("pick up the red cube and hold it at the green goal", robots=("panda", "fetch", "so100")),
    "PickCubeSO100-v1": Task("pick up the red cube and hold it at the green goal", robots=("so100",)),
    "SO100GraspCube-v1": Task("grasp the cube and lift it to the rest pose", 64, ("so100",), cameras=(), batched=False),
    "StackCube-v1": Task("stack the red cube on the green cube", robots=_STACKING),
    "StackPyramid-v1": Task(
        "put the red cube next to the green cube and stack the blue cube on both", 250, _STACKING, dense=False
    ),
    "PlaceSphere-v1": Task("put the sphere into the bin", privileged=("bin_pos",)),
    "RollBall-v1": Task("roll the ball into the round target at the far end of the table", 80, ("panda",)),
    "LiftPegUpright-v1": Task("stand the peg upright on the table", control_mode=_POSE),
    "PokeCube-v1": Task("poke the cube onto the round target with the peg", control_mode=_POSE),
    "PullCubeTool-v1": Task("pull the cube within reach with the hooked tool", 100, control_mode=_POSE),
    "PegInsertionSide-v1": Task("insert the peg into the hole in the side of the box", 100, _WRIST, _POSE),
    "PlugCharger-v1": Task("plug the charger into the receptacle", 200, _WRIST, _POSE, dense=False),
    "PushT-v1": Task("push the T-shaped block onto the T-shaped target", 100, ("panda_stick",), drawn=True),
    "DrawTriangle-v1": Task("draw the outlined triangle on the canvas", 300, ("panda_stick",), dense=False, batched=False),
    "FMBAssembly1Easy-v1": Task("place the bridge onto the board", 500, ("panda",), _POSE, dense=False),
    "TwoRobotPickCube-v1": Task("hand the red cube over and hold it at the green goal", 100, ("two_panda_wristcam",)),
    "TwoRobotStackCube-v1": Task(
        "put the green cube on the round target and stack the blue cube on it", 100, ("two_panda_wristcam",)
    ),
    "UnitreeG1PlaceAppleInBowl-v1": Task("put the apple into the bowl", 100, _HUMANOID),
    "UnitreeG1TransportBox-v1": Task("carry the box over to the other table", 100, _HUMANOID),
    "RotateValveLevel0-v1": _valve("by a quarter turn", 80),
    "RotateValveLevel1-v1": _valve("by half a turn", 150),
    "RotateValveLevel2-v1": _valve("by half a turn", 150),
    "RotateValveLevel3-v1": _valve("by half a turn", 150),
    "RotateValveLevel4-v1": _valve("by a full turn", 300),
    "RotateSingleObjectInHandLevel0-v1": _in_hand("cube"),
    "RotateSingleObjectInHandLevel1-v1": _in_hand("block"),
    "TriFingerRotateCubeLevel0-v1": _trifinger("move the cube to the goal position on the table"),
    "TriFingerRotateCubeLevel1-v1": _trifinger("move the cube on the table to the goal position and heading"),
    "TriFingerRotateCubeLevel2-v1": _trifinger("lift the cube to the goal height"),
    "TriFingerRotateCubeLevel3-v1": _trifinger("lift the cube to the goal position in the air"),
    "TriFingerRotateCubeLevel4-v1": _trifinger("bring the cube to the goal position and orientation"),
    # no success predicate, only a failure: useful for its reward, and as the fastest task there is
    "MS-CartpoleBalance-v1": Task("keep the pole balanced on the cart", 1000, ("cartpole",)),
}

NEEDS_DOWNLOAD: tuple[str, ...] = (
    "AnymalC-Reach-v1", "AnymalC-Spin-v1", "ArchitecTHOR_SceneManipulation-v1", "AssemblingKits-v1", "InsertFlower-v1",
    "OpenCabinetDoor-v1", "OpenCabinetDrawer-v1", "PickClutterYCB-v1", "PickCubeWidowXAI-v1", "PickSingleYCB-v1",
    "PutCarrotOnPlateInScene-v1", "PutEggplantInBasketScene-v1", "PutSpoonOnTableClothInScene-v1",
    "ReplicaCADPrepareGroceriesTrain_SceneManipulation-v1", "ReplicaCADPrepareGroceriesVal_SceneManipulation-v1",
    "ReplicaCADSetTableTrain_SceneManipulation-v1", "ReplicaCADSetTableVal_SceneManipulation-v1",
    "ReplicaCADTidyHouseTrain_SceneManipulation-v1", "ReplicaCADTidyHouseVal_SceneManipulation-v1",
    "ReplicaCAD_SceneManipulation-v1", "RoboCasaKitchen-v1", "RotateSingleObjectInHandLevel2-v1",
    "RotateSingleObjectInHandLevel3-v1", "SceneManipulation-v1", "StackGreenCubeOnYellowCubeBakedTexInScene-v1",
    "TurnFaucet-v1", "UnitreeGo2-Reach-v1", "UnitreeH1Stand-v1",
)  # fmt: skip
"""Tasks of ManiSkill whose models or scenes are fetched from the network at first use."""
