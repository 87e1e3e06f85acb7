"""Clients of what fsspec reaches: which one opens an address, and what they raise, as one line of ours."""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

_CLIENTS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
"""By protocol, fsspec's own client; where it is not installed, obstore takes its place."""


class Asked:
    """An fsspec client whose failures are OSErrors of one line: each has errors of its own, and some fill pages."""

    def __init__(self, fs: Any, url: str) -> None:
        self.client, self._url = fs, url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        return self._told(found) if callable(found) else found

    def _told(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def ask(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except (FileNotFoundError, FileExistsError):
                raise  # an answer
            except Exception as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise OSError(
                    f"{self._url} does not answer as it should; check address and credentials: {said}"
                ) from error

        return ask


def opened(url: str) -> tuple[Any, str, bool]:
    """(client, path of the address in it, whether that is a folder of this machine).

    Raises: ValueError for an address that no installed client knows.
    """
    import fsspec

    protocol = url.partition("://")[0] if "://" in url else ""
    client = _CLIENTS.get(protocol)
    if client is not None and find_spec(client) is None:
        if find_spec("obstore") is None:
            raise ValueError(f"{url}: neither {client} nor obstore is installed; pip install 'cacheprobe[sweep]'")
        from obstore.fsspec import FsspecStore, register

        if not issubclass(fsspec.registry.get(protocol, object), FsspecStore):
            register(protocol)
    try:
        # a client that is kept would not see that the environment names another server
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be opened: {error}") from error
    return (fs, root, True) if "file" in _protocols(fs) else (Asked(fs, url), root, False)


def put_new(fs: Asked, path: str, data: bytes) -> None:
    """Put an object on the condition that there is none of its name.

    Raises: FileExistsError where there is, OSError where the store does not know the condition.
    """
    if not any(base.__module__ == "obstore.fsspec" for base in type(fs.client).__mro__):
        return fs.pipe_file(path, data, mode="create")
    # obstore's fsspec client takes mode="create" and overwrites all the same
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
    from obstore.store import from_url

    bucket, _, key = path.partition("/")
    try:
        obstore.put(from_url(f"{_protocols(fs.client)[0]}://{bucket}"), key, data, mode="create")
    except (AlreadyExistsError, PreconditionError) as error:
        raise FileExistsError(path) from error
    except BaseError as error:
        said = str(error).strip().splitlines()[0]
        raise OSError(
            f"{path} cannot be put on the condition that it is not there: {said}; where the store knows no such "
            "condition, and nothing else writes there, give --alone"
        ) from error


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
