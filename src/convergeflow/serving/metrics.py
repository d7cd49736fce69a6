"""/metrics: what the server did, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convergeflow.serving.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of requests, and the engine's own counts read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "convergeflow_http_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "convergeflow_http_seconds",
            "Time from a request's arrival to the end of its answer.",
            ["route"],
            registry=self.registry,
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
        )
        self.registry.register(_Engine(engine))

    def seen(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine(Collector):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "waiting": ("Requests in the queue.", lambda lane: len(lane.waiting)),
            "running": ("Requests that share the next pass.", lambda lane: len(lane.running)),
        }
        counters = {
            "passes": ("Network passes.", lambda lane: lane.counts.passes),
            "row_passes": ("Rows of all network passes.", lambda lane: lane.counts.row_passes),
            "calls": ("Network calls of answered requests.", lambda lane: lane.counts.calls),
            "busy_seconds": ("Time spent making passes.", lambda lane: lane.counts.busy_seconds),
        }
        for name, (about, value) in gauges.items():
            gauge = GaugeMetricFamily(f"convergeflow_{name}", about, labels=["lane"])
            for lane in self.engine.lanes:
                gauge.add_metric([lane.name], value(lane))
            yield gauge
        for name, (about, value) in counters.items():
            counter = CounterMetricFamily(f"convergeflow_{name}", about, labels=["lane"])
            for lane in self.engine.lanes:
                counter.add_metric([lane.name], value(lane))
            yield counter
        ended = CounterMetricFamily(
            "convergeflow_requests_ended", "Requests by how they ended.", labels=["lane", "how"]
        )
        for lane in self.engine.lanes:
            for how, count in lane.counts.ended.items():
                ended.add_metric([lane.name, how], count)
        yield ended
        memory = psutil.Process().memory_info().rss
        yield GaugeMetricFamily("convergeflow_resident_bytes", "Memory of the process.", value=memory)
