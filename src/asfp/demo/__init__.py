"""The main job in small: one network trained dense, with SFP and with ASFP, in about two minutes on two cores."""

from asfp.demo.run import run_demo
from asfp.demo.training import METHODS, DemoResult, DemoSettings, EpochRecord, MethodResult, train_method

__all__ = ["METHODS", "DemoResult", "DemoSettings", "EpochRecord", "MethodResult", "run_demo", "train_method"]
