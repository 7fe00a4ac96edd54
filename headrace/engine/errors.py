"""Every error a user can meet. A leaf module: any room may import it, it imports nothing.

Each message is one line: what failed, why, what to do. `HeadraceError` is what the command line
catches and prints without a traceback; anything else that escapes is a fault of ours and keeps its
traceback.
"""


class HeadraceError(Exception):
    """Base of all errors whose message is meant for the user."""


class ConfigError(HeadraceError):
    """A setting that cannot work, alone or with the others."""


class ModelNotFoundError(HeadraceError):
    """The model's name leads to no file that can be read."""


class LoadError(HeadraceError):
    """A model's files are broken, incomplete or of an unsupported kind."""


class OutOfMemoryError(HeadraceError):
    """Weights, state or the KV cache do not fit."""


class EngineDeadError(HeadraceError):
    """The engine's loop ended by an error; the cause is chained."""


class BadRequestError(HeadraceError):
    """A request that cannot be served. Ends that request only.

    Args:
        message: what is wrong and what to do.
        param: the request's field at fault, as the client spelled it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
