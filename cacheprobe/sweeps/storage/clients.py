"""Opens fsspec addresses with the installed client, and turns the errors of a client into OSErrors of one line."""

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
"""Package of fsspec's own client for each protocol. If the package is not installed, obstore is used."""


class ShortErrors:
    """Wraps an fsspec client: a failure of one of its methods becomes an OSError with a message of one line.
    FileNotFoundError and FileExistsError stay as they are."""

    def __init__(self, fs: "AbstractFileSystem", url: str) -> None:
        self.client, self._url = fs, url

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.client, name)
        return self._with_short_errors(attribute) if callable(attribute) else attribute

    def _with_short_errors(self, method: Callable[P, R]) -> Callable[P, R]:
        """Returns `method` with every error, except missing and existing files, turned into an OSError of one line."""

        @wraps(method)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            """Calls the method of the client, and shortens its errors."""
            try:
                return method(*arguments, **named)
            except (FileNotFoundError, FileExistsError):
                raise  # whether a file exists is an answer, not a failure
            except Exception as error:
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise OSError(
                    f"{self._url} does not answer as it should; check address and credentials: {first_line}"
                ) from error

        return call


def opened(url: str) -> tuple[Any, str, bool]:
    """Opens an fsspec address. Returns (client, path of the address in the client, True if it is a local folder).

    The client is fsspec's own for a local folder, else a `ShortErrors`.
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
    return (fs, root, True) if "file" in _protocols(fs) else (ShortErrors(fs, url), root, False)


def put_new(fs: ShortErrors, path: str, data: bytes) -> None:
    """Puts an object into a store on the condition that no object at `path` exists.

    Raises: FileExistsError if one exists, OSError for another failure, as of a store that refuses the condition. A
    store that ignores the condition overwrites the object.
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
        first_line = str(error).strip().splitlines()[0]
        raise OSError(
            f"{path} cannot be put on the condition that it is not there: {first_line}; where the store knows no such "
            "condition, and nothing else writes there, give --alone"
        ) from error


def _protocols(fs: "AbstractFileSystem") -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
