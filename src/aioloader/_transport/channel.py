"""Frames (whole messages) that processes exchange through a socket pair or a pipe.

``SOCK_SEQPACKET`` sockets preserve message boundaries and can carry descriptors. If
several readers share one end, each message goes to one of them. After the peer's last
message, an empty message reports that the peer is gone.
"""

import array
import contextlib
import io
import os
import select
import socket
import struct
from collections.abc import Sequence

# A larger frame is written to a memory file, whose descriptor is sent.
MAX_INLINE = 1 << 16
# The most descriptors per frame; a large frame has one more, for its memory file.
MAX_DESCRIPTORS = 31
# The send buffer's size, for frames not read yet; the kernel may grant less.
_BUFFER_BYTES = 1 << 21
_INLINE, _IN_FILE = b"\0", b"\1"
# In a pipe, a frame follows its length. The kernel keeps small writes whole, even if
# several processes write or one is killed. One read may return several frames.
_SIZE = struct.Struct("<H")
if hasattr(socket, "MSG_CMSG_CLOEXEC"):  # Linux: elsewhere there are no channels
    # As plain integers: an enum's `|` costs as much as the call.
    _CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
    NO_WAIT = int(socket.MSG_DONTWAIT)
    _SPACE = socket.CMSG_LEN((MAX_DESCRIPTORS + 1) * array.array("i").itemsize)
else:
    _CLOSE_ON_EXEC = NO_WAIT = _SPACE = 0

# Keeps the channels of a child process open until it exits.
_ADOPTED: list["Channel"] = []


class Channel(socket.socket):
    """One end of a connected pair of ``SOCK_SEQPACKET`` sockets."""

    # No ResourceWarning: a worker process ends without unwinding.
    __del__ = socket.socket.close

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        """Return a non-blocking end for a loader and a blocking end for a worker."""
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loader_end, worker_end = [cls(fileno=end.detach()) for end in pair]
        for end in (loader_end, worker_end):
            # Independent of socket.setdefaulttimeout().
            end.setblocking(end is worker_end)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return loader_end, worker_end

    @classmethod
    def adopt(cls, descriptor: int) -> "Channel":
        """Return a blocking channel for an inherited or received descriptor."""
        channel = cls(fileno=descriptor)
        channel.setblocking(True)  # noqa: FBT003  (its only argument)
        _ADOPTED.append(channel)
        return channel

    def send_frame(self, frame: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send a frame with copies of ``descriptors``; return whether there was room.

        Raises:
            OSError: If the peer is gone (``EPIPE``, ``ECONNRESET``).
        """
        try:
            if len(frame) > MAX_INLINE:
                self._send_in_file(frame, descriptors)
            elif descriptors:
                socket.send_fds(self, (_INLINE, frame), descriptors)
            else:
                self.sendmsg((_INLINE, frame))
        except BlockingIOError:
            return False
        return True

    def _send_in_file(self, frame: bytes, descriptors: Sequence[int]) -> None:
        file = os.memfd_create("aioloader-frame")
        try:
            os.truncate(file, len(frame))
            os.pwrite(file, frame, 0)
            socket.send_fds(self, (_IN_FILE,), [*descriptors, file])
        finally:
            os.close(file)

    def receive_frame(
        self, flags: int = 0
    ) -> tuple[bytes | memoryview, list[int]] | None:
        """Return the next frame and its descriptors, which the caller then owns.

        Return None if there is no frame yet and the call does not block.

        Raises:
            EOFError: If the peer is gone and all its frames have been read.
        """
        flags |= _CLOSE_ON_EXEC
        try:
            try:
                data, extra, _, _ = self.recvmsg(MAX_INLINE + 1, _SPACE, flags)
            except ConnectionResetError:
                # The peer left our frames unread: reported once, before its own frames.
                data, extra, _, _ = self.recvmsg(MAX_INLINE + 1, _SPACE, flags)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError("the other process is gone")
        descriptors = array.array("i", extra[0][2]).tolist() if extra else []
        if data[0] == 0:
            return memoryview(data)[1:], descriptors
        file = descriptors.pop()
        try:
            return os.pread(file, os.fstat(file).st_size, 0), descriptors
        finally:
            os.close(file)

    def pause(self, seconds: float | None) -> None:
        """Sleep for ``seconds`` or forever; raise ``EOFError`` if the peer is gone."""
        poll = select.poll()
        poll.register(self, 0)  # hanging up is reported in any case
        if poll.poll(None if seconds is None else seconds * 1000):
            raise EOFError("the other process is gone")


def write_small(pipe: int, frame: bytes) -> bool:
    """Write a frame to a pipe; return False if the frame is large or the pipe full."""
    with contextlib.suppress(BlockingIOError):
        if len(frame) + _SIZE.size <= select.PIPE_BUF:
            os.write(pipe, _SIZE.pack(len(frame)) + frame)
            return True
    return False


def read_small(pipe: io.FileIO, rest: bytes) -> tuple[list[memoryview], bytes]:
    """Read a pipe; return whole frames, and the bytes for the next call's ``rest``."""
    rest += pipe.read(MAX_INLINE) or b""
    frames, view, used = list[memoryview](), memoryview(rest), 0
    while len(rest) >= (start := used + _SIZE.size):
        end = start + _SIZE.unpack_from(rest, used)[0]
        if end > len(rest):
            break
        frames.append(view[start:end])
        used = end
    return frames, rest[used:]
