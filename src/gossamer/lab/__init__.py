"""A cluster in a box: Linux network namespaces with shaped links, for real multi-host jobs.

See docs/lab.md. The emulated compute is in `gossamer.lab.compute`, apart, because it needs torch.
"""

from gossamer.lab.cluster import Cluster
from gossamer.lab.layout import Layout, one_switch, parse_layout
from gossamer.lab.processes import HostFailed, HostProcesses

Job = HostProcesses
"""Its name before: elsewhere a job is what a runtime model predicts."""

__all__ = [
    "Cluster",
    "HostFailed",
    "HostProcesses",
    "Job",
    "Layout",
    "one_switch",
    "parse_layout",
]
