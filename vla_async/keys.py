"""Every TensorDict key that the library reads or writes.

The names follow TorchRL's VLA schema (``torchrl.data.vla.schema``) where it has one, so that data moves freely between
the two. Shapes are given per decision; ``H`` is the chunk length, ``A`` the action dimension, ``L`` the token count.
"""

from __future__ import annotations

OBSERVATION = "observation"  # sub-TensorDict
STATE = ("observation", "state")  # float32 [state_dim]
IMAGE = ("observation", "image")  # uint8 [C, H, W]; further cameras stand beside it under their own names
INSTRUCTION = "language_instruction"  # str, one per episode
INSTRUCTION_TOKENS = "instruction_tokens"  # int64 [L], what policy.tokenize made of the instruction

CHUNK = ("vla_action", "chunk")  # float32 [H, A]
TOKENS = ("vla_action", "tokens")  # int64 [H, A], token policies only
# what a flow-matching policy keeps to recompute a log-prob; H' >= H and A' >= A are the model's own, K its denoising steps
FLOW_STEP = ("vla_action", "step_index")  # int64 [1], the denoising step that was stochastic, from 0; Flow-SDE only
FLOW_X_T = ("vla_action", "x_t")  # float32 [H', A'], the noisy chunk that this step started from; Flow-SDE only
FLOW_X_NEXT = ("vla_action", "x_next")  # float32 [H, A], what the step made of the executed part of x_t; Flow-SDE only
FLOW_PATH = ("vla_action", "path")  # float32 [K + 1, H', A'], every visited x_t, noise first; Flow-Noise only
ACTION_IS_PAD = "action_is_pad"  # bool [H], true where a demonstration has ended
LOG_PROB = "action_log_prob"  # float32 [H, A], of every action element; an objective sums it to its own level
PROXIMAL_LOG_PROB = "proximal_log_prob"  # float32 [H, A], of the trainer's policy at the start of the update
REFERENCE_LOG_PROB = "reference_log_prob"  # float32 [H, A], of the policy that a KL penalty holds on to
ENTROPY = "entropy"  # float32 [H, A]
VALUE = "state_value"  # float32 [1]
NEXT_VALUE = ("next", "state_value")  # float32 [1], V of the state after the chunk, also where the episode was cut
ADVANTAGE = "advantage"  # float32 [1]
VALUE_TARGET = "value_target"  # float32 [1]
GROUP_ID = "group_id"  # int64 [1], the same for all trajectories of a group, that is of one start; set in padding as well
LOSS_MASK = "loss_mask"  # bool [1], false where a decision must not be trained on although it was executed

REWARD = ("next", "reward")  # float32 [1], sum over the executed env steps of the chunk
STEP_REWARDS = ("next", "step_rewards")  # float32 [H], reward of each env step, zero where none was executed
EXECUTED = ("next", "executed")  # bool [H], the env steps of the chunk that were really executed
DONE = ("next", "done")  # bool [1]
TERMINATED = ("next", "terminated")  # bool [1], the task ended: no value is bootstrapped
TRUNCATED = ("next", "truncated")  # bool [1], the clock ran out: the value of the final observation is bootstrapped
SUCCESS = ("next", "success")  # bool [1], the success predicate after the chunk's last executed env step
SUCCESS_ONCE = ("next", "success_once")  # bool [1], held at any env step of the episode so far

POLICY_VERSION = "policy_version"  # int64 [1], number of updates behind the weights that made the decision
STALENESS = "staleness"  # int64 [1], the consuming version minus the oldest policy_version of the trajectory
REQUEST_KEY = "request_key"  # int64 [1], the key of the decision's own random stream (vla_async.rng)
