"""Families of metrics from values by their labels."""

from collections.abc import Mapping
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from inference_service.stats import SECONDS_BOUNDS, Seconds

MODEL = "model_name"
Labels = tuple[str, ...]
L = TypeVar("L", bound=Labels)


def gauges(name: str, text: str, labels: Labels, values: Mapping[L, float]) -> Metric:
    """One gauge."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def counters(name: str, text: str, labels: Labels, values: Mapping[L, float]) -> Metric:
    """One counter. `name` is without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def histograms(name: str, text: str, labels: Labels, values: Mapping[L, Seconds]) -> Metric:
    """One histogram of times."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for of, seconds in values.items():
        counts = zip((*map(str, SECONDS_BOUNDS), "+Inf"), accumulate(seconds.buckets), strict=True)
        family.add_metric(of, [(bound, float(count)) for bound, count in counts], seconds.sum)
    return family
