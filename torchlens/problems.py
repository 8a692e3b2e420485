"""What could not be measured or recorded, each thing said once."""

import traceback
from pathlib import Path

__all__ = ["Problems"]

_PACKAGE = str(Path(__file__).parent)
# A loop that fails in ever new words does not fill the memory.
_MOST = 1000


class Problems(list[str]):
    """Sentences without a full stop, in the order they came up. `subject` is what fails where something here goes wrong."""

    def __init__(self, subject: str = "the profile itself") -> None:
        super().__init__()
        self._subject = subject

    def add(self, sentence: str) -> None:
        """Says something, unless it has been said."""
        if sentence not in self and len(self) < _MOST:
            self.append(sentence)

    def add_failure(self, error: BaseException, consequence: str) -> None:
        """Something here went wrong: what, where, and what follows from it."""
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
        place = f", {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
        self.add(f"{consequence}: {self._subject} failed ({type(error).__name__}: {error}{place})")
