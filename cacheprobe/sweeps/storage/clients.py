"""Opens fsspec addresses with the installed client, and turns the clients' errors into one line."""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

P = ParamSpec("P")
R = TypeVar("R")

_CLIENTS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
"""fsspec's own client for each protocol; if it is not installed, obstore is used."""


class Asked:
    """Wraps an fsspec client so that its failures are OSErrors of one line; each client has its own errors, some a page
    long.
    """

    def __init__(self, fs: "AbstractFileSystem", url: str) -> None:
        self.client, self._url = fs, url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        return self._with_short_errors(found) if callable(found) else found

    def _with_short_errors(self, method: Callable[P, R]) -> Callable[P, R]:
        """Returns the method with its errors turned into OSErrors of one line."""

        @wraps(method)
        def ask(*arguments: P.args, **named: P.kwargs) -> R:
            """Calls the client's method."""
            try:
                return method(*arguments, **named)
            except (FileNotFoundError, FileExistsError):
                raise  # these say whether the file is there, and are no failure
            except Exception as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise OSError(
                    f"{self._url} does not answer as it should; check address and credentials: {said}"
                ) from error

        return ask


def opened(url: str) -> tuple[Any, str, bool]:
    """Returns (client, path of the address for the client, whether the path is a folder of this machine).

    The client is fsspec's for a folder, else an `Asked`.
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
        # a cached client would not notice that the environment now names another server
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be opened: {error}") from error
    return (fs, root, True) if "file" in _protocols(fs) else (Asked(fs, url), root, False)


def put_new(fs: Asked, path: str, data: bytes) -> None:
    """Puts an object on the condition that there is none of its name.

    Raises: FileExistsError if there is one, OSError if the store does not support the condition.
    """
    if not any(base.__module__ == "obstore.fsspec" for base in type(fs.client).__mro__):
        return fs.pipe_file(path, data, mode="create")
    # obstore's fsspec client accepts mode="create", but overwrites the object
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


def _protocols(fs: "AbstractFileSystem") -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
