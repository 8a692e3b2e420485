"""How many calls a tail saw, and why some of them are not in the file: each call is either written
or counted.
"""

import threading

RECORDED_ELSEWHERE = "they were made inside a call that another log or tail was recording"


class CallCounts:
    """The calls of one tail, which records one in `every`. For all threads."""

    def __init__(self, every: int) -> None:
        self.num_seen = 0
        self._every = every
        self._reasons: dict[str, int] = {}  # why calls are not in the file, and how many
        self._lock = threading.Lock()

    def next_number(self) -> int | None:
        """The number of a call that begins; None if it is not to be recorded."""
        with self._lock:
            self.num_seen += 1
            return None if (self.num_seen - 1) % self._every else self.num_seen

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts calls that should be in the file and are not. The reason reads as what comes after
        `because`.
        """
        if count > 0:
            with self._lock:
                self._reasons[reason] = self._reasons.get(reason, 0) + count

    def drop_rest(self, reason: str, num_written: int) -> None:
        """The recording broke off: counts all that were neither written nor counted."""
        self.drop(reason, -(-self.num_seen // self._every) - num_written - self.num_dropped)

    @property
    def num_dropped(self) -> int:
        return sum(self._reasons.values())

    def warning(self, file_name: str) -> str | None:
        """What to tell at the end, if calls are missing."""
        if not self._reasons:
            return None
        reasons = self._reasons.items()
        why = (
            next(iter(self._reasons))
            if len(reasons) == 1
            else "; ".join(f"{count} because {why}" for why, count in reasons)
        )
        return (
            f"torchlens: {self.num_dropped} of {self.num_seen} calls are not in {file_name}: {why}."
        )

    def facts(self) -> dict[str, int]:
        """What the file says of itself."""
        return {"calls": self.num_seen, "dropped": self.num_dropped, "every": self._every}
