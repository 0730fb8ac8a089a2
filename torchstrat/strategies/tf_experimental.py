"""The names of `torchstrat` in the place where TensorFlow 2.2 to 2.4 programs look for them.

``tf.distribute.experimental.X`` is ``ts.experimental.X``: the very same objects under a second path.
"""

from torchstrat.core.values import ValueContext
from torchstrat.parameter_server import partitioners
from torchstrat.strategies import tf_coordinator as coordinator
from torchstrat.strategies.central_storage import CentralStorageStrategy
from torchstrat.strategies.multi_worker_mirrored import (
    CommunicationImplementation,
    CommunicationOptions,
    MultiWorkerMirroredStrategy,
)
from torchstrat.strategies.parameter_server import ParameterServerStrategy
from torchstrat.strategies.tpu import TPUStrategy

CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    "ValueContext",
    "coordinator",
    "partitioners",
]
