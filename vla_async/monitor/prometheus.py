"""``PrometheusLogger``: the newest metrics of a run over HTTP, for Prometheus to scrape and Grafana to draw."""

from __future__ import annotations

import re
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from lightning.fabric.loggers import Logger
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from vla_async.monitor import metric_table as names
from vla_async.monitor.loggers import RunLogger

_LABELS = ("task", "reason", "age", "rows")  # free parts that become labels; the others stay in the name
_AXES = (names.STEP, names.ENV_STEPS, names.EPISODES, names.ELAPSED_S)


def exported(name: str) -> tuple[str, str, dict[str, str]]:
    """What a logged name is called here: its name, its help text, and its labels.

    ``queue/dropped/stale`` becomes ``vla_async_queue_dropped`` with the label ``reason="stale"``. A figure over all tasks
    has the label ``task=""``, which is to Prometheus as if it had none.
    """
    entry = names.find(name)
    stem, labels, about = name, dict[str, str](), "Logged by this run; not in the table of metrics."
    if entry is not None:
        parts = entry.labels_of(name) or {}
        labels = {key: value for key, value in parts.items() if key in _LABELS}
        stem = re.sub(r"<(\w+)>", lambda free: "" if free[1] in _LABELS else parts[free[1]], str(entry))
        about = f"{entry.about} ({entry.unit + ', ' if entry.unit else ''}{entry.reduced})"
    return "vla_async_" + re.sub(r"\W+", "_", stem.strip("[/_]")), about, labels


class PrometheusLogger(Logger, RunLogger, Collector):
    """Serves what was logged last at ``http://<address>:<port>/metrics``, from the beginning of a run to its end.

    Logging keeps the numbers, and that is all; the page is made, in a thread of its own, when somebody asks for it.

    Args:
        port: where it listens; 0 for any free one, which is printed.
        address: of the interface; by default this machine alone can ask. ``0.0.0.0`` lets others.
    """

    def __init__(self, port: int = 9400, address: str = "127.0.0.1") -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"loggers.PrometheusLogger.port={port} must be between 0 (any free one) and 65535")
        self.port, self.address = port, address
        self._values: dict[str, float] = {}
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    @property
    def name(self) -> str:
        """Of the logger."""
        return "prometheus"

    @property
    def version(self) -> str:
        """There is one."""
        return ""

    @property
    def url(self) -> str:
        """Where the page is while a run lasts.

        Raises:
            RuntimeError: if none does.
        """
        if self._server is None:
            raise RuntimeError("the page is there while a run lasts")
        return f"http://{self.address}:{self._server[0].server_port}/metrics"

    def begin_run(self, directory: Path) -> None:
        """Open the port.

        Raises:
            ValueError: if it is taken, or there is no such interface.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._values = {}
        try:
            self._server = start_http_server(self.port, self.address, registry)
        except OSError as error:
            where = f"loggers.PrometheusLogger.port={self.port} at address={self.address!r}"
            raise ValueError(f"{where} cannot be opened: {error.strerror}; choose another, or 0 for any free one") from None
        print(f"prometheus: {directory} at {self.url}", flush=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the newest values. Those of an earlier step, as of a validation beside training, move no x axis back."""
        if step is not None:
            metrics = {**metrics, names.STEP: step}
            if step < self._values.get(names.STEP, 0):
                metrics = {name: value for name, value in metrics.items() if name not in _AXES}
        self._values = {**self._values, **metrics}  # a new one: the server's threads may be reading

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """They are no numbers."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The page, as prometheus_client wants it."""
        families: dict[str, tuple[GaugeMetricFamily, tuple[str, ...]]] = {}
        for logged, value in self._values.items():
            name, about, labels = exported(logged)
            if name not in families:
                families[name] = GaugeMetricFamily(name, about, labels=[*labels]), tuple(labels)
            family, order = families[name]
            family.add_metric([labels[label] for label in order], value)
        yield from (family for family, _ in families.values())

    def finalize(self, status: str) -> None:
        """Close the port, and end the thread."""
        server, self._server = self._server, None
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
            server[1].join()
