# plotly's annotations do not know the attributes that it makes when a figure is built.
from typing import Any

def __getattr__(name: str) -> Any: ...
