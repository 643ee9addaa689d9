"""Build an env, reset it and step it once. A program of its own, for simulators may crash.

It reads a pickled :class:`~vla_async.envs.EnvFactory` from standard input. The last line of its output is JSON: either
``error``, what the env itself says that it lacks, or ``build_s``, ``step_s``, ``spec`` and ``blank``, the cameras whose
picture is of one colour.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from typing import Any

from vla_async.envs import EnvFactory


def step(factory: EnvFactory) -> dict[str, Any]:
    """What the last line says."""
    try:
        factory.check()
    except RuntimeError as error:
        return {"error": str(error)}
    started = time.perf_counter()
    env = factory.make(0)
    try:
        td = env.reset()
        built = time.perf_counter()
        td = env.rand_step(td)
        stepped = time.perf_counter()
        spec = env.env_spec
        blank = [name for name in spec.images if int(td["next", "observation", name].unique().numel()) == 1]
    finally:
        env.close()
    return {"build_s": built - started, "step_s": stepped - built, "spec": spec.to_dict(), "blank": blank}


if __name__ == "__main__":
    result = step(pickle.load(sys.stdin.buffer))
    print(f"\n{json.dumps(result)}", flush=True)
