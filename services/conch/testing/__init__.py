"""Runs Python models in tests, or at a prompt, without a server: the real scheduler, no sockets.

    def test_add():
        outputs = conch.testing.run("models/add", {"A": np.ones((1, 4), np.float32)})
        assert outputs["SUM"].tolist() == [[1, 1, 1, 1]]

What the model raises is raised here, with its own traceback.
"""

from conch.testing.conversion import ModelError, Outputs
from conch.testing.loaded_model import LoadedModel, load, run

__all__ = ["LoadedModel", "ModelError", "Outputs", "load", "run"]
