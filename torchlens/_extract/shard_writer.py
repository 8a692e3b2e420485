"""Writes shards in a thread, while the model runs on the next batch."""

from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from torchlens._extract.pipeline import Processed
from torchlens._extract.shard_files import ShardFile

_END = object()


class ShardWriter:
    """Takes batches, and writes them to the shard that is named; `close` waits for the last."""

    def __init__(self, folder: Path, tag: str) -> None:
        self._folder = folder
        self._tag = tag
        self._queue: Queue[Any] = Queue(2)
        self._error: BaseException | None = None
        self._thread = Thread(target=self._write, name="torchlens-features", daemon=True)
        self._thread.start()

    def put(self, shard: str, batch: Processed) -> None:
        """Adds a batch to a shard."""
        self._send((shard, batch))

    def finish_shard(self, shard: str) -> None:
        """Marks a shard done, once its batches are written."""
        self._send((shard, None))

    def _send(self, item: Any) -> None:
        self._queue.put(item)
        if self._error is not None:
            self._raise()

    def close(self, *, is_failed: bool = False) -> None:
        """Ends the thread; an unfinished shard leaves no files."""
        self._queue.put(_END)
        self._thread.join()
        if self._error is not None and not is_failed:
            self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        assert error is not None
        raise error

    def _write(self) -> None:
        shard: ShardFile | None = None
        while (item := self._queue.get()) is not _END:
            if self._error is not None:
                continue
            name, batch = item
            try:
                if shard is None:
                    shard = ShardFile(self._folder, name, self._tag)
                if batch is None:
                    shard.finish()
                    shard = None
                else:
                    shard.append(batch.rows, batch.ids, batch.skipped)
            except BaseException as error:  # raised again where batches are given
                error.add_note(f"torchlens: raised when writing shard {name} of {self._folder}.")
                self._error = error
        if shard is not None:
            shard.drop()
