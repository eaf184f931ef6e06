"""An HTTP and S3 server on loopback whose faults can be planned."""

from object_server.faults import Faults
from object_server.server import ObjectServer
from object_server.tally import Counts

__all__ = ["Counts", "Faults", "ObjectServer"]
