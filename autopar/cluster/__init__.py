"""Chips, links and hosts of a cluster, and where the devices of a mesh lie on them."""

from autopar.cluster.chip import Chip as Chip
from autopar.cluster.chip import Source as Source
from autopar.cluster.cluster import Cluster as Cluster
from autopar.cluster.placement import axis_links as axis_links
from autopar.cluster.placement import device_order as device_order
from autopar.cluster.placement import mesh_shapes as mesh_shapes
from autopar.cluster.switch import Switch as Switch
from autopar.cluster.topology import AbstractTopology as AbstractTopology
from autopar.cluster.topology import Layout as Layout
from autopar.cluster.topology import LinkLevel as LinkLevel
from autopar.cluster.topology import SwitchLevel as SwitchLevel
from autopar.cluster.torus import Torus as Torus
