"""A folder served as an S3 bucket on 127.0.0.1, with latency and a count of requests: `python -m benchmarks.s3_stub`.

Invariant: every request waits the latency once and is counted by its kind, and nothing else is slow: one thread on an
event loop answers thousands of requests per second from the page cache. Object `s3://BUCKET/KEY` is the file
`ROOT/BUCKET/KEY`. It knows what readers of a table and of shared plans use: GET with ranges, HEAD, PUT in one piece,
DELETE and ListObjectsV2; credentials are not looked at. `GET /_stats` answers the counts, without latency.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from xml.sax.saxutils import escape

from benchmarks.harness import ROOT as REPOSITORY

Reply = tuple[int, dict[str, str], bytes]
REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 416: "Range Not Satisfiable"}
XML = {"Content-Type": "application/xml"}
LIST_KEYS = 1000
"""Keys per answer of a listing, as in S3."""


@contextmanager
def served(root: Path, latency_seconds: float) -> Iterator[str]:
    """A stub in a process of its own while the context lasts; gives its endpoint."""
    command = [sys.executable, "-m", "benchmarks.s3_stub", str(root), str(latency_seconds)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def stats(endpoint: str) -> dict[str, int]:
    """Requests so far by kind (`get`, `head`, `list`, `put`, `delete`), and `bytes` answered."""
    with urllib.request.urlopen(f"{endpoint}/_stats") as answer:
        return cast(dict[str, int], json.load(answer))


class Bucket:
    """Answers requests from the files below a folder."""

    def __init__(self, root: Path):
        self.root, self.counts = root, Counter[str]()
        self._open: dict[Path, int] = {}

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """The reply to one request."""
        url = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        kind = "list" if method == "GET" and not key else method.lower()
        self.counts[kind] += 1
        path = self.root / bucket / key
        if kind == "list":
            return 200, XML, self._list(self.root / bucket, query)
        if kind == "put":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            self._forget(path)
            return 200, {"ETag": _etag(path.stat())}, b""
        if kind == "delete":
            path.unlink(missing_ok=True)
            self._forget(path)
            return 204, {}, b""
        if not path.is_file():
            return 404, XML, b"" if kind == "head" else b"<Error><Code>NoSuchKey</Code></Error>"
        return self._get(kind, path, headers.get("range"))

    def _get(self, kind: str, path: Path, wanted: str | None) -> Reply:
        fd = self._open.setdefault(path, -1)
        if fd < 0:
            fd = self._open[path] = os.open(path, os.O_RDONLY)
        state = os.fstat(fd)
        modified = email.utils.formatdate(state.st_mtime, usegmt=True)
        headers = {"ETag": _etag(state), "Last-Modified": modified, "Accept-Ranges": "bytes"}
        if kind == "head":
            return 200, {**headers, "Content-Length": str(state.st_size)}, b""
        if wanted is None:
            return 200, headers, os.pread(fd, state.st_size, 0)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, state.st_size - int(last))
        stop = min(state.st_size, int(last) + 1) if first and last else state.st_size
        if start >= state.st_size:
            return 416, XML, b"<Error><Code>InvalidRange</Code></Error>"
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{state.st_size}"
        return 206, headers, os.pread(fd, stop - start, start)

    def _forget(self, path: Path) -> None:
        if (fd := self._open.pop(path, -1)) >= 0:
            os.close(fd)

    def _list(self, base: Path, query: Mapping[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        paths = (path for path in (base / prefix.rpartition("/")[0]).rglob("*") if path.is_file())
        found = {path.relative_to(base).as_posix(): path for path in paths}
        names = sorted(name for name in found if name.startswith(prefix) and name > after)
        folders, keys = dict[str, None](), list[str]()
        for name in names:
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if cut:
                folders[prefix + head + cut] = None
            else:
                keys.append(name)
        more, keys = len(keys) > LIST_KEYS, keys[:LIST_KEYS]
        items = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
        items += [f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>"] if more else []
        items += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
        for key in keys:
            state = found[key].stat()
            when = email.utils.parsedate_to_datetime(email.utils.formatdate(state.st_mtime, usegmt=True))
            items.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
                f"<ETag>{escape(_etag(state))}</ETag><Size>{state.st_size}</Size></Contents>"
            )
        head = f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys) + len(folders)}</KeyCount>"
        return f"<ListBucketResult>{head}{''.join(items)}</ListBucketResult>".encode()


class Connection(asyncio.Protocol):
    """One client's connection: a request at a time."""

    def __init__(self, bucket: Bucket, latency_seconds: float):
        self._bucket, self._latency = bucket, latency_seconds
        self._received, self._is_busy, self._is_welcome = bytearray(), False, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Collect bytes until there is a request."""
        self._received += data
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        first, *lines = self._received[:end].decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect") and not self._is_welcome:
            self._is_welcome = True
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        stop = end + 4 + int(headers.get("content-length", 0))
        if len(self._received) < stop:
            return
        body = bytes(self._received[end + 4 : stop])
        del self._received[:stop]
        if "aws-chunked" in headers.get("content-encoding", ""):
            body = _unchunked(body)
        if target == "/_stats":
            self._send(method, (200, {}, json.dumps(self._bucket.counts).encode()))
            return
        self._is_busy = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._latency, self._reply, method, target, headers, body)

    def _reply(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        reply = self._bucket.answer(method, target, headers, body)
        self._bucket.counts["bytes"] += len(reply[2])
        self._is_busy = self._is_welcome = False
        self._send(method, reply)
        self._next()

    def _send(self, method: str, reply: Reply) -> None:
        code, headers, body = reply
        headers = {"Content-Length": str(len(body)), **headers}
        lines = [f"HTTP/1.1 {code} {REASONS[code]}", *(f"{name}: {value}" for name, value in headers.items())]
        self._transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)


def _unchunked(body: bytes) -> bytes:
    """Content of a body in signed chunks: `<size in hex>;...` before each, the last one empty."""
    parts, at = [], 0
    while size := int(body[at : body.index(b"\r\n", at)].split(b";")[0], 16):
        at = body.index(b"\r\n", at) + 2
        parts.append(body[at : at + size])
        at += size + 2
    return b"".join(parts)


def _etag(state: os.stat_result) -> str:
    return f'"{state.st_mtime_ns:x}-{state.st_size:x}"'


async def _serve(root: Path, latency_seconds: float) -> None:
    bucket, loop = Bucket(root), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(bucket, latency_seconds), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
