"""The formulas behind asynchronous VLA training, as pure functions of NumPy: what the engine is held to.

Source: RL-VLA³ (Sun et al., arXiv 2602.05765) and its report (Guo et al., arXiv 2603.11101): dynamic batching with a size
and a time trigger, the bound on what overlapping can gain, and streamed gradient accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Batch = tuple[float, list[int]]


def dynamic_batches(arrivals: ArrayLike, b_max: int, t_max: float) -> list[Batch]:
    """Which requests are answered together, and when, if inference itself takes no time.

    A batch leaves as soon as ``b_max`` requests wait, or when the oldest has waited ``t_max``. A request that arrives at
    the very moment of that deadline is too late for it.

    Args:
        arrivals: arrival times in seconds, ascending, ``[n]``.
        b_max: largest batch.
        t_max: longest wait in seconds; infinity for none, and then what never fills a batch is never answered.

    Returns:
        (time, indices of the requests) of each batch, in order of time.

    Raises:
        ValueError: if arrivals are not a finite ascending list, ``b_max < 1``, or ``t_max`` is negative or NaN.
    """
    times = _arrivals(arrivals)
    if b_max < 1:
        raise ValueError(f"b_max={b_max} must be at least 1")
    if not t_max >= 0.0:
        raise ValueError(f"t_max={t_max} must be 0 or a positive number of seconds")
    batches: list[Batch] = []
    first = 0  # the oldest request that waits
    for index, now in enumerate(times):
        if index > first and now >= times[first] + t_max:
            batches.append((float(times[first] + t_max), list(range(first, index))))
            first = index
        if index + 1 - first == b_max:
            batches.append((float(now), list(range(first, index + 1))))
            first = index + 1
    if first < len(times) and math.isfinite(t_max):
        batches.append((float(times[first] + t_max), list(range(first, len(times)))))
    return batches


def _arrivals(arrivals: ArrayLike) -> NDArray[np.float64]:
    times = np.asarray(arrivals, dtype=np.float64)
    if times.ndim != 1:
        raise ValueError(f"arrivals must be a list of times, but have shape {times.shape}")
    if not np.isfinite(times).all():
        raise ValueError(f"arrivals[{int(np.flatnonzero(~np.isfinite(times))[0])}] is not finite")
    if (falls := np.flatnonzero(np.diff(times) < 0)).size:
        at = int(falls[0]) + 1
        raise ValueError(f"arrivals[{at}]={times[at]} is earlier than the one before it ({times[at - 1]}); sort them")
    return times


def async_speedup(rollout_s: float, train_s: float) -> float:
    """How much faster a step becomes if its rollout and its training overlap on devices of their own.

    Serially a step takes their sum, overlapped the longer of the two: ``(R + T) / max(R, T)``, between 1 and 2, and 2 only
    if both take equally long.

    Args:
        rollout_s: R, seconds of rollout per step.
        train_s: T, seconds of training per step.

    Raises:
        ValueError: if one is negative or not finite, or both are 0.
    """
    for name, value in {"rollout_s": rollout_s, "train_s": train_s}.items():
        if not math.isfinite(value) or value < 0.0:
            raise ValueError(f"{name}={value} must be 0 or a positive number of seconds")
    longer, shorter = max(rollout_s, train_s), min(rollout_s, train_s)
    if longer == 0.0:
        raise ValueError("rollout_s and train_s are both 0: a step that takes no time has no speed-up")
    return 1.0 + shorter / longer


def size_weighted_mean_gradient(grad_fn: Callable[..., ArrayLike], chunks: Sequence[Any]) -> NDArray[np.float64]:
    """The gradient of the mean loss over all samples, from the gradients of its parts: ``Σ n_k g_k / Σ n_k``.

    This is what makes streaming free: however the samples are cut, the result is that of one batch. The mean of the
    ``g_k`` is not, unless all parts are of one size.

    Args:
        grad_fn: gradient of the *mean* loss over one chunk, ``grad_fn(chunk)``; an array of one shape for all chunks.
        chunks: the parts; ``len(chunk)`` is its number of samples. Empty ones count nothing and are not evaluated.

    Raises:
        ValueError: if there is no sample at all, the shapes differ, or a gradient is not finite.
    """
    total, weighted = 0, None
    for position, chunk in enumerate(chunks):
        size = len(chunk)
        if size == 0:
            continue
        gradient = np.asarray(grad_fn(chunk), dtype=np.float64)
        if not np.isfinite(gradient).all():
            raise ValueError(f"the gradient of chunks[{position}] is not finite")
        if weighted is not None and gradient.shape != weighted.shape:
            raise ValueError(f"the gradient of chunks[{position}] has shape {gradient.shape}, not {weighted.shape}")
        weighted = size * gradient if weighted is None else weighted + size * gradient
        total += size
    if weighted is None:
        raise ValueError("chunks hold no sample, so there is no mean")
    mean: NDArray[np.float64] = weighted / total
    return mean
