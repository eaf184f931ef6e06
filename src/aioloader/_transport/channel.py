"""Frames between processes: whole messages on a private socket pair, with descriptors.

``SOCK_SEQPACKET`` preserves message boundaries, lets several readers share one end
(each message goes to one of them), and reports the end of the other side as an empty
message after all of its messages.
"""

import array
import os
import select
import socket
import weakref
from collections.abc import Sequence

# A larger frame is written to a memory file, whose descriptor is sent.
MAX_INLINE = 1 << 16
# Room for frames that are not read yet; the kernel may grant less.
_BUFFER_BYTES = 1 << 21
_INLINE, _IN_FILE = b"\0", b"\1"
_MAX_DESCRIPTORS = 32
_INT = array.array("i").itemsize
if hasattr(socket, "MSG_CMSG_CLOEXEC"):  # Linux: elsewhere there are no channels
    # As plain integers: an enum's `|` costs as much as the call.
    _CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
    NO_WAIT = int(socket.MSG_DONTWAIT)
    _SPACE = socket.CMSG_LEN(_MAX_DESCRIPTORS * _INT)
else:
    _CLOSE_ON_EXEC = NO_WAIT = _SPACE = 0

# Kept for the life of a child process, which exits without collecting anything.
_ADOPTED: list["Channel"] = []


class Channel:
    """One end of a channel; owns its socket, a connected ``SOCK_SEQPACKET``."""

    def __init__(self, end: socket.socket, *, blocks: bool = True) -> None:
        self._socket = end
        # Blocking or not, whatever socket.setdefaulttimeout() says.
        end.setblocking(blocks)
        # A worker process ends without unwinding; no ResourceWarning for its sockets.
        weakref.finalize(self, end.close).atexit = False
        self.fileno = end.fileno

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        """Return the ends of a new channel; the first one, the loader's, never blocks.

        Each has its own owner.
        """
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (one, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return cls(one, blocks=False), cls(other)

    @classmethod
    def adopt(cls, descriptor: int) -> "Channel":
        """Return a channel over a descriptor that was inherited or received."""
        channel = cls(socket.socket(fileno=descriptor))
        _ADOPTED.append(channel)
        return channel

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send a frame with copies of ``descriptors``; return whether there was room.

        Raises:
            OSError: If the other end is gone (``EPIPE``, ``ECONNRESET``).
        """
        if len(frame) <= MAX_INLINE:
            return self._send((_INLINE, frame), descriptors)
        file = os.memfd_create("aioloader-frame")
        try:
            os.truncate(file, len(frame))
            os.pwrite(file, frame, 0)
            return self._send((_IN_FILE,), (*descriptors, file))
        finally:
            os.close(file)

    def _send(self, parts: Sequence[bytes], descriptors: Sequence[int]) -> bool:
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                self._socket.sendmsg(parts, extra)
            else:
                self._socket.sendmsg(parts)
        except BlockingIOError:
            return False
        return True

    def receive(self, flags: int = 0) -> tuple[bytes | memoryview, list[int]] | None:
        """Return the next frame and its descriptors, now owned by the caller.

        None if there is none yet, on an end that never blocks or with ``NO_WAIT``.

        Raises:
            EOFError: If the other end is gone and all its frames have been read.
        """
        flags |= _CLOSE_ON_EXEC
        try:
            try:
                data, extra, _, _ = self._socket.recvmsg(MAX_INLINE + 1, _SPACE, flags)
            except ConnectionResetError:
                # It left our frames unread: reported once, before its own frames.
                data, extra, _, _ = self._socket.recvmsg(MAX_INLINE + 1, _SPACE, flags)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError("the other process is gone")
        descriptors = _descriptors(extra) if extra else []
        if data[0] == 0:
            return memoryview(data)[1:], descriptors
        file = descriptors.pop()
        try:
            return os.pread(file, os.fstat(file).st_size, 0), descriptors
        finally:
            os.close(file)

    def pause(self, seconds: float | None) -> None:
        """Sleep; None: forever.

        Raises:
            EOFError: As soon as the other end is gone.
        """
        poll = select.poll()
        poll.register(self.fileno(), 0)  # hanging up is reported in any case
        if poll.poll(None if seconds is None else seconds * 1000):
            raise EOFError("the other process is gone")

    def finish(self) -> None:
        """Let the other end see the end of this side's frames."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def _descriptors(extra: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _INT])
    return list(found)
