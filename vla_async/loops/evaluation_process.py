"""The process that evaluates beside training: its own envs, its own copy of the policy, weights as they are handed to it."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor

from vla_async.collectors.acting import portable
from vla_async.collectors.pool import WorkerError, how_it_ended, server_address, use_server, worker_context
from vla_async.collectors.processes import end_members, start_member
from vla_async.collectors.worker import Reply, Reporting, leave_signals_to_parent
from vla_async.data.trajectory_store import Recording, TrajectoryStore, store_of
from vla_async.envs.base import EnvFactory
from vla_async.fabric import autocast_dtype
from vla_async.loops.evaluate import EvaluateLoop, EvaluationResult
from vla_async.policies.base import VLAPolicy
from vla_async.rng import fold
from vla_async.shared_memory import Field, SharedBlock, block_bytes, free_shared_memory

if TYPE_CHECKING:
    from vla_async.trainer import AsyncTrainer

Snapshot = dict[str, Any]  # what a checkpoint of a step holds, which nobody changes any more


class EvaluationProcess:
    """The evaluation process, as the trainer sees it: one request at a time.

    Attributes:
        weights: the tensors of the policy's state_dict.
        progress: int64 ``[1]``, how many episodes of the request have ended.
        wanted: how many there are.

    Args:
        trainer: set up, its state kept.

    Raises:
        ValueError: if its envs cannot be evaluated in.
        MemoryError: if the weights do not fit into shared memory once more.
    """

    def __init__(self, trainer: AsyncTrainer) -> None:
        loop, env = trainer.evaluate_loop, trainer.env
        loop.check(env)
        self.wanted = loop.num_episodes * len(env.task_names)
        self.weights = _block(trainer.state.finished["state_dict"])
        self.progress = SharedBlock({"ended": Field((1,), torch.int64)})
        self._thread: threading.Thread | None = None
        self._trouble: Exception | None = None
        context, store = worker_context(), store_of(trainer)
        orders = EvaluationOrders(
            server=server_address(),
            pickled=cloudpickle.dumps((portable(trainer.policy), loop)),
            factory=env,
            videos=trainer.run.videos,
            recording=None if store is None else store.recording,
            autocast=autocast_dtype(trainer.precision),
            seed=trainer.seed,
            weights=self.weights,
            progress=self.progress,
        )
        self.member = start_member(context, "evaluation process", run_evaluations, orders, daemon=False)

    @property
    def has_spoken(self) -> bool:
        """Whether :meth:`receive` would not wait."""
        return self.member.link.poll(0)

    def request(self, snapshot: Snapshot) -> None:
        """Let it evaluate these weights. They are copied by a thread, for the trainer has better things to do.

        Raises:
            RuntimeError: if they are not those of the policy that it has.
        """
        if fields_of(snapshot["state_dict"]) != self.weights.fields:
            raise RuntimeError(
                "the tensors of the policy's state_dict have changed since the run began, so that its weights cannot be "
                "handed to the evaluation process; set evaluate_loop.beside_training=false"
            )
        self.progress["ended"].zero_()
        self._thread = threading.Thread(target=self._send, args=(snapshot,), name="weights-to-evaluation", daemon=True)
        self._thread.start()

    def _send(self, snapshot: Snapshot) -> None:
        others = {}
        try:
            for name, value in snapshot["state_dict"].items():
                if isinstance(value, Tensor):
                    self.weights[name].copy_(value)
                else:
                    others[name] = value
            self.member.link.send((version_of(snapshot), others))
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer has to learn of it rather than wait for ever
            self._trouble = error
            self.member.process.kill()  # which wakes whoever waits for an answer

    def receive(self) -> EvaluationResult:
        """Wait for a result.

        Raises:
            FloatingPointError: if a number was not finite, as where it was raised.
            WorkerError: if it has failed otherwise, or ended.
            RuntimeError: if the weights could not be handed to it.
        """
        member = self.member
        try:
            message = member.link.recv()
        except (EOFError, ConnectionResetError):
            if self._trouble is not None and not isinstance(self._trouble, (BrokenPipeError, ConnectionResetError)):
                raise RuntimeError(f"weights could not be handed to the {member.name}") from self._trouble
            raise WorkerError(f"the {member.name} (pid {member.process.pid}) {how_it_ended(member.process)}") from None
        if isinstance(message, Reply):
            kind = FloatingPointError if message.is_arithmetic else WorkerError
            raise kind(f"the {member.name} failed with\n{message.error}")
        assert isinstance(message, EvaluationResult)
        return message

    def end(self, idle: bool) -> None:
        """End it and its envs: at once, or, if it is idle, when it has closed them."""
        if idle:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended already
                self.member.link.send(None)
        else:
            self.member.process.kill()
        if self._thread is not None:
            self._thread.join()
        end_members([self.member], [], grace_s=5.0)


def version_of(snapshot: Snapshot) -> int:
    """The number of updates behind its weights."""
    version: int = snapshot["counters"]["step"]
    return version


def fields_of(state_dict: Mapping[str, Any]) -> dict[str, Field]:
    """The tensors of a state_dict as fields of a block."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    return {name: Field(tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _block(state_dict: Mapping[str, Any]) -> SharedBlock:
    """Shared memory for weights."""
    fields = fields_of(state_dict)
    wanted, free = block_bytes(fields), free_shared_memory()
    if wanted > free:
        raise MemoryError(
            f"evaluate_loop.beside_training needs {wanted:,} bytes of shared memory for a copy of the weights, and {free:,} "
            "are free; enlarge /dev/shm (docker run --shm-size), or set it to false"
        )
    return SharedBlock(fields)


