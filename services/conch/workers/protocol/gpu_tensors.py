"""What a conversation has to know of tensors on GPUs; whoever uses GPUs has the rest (`devices.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from conch.core.errors import InternalError, UnavailableError
from conch.core.tensor import Tensor
from conch.workers.protocol.tensor_transport import Payload
from conch.workers.protocol.wire import Place, TensorLayout


class UnreachableError(InternalError):
    """A tensor has come whose memory can't be opened here."""


class UnmappedError(UnreachableError, UnavailableError):
    """A tensor, or a whole message, has come whose memory a process can't map now."""


def unmapped(why: str = "this process can't open further files") -> UnmappedError:
    """The error of a request whose tensors, or whose message, can't be mapped."""
    return UnmappedError(
        f"memory between the server and a worker can't be mapped: {why}; the request may be sent again, and "
        f"a higher limit of open files (ulimit -n) for the server avoids this"
    )


class Devices(Protocol):
    """Sends and receives tensors on GPUs as descriptions; see `conch.workers.protocol.devices`."""

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of those tensors that stay where they are, by their identity."""

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """A tensor on a GPU.

        Raises:
            WireError: It is not where it should be.
            UnreachableError: Its memory can't be opened here.
        """

    def give_back(self, number: int) -> None:
        """Says that the other side does not use a tensor any more.

        Raises:
            WireError: It is not lent.
        """

    def tidy(self) -> None:
        """Gives back what is idle; never waits."""

    def close(self) -> None:
        """Forgets everything."""
