"""Training: a recipe in, a run folder with metrics, checkpoints, the compact model and a record out."""

from asfp.train.config import TrainConfig, config_from, load_config
from asfp.train.loop import train

__all__ = ["TrainConfig", "config_from", "load_config", "train"]
