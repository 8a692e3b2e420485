"""Writes pictures into an MP4 file that plays up to its last picture, whatever happens to the
process that writes it.
"""

from pathlib import Path
from typing import Any

import numpy as np

_CODECS = ("libx264", "libopenh264", "mpeg4")


class VideoFile:
    """A film of pictures of one size, which must be even. Each picture is a fragment of its own,
    written at once.
    """

    def __init__(self, path: Path, width: int, height: int, fps: int) -> None:
        import av

        path.parent.mkdir(parents=True, exist_ok=True)
        # The table of contents comes first and is empty; what each fragment holds stands before it.
        options = {
            "movflags": "frag_every_frame+empty_moov+default_base_moof",
            "flush_packets": "1",
        }
        self._container: Any = av.open(str(path), "w", format="mp4", options=options)
        codec = next(name for name in _CODECS if name in av.codecs_available)
        self._stream: Any = self._container.add_stream(codec, rate=fps)
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.gop_size = fps
        self._stream.max_b_frames = 0
        if codec == "libx264":  # no picture is held back to look at the next
            self._stream.options = {"tune": "zerolatency", "preset": "veryfast", "crf": "18"}
        else:
            self._stream.bit_rate = width * height * fps // 4
        self._make: Any = av.VideoFrame.from_ndarray
        self._count = 0

    def add(self, picture: np.ndarray) -> None:
        """Appends a picture (height, width, RGB)."""
        frame = self._make(picture, format="rgb24")
        frame.pts = self._count
        self._count += 1
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        """Ends the film."""
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        self._container.close()
