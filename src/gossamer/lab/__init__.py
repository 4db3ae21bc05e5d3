"""A cluster in a box: Linux network namespaces with shaped links, for real multi-host jobs.

See docs/lab.md. The emulated compute is in `gossamer.lab.compute`, apart, because it needs torch.
"""

from gossamer.lab.cluster import Cluster
from gossamer.lab.layout import Layout, one_switch, parse_layout
from gossamer.lab.processes import HostFailed, Job

__all__ = ["Cluster", "HostFailed", "Job", "Layout", "one_switch", "parse_layout"]
