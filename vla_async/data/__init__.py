"""Data: demonstrations on disk."""

from vla_async.data.demonstrations import Demonstrations, DemonstrationWriter

__all__ = ["DemonstrationWriter", "Demonstrations"]
