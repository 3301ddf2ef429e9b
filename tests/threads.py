"""How do tests let two threads meet in the same moment?"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def read_while(answer: Callable[[], None], read: Callable[[], None]) -> None:
    """Call ``read`` again and again while another thread runs ``answer``, which begins once it was read."""
    is_read = threading.Event()

    def answer_then() -> None:
        is_read.wait()
        answer()

    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer_then)
        try:
            while not answering.done():
                read()
                is_read.set()
        finally:
            is_read.set()
    answering.result()
