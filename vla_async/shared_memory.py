"""Shared memory and pipes: what the processes of a rollout are connected by, and nothing else.

Arrays of numbers lie in a :class:`SharedBlock`. That something has happened is said by a few bytes in a :class:`Channel`,
whose reader sleeps in the kernel until then. Neither leaves anything behind: the block has no name, and both end with the
last process that holds them, however it ends.
"""

from __future__ import annotations

import math
import os
import select
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64  # a cache line


@dataclass(frozen=True)
class Field:
    """An array of a block: its shape and element type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class SharedBlock:
    """Named tensors, zeroed, in one piece of shared memory. Sent to another process, it is the same memory there.

    Memory is taken page by page as it is written to, so :meth:`check_fits` must be asked before: a page that cannot be had
    later kills the process that touches it.

    Args:
        fields: what the block holds, by name.
    """

    def __init__(self, fields: Mapping[Any, Field]) -> None:
        self.fields = dict(fields)
        storage = torch.UntypedStorage._new_shared(max(block_bytes(fields), 1))
        self._attach(torch.empty(0, dtype=torch.uint8).set_(storage))

    def _attach(self, memory: Tensor) -> None:
        self._memory, self.tensors, start = memory, {}, 0
        for name, field in self.fields.items():
            size = math.prod(field.shape) * field.dtype.itemsize
            self.tensors[name] = memory[start : start + size].view(field.dtype).view(field.shape)
            start += field.nbytes

    def __getitem__(self, name: Any) -> Tensor:
        return self.tensors[name]

    def __getstate__(self) -> tuple[dict[Any, Field], Tensor]:
        return self.fields, self._memory

    def __setstate__(self, state: tuple[dict[Any, Field], Tensor]) -> None:
        self.fields = state[0]
        self._attach(state[1])

    def descriptor(self) -> tuple[int, int]:
        """The file descriptor of the memory, which stays the block's, and its bytes: what another process attaches."""
        storage: Any = self._memory.untyped_storage()
        descriptor, size = storage._share_fd_cpu_()
        return int(descriptor), int(size)

    @classmethod
    def attach(cls, fields: Mapping[Any, Field], descriptor: int, size: int) -> SharedBlock:
        """The block of another process, by a file descriptor that is taken over from it, and closed."""
        try:
            kind: Any = torch.UntypedStorage
            storage = kind._new_shared_fd_cpu(descriptor, size)
        finally:
            os.close(descriptor)
        block = cls.__new__(cls)
        block.__setstate__((dict(fields), torch.empty(0, dtype=torch.uint8).set_(storage)))
        return block

    def pin(self) -> None:
        """Let CUDA copy from and to the block without staging; it stays so until the process ends.

        Raises:
            RuntimeError: if the driver refuses.
        """
        if self._memory.is_pinned():
            return
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0))
        if code:
            raise RuntimeError(f"CUDA could not pin {self._memory.numel()} bytes of shared memory (error {code})")


def numbers(array: NDArray[Any]) -> Any:
    """The memory of an array ``[N]``, whose elements are read and written there as plain numbers.

    On a core that has just slept or done something else, that costs a tenth of what it costs to ask the array.
    """
    return memoryview(array)  # type: ignore[arg-type]


def block_bytes(fields: Mapping[Any, Field]) -> int:
    """Bytes of a block with such fields."""
    return sum(field.nbytes for field in fields.values())


def free_shared_memory() -> int:
    """Bytes of shared memory that can still be taken: what /dev/shm, the machine and the container leave."""
    room = [os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize] if os.path.isdir("/dev/shm") else []
    return min([*room, host_memory_left()])


def host_memory_left() -> int:
    """Bytes of main memory that can still be taken: what the machine and the container leave; a lot where none says."""
    return min(_memory_left(), default=2**63)


def _memory_left() -> list[int]:
    left = []
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    group = "/sys/fs/cgroup/memory"
    if all(os.path.exists(f"{group}.{name}") for name in ("max", "current", "stat")):
        with open(f"{group}.max") as most, open(f"{group}.current") as now, open(f"{group}.stat") as parts:
            if (text := most.read().strip()).isdigit():
                # what was read from files is given back when the memory is needed
                files = next((int(line.split()[1]) for line in parts if line.startswith("inactive_file ")), 0)
                left.append(int(text) - int(now.read()) + files)
    return left


class Channel:
    """A pipe for records of a few bytes: any number of writers, and readers that each get whole records.

    A record is shorter than what the kernel writes at once (``PIPE_BUF``), so records never mix.

    Args:
        context: of multiprocessing; its processes can be given the channel when they are made.
        record: format of a record, as for :mod:`struct`.
    """

    def __init__(self, context: Any, record: str) -> None:
        self.reader: Connection
        self.writer: Connection
        self.reader, self.writer = context.Pipe(duplex=False)
        self._struct = struct.Struct(record)
        os.set_blocking(self.reader.fileno(), False)

    def __getstate__(self) -> tuple[Connection, Connection, str]:
        return self.reader, self.writer, self._struct.format

    def __setstate__(self, state: tuple[Connection, Connection, str]) -> None:
        self.reader, self.writer, self._struct = state[0], state[1], struct.Struct(state[2])

    def fileno(self) -> int:
        """Of the reading end, for ``select`` and the like."""
        return self.reader.fileno()

    def send(self, *values: float) -> None:
        """Write one record; waits if a reader is thousands of records behind."""
        os.write(self.writer.fileno(), self._struct.pack(*values))

    def send_all(self, records: Sequence[tuple[float, ...]]) -> None:
        """Write several records, as many at once as go through a pipe unmixed."""
        if len(records) == 1:
            self.send(*records[0])
            return
        most = select.PIPE_BUF // self._struct.size
        for start in range(0, len(records), most):
            os.write(self.writer.fileno(), b"".join(self._struct.pack(*record) for record in records[start : start + most]))

    def receive(self, most: int = 1024) -> list[tuple[Any, ...]]:
        """The records that are there, at most so many; an empty list if there are none."""
        try:
            data = os.read(self.reader.fileno(), most * self._struct.size)
        except BlockingIOError:
            return []
        return list(self._struct.iter_unpack(data))

    def close(self) -> None:
        """Close this process's ends."""
        self.reader.close()
        self.writer.close()
