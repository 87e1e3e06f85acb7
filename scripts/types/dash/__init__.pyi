# dash makes its components when it is built, and their annotations take no data-* attribute.
from typing import Any

def __getattr__(name: str) -> Any: ...
