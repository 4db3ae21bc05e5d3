"""A cluster in a box: Linux network namespaces with shaped links, for real multi-host jobs.

See docs/lab.md. Emulated compute is in `gossamer.lab.compute`: separate, because it needs torch.
"""

from gossamer.lab.cluster import Cluster
from gossamer.lab.layout import Layout, one_switch, parse_layout
from gossamer.lab.processes import HostFailed, HostProcesses

Job = HostProcesses
"""Its former name: elsewhere a job is what a runtime model predicts."""

__all__ = [
    "Cluster",
    "HostFailed",
    "HostProcesses",
    "Job",
    "Layout",
    "one_switch",
    "parse_layout",
]
