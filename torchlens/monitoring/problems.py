"""What could not be recorded, each thing said once."""

import traceback
from pathlib import Path

__all__ = ["Problems"]

_PACKAGE = str(Path(__file__).parent.parent)
# A loop that fails in ever new words does not fill the file.
_MOST = 200


class Problems(list[str]):
    """Sentences without a full stop, in the order they came up."""

    def add(self, sentence: str) -> None:
        """Says something, unless it has been said."""
        if sentence not in self and len(self) < _MOST:
            self.append(sentence)

    def add_failure(self, error: BaseException, consequence: str) -> None:
        """Something here went wrong: what, where, and what follows from it."""
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
        place = f", {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
        self.add(f"{consequence}: the monitor failed ({type(error).__name__}: {error}{place})")
