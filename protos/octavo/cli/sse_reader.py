"""Server-sent events out of raw HTTP/1.1 bytes, however the network cuts them.

No I/O. Entry point: `EventReader`.
"""

_DATA = b"data:"


class EventReader:
    """Feed what arrives; get the payloads of the events that it completed."""

    def __init__(self, head: bytes) -> None:
        """`head`: the answer's head, in lower case."""
        self._chunks = _ChunkDecoder() if b"transfer-encoding: chunked" in head else None
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._chunks is not None:
            data = self._chunks.feed(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


class _ChunkDecoder:
    """Chunked transfer coding (RFC 9112, section 7.1) without its frame."""

    def __init__(self) -> None:
        self._rest = b""
        # Bytes of the open chunk still to come, its closing CRLF included; 0 = a size comes.
        self._open_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Raises ValueError if the coding is broken."""
        data = self._rest + data
        parts: list[bytes] = []
        at = 0
        while at < len(data):
            if self._open_bytes:
                piece = data[at : at + self._open_bytes]
                # The last two bytes are CRLF, of which one may be here.
                parts.append(piece[: max(0, self._open_bytes - 2)])
                self._open_bytes -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                break
            size = int(data[at:end].partition(b";")[0].strip() or b"0", 16)
            # The last chunk has no bytes; trailers after it are lines that hold no event.
            at = end + 1
            if size == 0:
                at = len(data)
                break
            self._open_bytes = size + 2
        self._rest = data[at:]
        return b"".join(parts)
