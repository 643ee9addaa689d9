"""Size-weighted accumulation on several ranks, with the optimizer's work sharded over them by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn import Module, ModuleDict, ModuleList
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from vla_async.strategies.ranks import DEFAULT_TIMEOUT_S, AcrossRanks, as_timedelta
from vla_async.strategies.size_weighted import Report, local, parameters_of, whole


def shard_blocks(module: Module, mesh: DeviceMesh) -> Module:
    """Shard a module over the ranks: what it keeps in a ``ModuleList`` one by one, the rest together.

    Args:
        module: the module; changed in place.
        mesh: has the dimension ``data_parallel``.
    """
    blocks = [block for parent in module.modules() if isinstance(parent, ModuleList) for block in parent]
    for block in reversed(blocks):  # inner ones first
        if not isinstance(block, ModuleList | ModuleDict) and next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


class SizeWeightedFSDPStrategy(AcrossRanks, ModelParallelStrategy):
    """FSDP2: the optimizer's state, its weights and its gradients are sharded over the ranks.

    The gradient is the mean over all valid loss elements of all ranks. Ranks may have unequal numbers of micro-batches, and
    none waits for another in a forward or backward pass, so between two steps each holds the whole weights and its own
    whole gradient sum. The division scatters both; the optimizer steps on shards; then the weights are gathered. Per
    parameter in float32, with Adam on n ranks, that is 8 + 8 / n bytes plus a shard of the weights and the gradient,
    where :class:`SizeWeightedDDPStrategy` takes 16.

    Between two steps, then, the module is as on one device: its methods can be called without the other ranks, its
    ``state_dict`` is complete, and another can be loaded, on all ranks the same. An optimizer may be made of its parameters
    before or after the set-up; from then on it has the shards. Its ``state_dict``, for which all ranks must come together,
    is complete too, so a checkpoint is one file and fits any of the strategies.

    Args:
        parallelize_fn: shards a module over ``mesh["data_parallel"]`` with ``fully_shard``, the module itself included;
            by default :func:`shard_blocks`.
        timeout: how long a rank waits for the others at the division, in seconds or as a timedelta.
        process_group_backend: as in Lightning.
        start_method: how the other ranks of this host are started, as in Lightning's DDPStrategy.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Module] = shard_blocks,
        timeout: float | timedelta = DEFAULT_TIMEOUT_S,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self._roots: list[Module] = []
        self._trained: list[Tensor] = []  # what of the whole weights gets gradients
        self._is_whole = True  # not so from a division to the step
        self._leaf_of, self._shard_of = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        super().__init__(
            parallelize_fn=parallelize_fn, timeout=as_timedelta(timeout), process_group_backend=process_group_backend
        )
        self._start_method = start_method
        self._backward_sync_control = None  # nothing is synchronised in a backward pass

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Join the other ranks; all of them are one data-parallel group."""
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1
        super().setup_environment()

    # ------------------------------------------------------------------ set-up

    def setup_module(self, module: Module) -> Module:
        """Start all ranks from the weights of rank 0, sharded over them, and gather these.

        Raises:
            ValueError: if ``parallelize_fn`` leaves something unsharded, or asks for its own mixed precision.
        """
        self._equalize(module)
        before = dict(module.named_parameters())
        module = super().setup_module(module)
        _check_sharded(module)
        assert isinstance(module, FSDPModule)
        shards = dict(module.named_parameters())
        for shard in shards.values():
            shard.requires_grad_(False)  # else FSDP, which could then reduce gradients, wants one dtype in each part
        module._get_fsdp_state()._lazy_init()
        for part in _parts(module):
            _keep_data_only(part)
            self._guards.append(cast(Module, part).register_forward_pre_hook(self._check_whole, prepend=True))
        self._roots.append(module)
        self._gather()
        for name, leaf in module.named_parameters():
            if before[name].requires_grad:
                self._trained.append(leaf.requires_grad_())
            self._leaf_of[shards[name]] = leaf
            self._shard_of[leaf] = self._shard_of[before[name]] = shards[name]
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer into the protocol, and give it the shards of its parameters.

        Raises:
            ValueError: if a parameter is not of a module that was set up, or if there is optimizer state to be sharded.
        """
        for group in optimizer.param_groups:
            shards = [p if p in self._leaf_of else self._shard_of.get(p) for p in group["params"]]
            if any(shard is None for shard in shards):
                raise ValueError("the optimizer has parameters of no module that was set up: call fabric.setup_module first")
            if any(p in optimizer.state and p is not shard for p, shard in zip(group["params"], shards, strict=True)):
                raise ValueError("the optimizer has a state already: load it after fabric.setup")
            group["params"] = shards
        self._guards.append(optimizer.register_state_dict_post_hook(_make_state_whole))
        self._guards.append(optimizer.register_load_state_dict_post_hook(_shard_state))
        return super().setup_optimizer(optimizer)

    def teardown(self) -> None:
        """Forget the modules, which stay sharded, and release what Lightning holds."""
        self._roots.clear()
        self._trained.clear()
        super().teardown()
        self._leaf_of, self._shard_of = WeakIdKeyDictionary(), WeakIdKeyDictionary()

    # ------------------------------------------------------------------ a step

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Back-propagate the summed loss of one micro-batch, as on one device."""
        super().backward(*args, **kwargs)
        for optimizer in self._optimizers:
            for shard, leaf in zip(parameters_of(optimizer), self._leaves(optimizer), strict=True):
                if leaf.grad is not None and shard.grad is None:
                    shard.grad = torch.zeros_like(shard)  # where the sum will go; shows if it is zeroed before

    def reset(self) -> None:
        """As on one device; after a step that was given up at the division, all ranks must call it."""
        super().reset()
        for leaf in self._leaf_of.values():
            leaf.grad = None
        if not self._is_whole and self._roots:
            self._gather()

    def _begin(self) -> None:
        self._drop_zeroed()
        super()._begin()

    def _report(self, optimizer: Optimizer) -> Report:
        self._drop_zeroed()
        return super()._report(optimizer)

    def _drop_zeroed(self) -> None:
        """Zero for good what ``optimizer.zero_grad()`` zeroed, for example of an optimizer that has not its turn."""
        for optimizer in self._involved:
            for shard, leaf in zip(parameters_of(optimizer), self._leaves(optimizer), strict=True):
                if shard.grad is None and optimizer not in self._stepped:
                    leaf.grad = None

    def _leaves(self, optimizer: Optimizer) -> Sequence[Tensor]:
        return [self._leaf_of[shard] for shard in parameters_of(optimizer)]

    def _reduce(self, optimizer: Optimizer, wanted: Sequence[bool]) -> None:
        self._scatter()
        for shard, is_wanted in zip(parameters_of(optimizer), wanted, strict=True):
            if is_wanted:
                leaf = self._leaf_of[shard]
                shard.grad = _sharded(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, shard, Partial())
                leaf.grad = None

    def _scatter(self) -> None:
        """Leave only shards of the weights, of what they are now: something may have been loaded into them."""
        if self._is_whole:
            for parameter in (parameter for root in self._roots for parameter in root.parameters()):
                shard = self._shard_of[parameter]
                local(shard.detach()).copy_(local(_sharded(parameter.detach(), shard, Replicate())))
            self._reshard()

    def _reshard(self) -> None:
        self._is_whole = False
        for root in self._roots:
            for part in _parts(root):
                part.reshard()

    def _gather(self) -> None:
        """Give each rank the whole weights, from all shards."""
        self._reshard()
        for root in self._roots:
            for part in _parts(root):
                part.unshard()
        for leaf in self._trained:
            leaf.requires_grad_()  # FSDP made it like its shard
        self._is_whole = True

    def _check_whole(self, *_: Any) -> None:
        if not self._is_whole:
            raise RuntimeError(
                "the weights are sharded from the division (by clipping) to optimizer.step(); no forward there"
            )

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Divide if that is still to do, step on the shards, and gather the weights."""
        result = super().optimizer_step(optimizer, **kwargs)
        self._gather()
        return result

    def clip_gradients_norm(self, module: Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Divide, then clip by the norm over all ranks."""
        return whole(super().clip_gradients_norm(module, optimizer, *args, **kwargs))

    # ------------------------------------------------------------------ checkpoints: as on one device, in one file

    checkpoint_io = Strategy.checkpoint_io
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint


def _parts(module: Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _sharded(tensor: Tensor, like: Tensor, placement: Placement) -> DTensor:
    """This rank's shard of a tensor that is on each rank either whole (``Replicate``) or a summand (``Partial``)."""
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    spread = DTensor.from_local(tensor, mesh, [placement] * mesh.ndim, run_check=False)
    return spread.redistribute(placements=like.placements)


def _check_sharded(module: Module) -> None:
    if not isinstance(module, FSDPModule):
        raise ValueError("parallelize_fn must call fully_shard on the module itself too, last")
    left = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise ValueError(f"parallelize_fn must shard every parameter, but leaves {', '.join(left)}")
    for part in _parts(module):
        policy = part._get_fsdp_state()._mp_policy
        if (policy.param_dtype, policy.reduce_dtype) != (None, None):
            raise ValueError("parallelize_fn must set no mp_policy; choose Fabric's precision instead, such as bf16-mixed")


def _keep_data_only(part: FSDPModule) -> None:
    """Take away FSDP's hooks, and leave it the weights to shard and gather when it is told to.

    Those of forward and backward passes have nothing to do while the weights are whole. The others shard a module whose
    ``state_dict`` is asked for or loaded, on that rank alone; the others would not know.
    """
    state = part._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    if (group := state._fsdp_param_group) is not None:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()


def _make_state_whole(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    entries = state_dict["state"].items()
    whole_entries = {key: {name: _as_whole(value) for name, value in entry.items()} for key, entry in entries}
    return {**state_dict, "state": whole_entries}


def _as_whole(value: Any) -> Any:
    return whole(value) if isinstance(value, Tensor) else value


def _shard_state(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        entry = optimizer.state.get(parameter, {})
        for name, value in entry.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                entry[name] = _sharded(value, parameter, Replicate())
