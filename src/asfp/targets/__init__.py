"""A target instead of a rate: the smallest rate at which a network has few enough MACs, or is fast enough."""

from asfp.targets.latency import rate_for_latency, ways_to_latency
from asfp.targets.macs import rate_for_macs, ways_to_macs
from asfp.targets.target import STEP, Target
from asfp.targets.ways import WAYS, Way

__all__ = [
    "STEP",
    "WAYS",
    "Target",
    "Way",
    "rate_for_latency",
    "rate_for_macs",
    "ways_to_latency",
    "ways_to_macs",
]
