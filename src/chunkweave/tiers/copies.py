"""Copies to the device that computes, beside what it computes.

A copy is sent on a stream of its own, by whichever thread has read the data, and received where it is needed: what is
computed from then on waits for it on the device, and the host waits for nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

EventT = TypeVar("EventT")


class Streams(Protocol[EventT]):
    """Two queues of work of one device: what it computes, and what is copied to it."""

    @property
    def device(self) -> torch.device:
        """Where copies go."""

    def copying(self) -> AbstractContextManager[object]:
        """What this thread issues within goes to the copies' queue."""

    def mark(self) -> EventT:
        """The end of what this thread has issued to its current queue so far."""

    def wait_for(self, event: EventT) -> None:
        """What this thread issues to its current queue from now on runs behind `event`."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The current queue uses a tensor of the other one: its memory is not reused before that is over."""


class NullStreams:
    """A device without queues: what is issued is done. The CPU."""

    device = torch.device("cpu")

    def copying(self) -> AbstractContextManager[object]:
        """Nothing changes."""
        return nullcontext()

    def mark(self) -> None:
        """There is nothing to wait for."""

    def wait_for(self, event: None) -> None:
        """It is done."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Nobody else has it."""


class CudaStreams:
    """The current stream of a CUDA device, which computes, and one of our own beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        """The stream beside."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._side)
        return context

    def mark(self) -> torch.cuda.Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_for(self, event: torch.cuda.Event) -> None:
        """On the device; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """The caching allocator is told of the second stream."""
        tensor.record_stream(torch.cuda.current_stream(self.device))


@dataclass(frozen=True, slots=True, eq=False)
class Sent(Generic[EventT]):
    """A tensor on its way. `receive` it where it is used, once."""

    _tensor: torch.Tensor
    _event: EventT
    _streams: Streams[EventT]

    def receive(self) -> torch.Tensor:
        """The tensor on the device; what this thread issues from now on finds it complete."""
        self._streams.wait_for(self._event)
        self._streams.keep(self._tensor)
        return self._tensor


class DeviceCopies(Generic[EventT]):
    """Sends tensors to one device. Safe to use from several threads."""

    def __init__(self, streams: Streams[EventT]) -> None:
        self._streams = streams

    def send(self, tensor: torch.Tensor) -> Sent[EventT]:
        """Begin to copy; nothing if it is there already.

        From page-locked memory this returns at once, and PyTorch does not give that memory to anybody else before the
        copy is over; from other memory it may take as long as the copy.
        """
        with self._streams.copying():
            there = tensor.to(self._streams.device, non_blocking=True)
            return Sent(there, self._streams.mark(), self._streams)


def copies_to(device: torch.device) -> DeviceCopies[torch.cuda.Event] | DeviceCopies[None]:
    """Copies to a CUDA device beside its computing, or to the CPU, where there is nothing to copy."""
    return DeviceCopies(CudaStreams(device)) if device.type == "cuda" else DeviceCopies(NullStreams())


Send = Callable[[torch.Tensor], Sent[torch.cuda.Event] | Sent[None]]
"""`DeviceCopies.send`, of whatever device."""