@dataclass(frozen=True)
class EvaluationOrders:
    """What the process is started with.

    Attributes:
        server: address of the server process that its envs' workers come from.
        pickled: the policy and the :class:`EvaluateLoop`.
        factory: the envs.
        videos: directory for recordings.
        recording: which episodes are saved, and where; None for none.
        autocast: element type of the policy's matrix products, or None for that of its weights.
        seed: of torch's generators, for policies that draw from them.
        weights: the tensors of the policy's state_dict, written before each request.
        progress: int64 ``[1]``, how many episodes of the request have ended.
    """

    server: str
    pickled: bytes
    factory: EnvFactory
    videos: Path
    recording: Recording | None
    autocast: torch.dtype | None
    seed: int
    weights: SharedBlock
    progress: SharedBlock


def run_evaluations(link: Connection, orders: EvaluationOrders) -> None:
    """Body of the process: build the envs, then answer each request with an :class:`EvaluationResult`.

    A request is the version of the weights in the block, and what else the state_dict holds; None ends the process.
    """
    leave_signals_to_parent()
    use_server(orders.server)
    torch.set_num_threads(1)  # the other cores are for training and its envs
    torch.manual_seed(fold(orders.seed, "evaluation") % 2**63)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # nobody is left to tell
        with Reporting(link):
            policy, loop = pickle.loads(orders.pickled)
            policy.to(loop.device)
            loop.open(orders.factory)
        store = None if orders.recording is None else TrajectoryStore(orders.recording)
        try:
            while (request := link.recv()) is not None:
                with Reporting(link):
                    result = _evaluate(policy, loop, orders, store, *request)
                link.send(result)
        finally:
            loop.close()
            if store is not None:
                store.close()


def _evaluate(
    policy: VLAPolicy,
    loop: EvaluateLoop,
    orders: EvaluationOrders,
    store: TrajectoryStore | None,
    version: int,
    others: dict[str, Any],
) -> EvaluationResult:
    """Evaluate, and wait until what is to be saved of it stands in its files."""

    def tell(ended: int) -> None:
        orders.progress["ended"].fill_(ended)

    policy.load_state_dict({**orders.weights.tensors, **others})
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if orders.autocast is not None:
        autocast = partial(torch.autocast, loop.device.type, dtype=orders.autocast)
    result = loop.run(
        policy,
        orders.factory,
        "validate",
        policy_version=version,
        videos=orders.videos,
        store=store,
        autocast=autocast,
        progress=tell,
    )
    if store is not None:
        store.flush()
    return result
