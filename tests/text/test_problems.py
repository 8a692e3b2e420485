"""The list of what could not be measured or recorded."""

import pytest

from torchlens._text.error_wording import check_count
from torchlens._text.problems import Problems


def test_a_failure_of_ours_names_the_file_and_line_that_raised():
    problems = Problems()
    with pytest.raises(ValueError, match="at least 1") as raised:
        check_count("every", 0, 1)
    problems.add_failure(raised.value, "The profile ends here")
    assert "wording.py:" in problems[0]


def test_a_sentence_is_listed_once():
    problems = Problems()
    problems.add("The model was not called")
    problems.add("The model was not called")
    assert problems == ["The model was not called"]
