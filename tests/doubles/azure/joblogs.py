"""A job's log files: append blobs that grow in steps, as with the platform's uploader."""

import threading
import time
from collections import deque

from doubles.azure.blobstore import Blob, Blobs
from doubles.azure.jobs import Job
from doubles.azure.names import ARTIFACTS

FLUSH_S = 0.1  # between two appends to a log blob


class LogFiles:
    """Collects the output of a job's processes; a separate thread appends it every FLUSH_S."""

    def __init__(self, blobs: Blobs, job: Job, lag_s: float = 0.0) -> None:
        self._blobs, self._job, self._lag_s = blobs, job, lag_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._waiting: deque[tuple[float, str, bytes]] = deque()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, file: str, data: bytes) -> None:
        """Buffer bytes for a file."""
        with self._lock:
            self._waiting.append((time.monotonic() + self._lag_s, file, data))

    def note(self, file: str, text: str) -> None:
        """Buffer a line of the platform itself."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.write(file, f"{stamp} {text}\n".encode())

    def close(self) -> None:
        """Append the buffered rest; return when the blobs have it. A lag of the settings goes on after the end."""
        self._ended.set()
        if not self._lag_s:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self._flush()
        while self._waiting:
            time.sleep(max(0.0, self._waiting[0][0] - time.monotonic()))
            self._flush()

    def _flush(self) -> None:
        waiting: dict[str, bytearray] = {}
        with self._lock:
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, file, data = self._waiting.popleft()
                waiting.setdefault(file, bytearray()).extend(data)
        for file, found in waiting.items():
            write(self._blobs, self._job, file, bytes(found))


def write(blobs: Blobs, job: Job, file: str, data: bytes, anew: bool = False) -> None:
    """Append to a log file; make a missing file, and with `anew` replace an existing file."""
    name = f"{job.folder}/{file}"
    with blobs.lock:
        if anew or blobs.find(ARTIFACTS, name) is None:
            blobs.put(ARTIFACTS, name, b"", Blob(kind="AppendBlob", content_type="text/plain"))
        if data:
            blobs.append(ARTIFACTS, name, data)


def file_of(process: int, count: int) -> str:
    """Return the log file of a process, for a job with `count` processes."""
    if count == 1:
        return "user_logs/std_log.txt"
    digits = len(str(count - 1))
    return f"user_logs/std_log_process_{process:0{digits}}.txt"
