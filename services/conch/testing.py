"""Runs Python models in tests without a server: the real scheduler, no sockets.

    def test_add():
        outputs = conch.testing.run("models/add", {"A": np.ones((1, 4), np.float32)})
        assert outputs["SUM"].tolist() == [[1, 1, 1, 1]]

Exceptions of the model are raised in the test with the model's traceback. The code is in `conch_testing`.
"""

from conch_testing.conversion import ModelError, Outputs
from conch_testing.loaded_model import LoadedModel, load, run

__all__ = ["LoadedModel", "ModelError", "Outputs", "load", "run"]
