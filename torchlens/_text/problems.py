"""The list of what could not be measured or recorded, without repetitions."""

import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
# A loop that fails with a new message each time must not fill the memory.
_MOST = 1000


class Problems(list[str]):
    """Sentences without a full stop, in order of occurrence. `subject` names the part whose own
    failures it also lists.
    """

    def __init__(self, subject: str = "the profile itself") -> None:
        super().__init__()
        self._subject = subject

    def add(self, sentence: str) -> None:
        """Appends a sentence unless it is already in the list."""
        if sentence not in self and len(self) < _MOST:
            self.append(sentence)

    def add_failure(self, error: BaseException, consequence: str) -> None:
        """Appends a failure of torchlens itself: the consequence, the error, and where it was
        raised.
        """
        places = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename.startswith(_PACKAGE)
        ]
        place = f", {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
        self.add(f"{consequence}: {self._subject} failed ({type(error).__name__}: {error}{place})")
