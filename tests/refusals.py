"""Is something refused with exactly this message?"""

import re
from contextlib import AbstractContextManager

import pytest


def refused(message: str, error: type[Exception] = ValueError) -> AbstractContextManager[object]:
    """The block under it must raise ``error``, and say ``message``, all of it."""
    return pytest.raises(error, match=rf"\A{re.escape(message)}\Z")
