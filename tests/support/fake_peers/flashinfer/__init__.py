"""FlashInfer as `launch.research.peers` calls it."""

__version__ = "0.7.4"
