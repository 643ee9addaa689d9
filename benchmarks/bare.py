"""The limit on a machine: envs and an emulated device with next to nothing between them.

One process per env, a pipe that carries the numbers of the envs that wait, and a pipe per env that says "go on". Nothing
is recorded, no policy computes, no version, seed or slot is kept, and no failure is noticed. What this loses against the
zero-overhead model is lost by the kernel and Python alone; what an engine loses beyond it is its own.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.cases import Forward
from vla_async.emulation.device import sleep_until
from vla_async.envs import EnvFactory

_ASK, _GO = struct.Struct("<i"), struct.Struct("<q")


def _step_for_ever(envs: EnvFactory, index: int, asks: Connection, go: Connection) -> None:
    torch.set_num_threads(1)
    simulator = envs.make_simulator(index)
    action, everyone = torch.zeros(1, len(simulator.action_low)), torch.ones(1, dtype=torch.bool)
    simulator.reset(everyone, torch.tensor([index]))
    me = _ASK.pack(index)
    while True:
        os.write(asks.fileno(), me)
        if not os.read(go.fileno(), _GO.size):
            return  # the device has gone
        simulator.step(action, everyone)


class BareCollector:
    """Steps the envs of a factory, one row each, and collects nothing.

    Args:
        envs: the envs.
        forward: what a forward of the device costs.
        frames_per_batch: decisions after which iteration yields an empty batch of that size.
    """

    def __init__(self, envs: EnvFactory, forward: Forward, frames_per_batch: int) -> None:
        self._forward, self._frames = forward, frames_per_batch
        context: Any = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.bare"])
        self._asks, writer = context.Pipe(duplex=False)
        pipes = [context.Pipe(duplex=False) for _ in range(envs.num_envs)]
        self._go = [sender for _, sender in pipes]
        self._processes = [
            context.Process(target=_step_for_ever, args=(envs, index, writer, reader), daemon=True)
            for index, (reader, _) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def __iter__(self) -> Iterator[TensorDict]:
        poller, go, made = select.poll(), _GO.pack(1), 0
        poller.register(self._asks, select.POLLIN)
        while True:
            poller.poll()
            ready = [index for (index,) in _ASK.iter_unpack(os.read(self._asks.fileno(), 4096))]
            sleep_until(time.perf_counter() + self._forward.flat_s + self._forward.per_row_s * len(ready))
            for index in ready:
                os.write(self._go[index].fileno(), go)
            made += len(ready)
            if made >= self._frames:
                made -= self._frames
                yield TensorDict({}, [self._frames])

    def shutdown(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in [self._asks, *self._go]:
            connection.close()
