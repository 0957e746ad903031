import pickle

import pytest

from carmil.errors import LONGEST, CarmilError


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a.csv: no  labels", "a.csv: no  labels"),
        ("a.json: bad\n  at line 3\r\n", "a.json: bad at line 3"),
        ("slide '\x1b[2J\x07'", "slide '\\x1b[2J\\x07'"),
        ("a\u2028b\ud800", "a\\u2028b\\ud800"),
        ("Größe 5 µm", "Größe 5 µm"),
        ("x" * 9999, "x" * (LONGEST - 4) + " ..."),
    ],
)
def test_error_message_is_one_printable_line_of_limited_length(given, message):
    assert str(CarmilError(given)) == message
    assert str(pickle.loads(pickle.dumps(CarmilError(given)))) == message
