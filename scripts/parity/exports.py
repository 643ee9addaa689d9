"""Our side: writes what ``vla-async export`` writes, of policies with other weights than LeRobot's side made."""

from __future__ import annotations

import sys

from parity import cases, ours
from vla_async.export import export_policy

if __name__ == "__main__":
    for name in sys.argv[1:] or cases.EXPORTED:
        export_policy(ours.trained(name), cases.FOLDER / name / cases.EXPORT)
